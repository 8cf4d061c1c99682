//! A storm of transfers between fifty accounts, in tasks of one process or of processes that are
//! killed. A transfer reads the balances of its accounts and then writes them. The sum of all
//! balances never changes, unless two transfers of one account overlap.
//!
//! The balances are in the memory of the bank, or in a table of the database that has the locks. A
//! transfer of the table is a transaction that checks the fences of its accounts.

use std::{
    collections::{BTreeMap, BTreeSet},
    error::Error,
    future::IntoFuture,
    net::SocketAddr,
    time::Duration,
};

use fastrand::Rng;
use futures_util::future::join_all;
use tokio::{
    runtime::Handle,
    time::{sleep, timeout},
};
use tower_lock::{LockManager, lock::LockGuards};

use crate::{
    database::{Database, Session},
    kills::Progress,
    ledger::{Ledger, LedgerClient, LedgerServer},
};

type Failure = Box<dyn Error + Send + Sync>;

/// The accounts of all processes, and the sections in which they are used.
#[derive(Debug)]
pub struct Bank(LedgerServer<Books>);

#[derive(Debug)]
struct Books {
    accounts: BTreeMap<u64, Account>,
    /// Transfers end when so many are done.
    wanted: u64,
    done: u64,
    violations: Vec<String>,
}

#[derive(Debug)]
struct Account {
    balance: i64,
    last_token: u64,
    /// The connection whose section uses it.
    used_by: Option<u64>,
}

/// Which keys a transfer locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// All of its accounts.
    All,
    /// A defect: only the first one.
    First,
}

/// The balances in a table.
struct Table(Session);

/// The number of accounts.
const ACCOUNTS: u64 = 50;
/// The first balance of each.
const BALANCE: i64 = 1_000;
/// The transfers of one process that are under way.
const TASKS: u64 = 16;
/// The same of a table, whose transfers take longer: most of them are in their transactions.
const TABLE_TASKS: u64 = 8;

impl Bank {
    /// Opens a bank that ends the transfers when so many are done.
    ///
    /// # Panics
    ///
    /// Panics without a free port.
    pub async fn open(wanted: u64) -> Self {
        let account = || Account { balance: BALANCE, last_token: 0, used_by: None };
        let accounts = (0..ACCOUNTS).map(|number| (number, account())).collect();
        Self(LedgerServer::start(Books { accounts, wanted, done: 0, violations: Vec::new() }).await)
    }

    /// Opens a bank whose balances are in a table of this database. The bank counts the transfers.
    ///
    /// # Panics
    ///
    /// Panics without a free port, and if the server is down.
    pub async fn open_table(database: &Database, wanted: u64) -> Self {
        database.value("CREATE TABLE accounts (number INT PRIMARY KEY, balance INT NOT NULL)").await;
        let rows: Vec<_> = (0..ACCOUNTS).map(|number| format!("({number}, {BALANCE})")).collect();
        database.value(&format!("INSERT INTO accounts VALUES {}", rows.join(", "))).await;
        Self::open(wanted).await
    }

    /// A change of the sum in the table.
    ///
    /// # Panics
    ///
    /// Panics if the server is down.
    pub async fn table_violations(&self, database: &Database) -> Vec<String> {
        let sum = database.value("SELECT SUM(balance) FROM accounts").await.and_then(|sum| sum.parse().ok());
        self.violations().into_iter().chain(changed(sum.expect("a number"))).collect()
    }

    /// The address for [`transfer`].
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// The number of transfers.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let Books { done, wanted, .. } = *self.0.lock();
        Progress { done, wanted }
    }

    /// All violations, and a sum that has changed.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        let books = self.0.lock();
        let sum = books.accounts.values().map(|account| account.balance).sum();
        books.violations.iter().cloned().chain(changed(sum)).collect()
    }
}

fn changed(sum: i64) -> Option<String> {
    const FIRST: i64 = BALANCE * 50;
    (sum != FIRST).then(|| format!("the sum was {FIRST} and is {sum}"))
}

impl Books {
    /// A section of this connection begins. The answer has the balances of its accounts.
    fn begin(&mut self, connection: u64, accounts: &[(u64, u64)]) -> String {
        if self.done >= self.wanted {
            return "closed".to_owned();
        }
        let mut balances = Vec::new();
        for (number, token) in accounts {
            let Some(account) = self.accounts.get_mut(number) else { continue };
            if let Some(other) = account.used_by.replace(connection) {
                self.violations.push(format!("{connection} uses account {number} beside {other}"));
            }
            if *token <= account.last_token {
                self.violations.push(format!("token {token} of account {number} follows {}", account.last_token));
            }
            account.last_token = account.last_token.max(*token);
            balances.push(account.balance.to_string());
        }
        balances.join(" ")
    }

    /// Writes all balances of a section in one step, and ends it.
    fn commit(&mut self, connection: u64, balances: &[(u64, i64)]) {
        for (number, balance) in balances {
            let Some(account) = self.accounts.get_mut(number) else { continue };
            if account.used_by != Some(connection) {
                self.violations.push(format!("{connection} writes account {number} outside of its section"));
            }
            account.balance = *balance;
        }
        self.done += 1;
        self.leave(connection);
    }
}

impl Ledger for Books {
    fn reply(&mut self, connection: u64, line: &str) -> Option<String> {
        let mut words = line.split(' ');
        let command = words.next()?;
        let pairs = words.filter_map(|pair| pair.split_once(':'));
        match command {
            "begin" => Some(self.begin(connection, &parse(pairs))),
            "commit" => {
                self.commit(connection, &parse(pairs));
                Some("done".to_owned())
            }
            _ => None,
        }
    }

    fn leave(&mut self, connection: u64) {
        let used = self.accounts.values_mut().filter(|account| account.used_by == Some(connection));
        used.for_each(|account| account.used_by = None);
    }
}

fn parse<'a, T: std::str::FromStr>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<(u64, T)> {
    pairs.filter_map(|(number, value)| Some((number.parse().ok()?, value.parse().ok()?))).collect()
}

/// Transfers money until the bank is closed, in several tasks of this process. With a URL, the
/// balances are in a table there.
///
/// # Errors
///
/// Fails if the connection to the bank or to the database breaks.
pub async fn transfer(
    locks: &LockManager,
    bank: SocketAddr,
    table: Option<&str>,
    keys: Keys,
    seed: u64,
) -> Result<(), Failure> {
    let tasks = (0..if table.is_none() { TASKS } else { TABLE_TASKS }).map(|task| {
        let (locks, table) = (locks.clone(), table.map(str::to_owned));
        let rng = Rng::with_seed(seed.wrapping_mul(1_000).wrapping_add(task));
        Handle::current().spawn(async move {
            let table = match table {
                Some(url) => Some(Table(Session::open(&url).await?)),
                None => None,
            };
            transfer_one_by_one(&locks, bank, table, keys, rng).await
        })
    });
    join_all(tasks).await.into_iter().try_for_each(|result| result?)
}

async fn transfer_one_by_one(
    locks: &LockManager,
    bank: SocketAddr,
    mut table: Option<Table>,
    keys: Keys,
    mut rng: Rng,
) -> Result<(), Failure> {
    let mut bank = LedgerClient::connect(bank).await?;
    loop {
        // A few of them are hot, where transfers do not take long.
        let most = if table.is_none() && rng.bool() { 5 } else { ACCOUNTS };
        let number = if table.is_none() { rng.usize(2..5) } else { 2 };
        let accounts: BTreeSet<_> = (0..number).map(|_| rng.u64(0..most)).collect();
        // Not in order.
        let mut accounts: Vec<_> = accounts.into_iter().collect();
        rng.shuffle(&mut accounts);
        let Some(guards) = acquire(locks, &accounts, keys, &mut rng).await else { continue };
        // A transfer of a table is a transaction, and its section in the bank has no accounts.
        let in_bank = if table.is_none() { &accounts[..] } else { &[] };
        let token = |account: u64| guards.get(("account", account)).map_or(0, |lock| lock.fencing_token().as_u64());
        let begin = in_bank.iter().fold("begin".to_owned(), |line, of| format!("{line} {of}:{}", token(*of)));
        let balances = bank.ask(begin).await?;
        if balances == "closed" {
            drop(guards.release());
            return Ok(());
        }
        let balances = match &mut table {
            Some(table) => table.begin(&accounts, &guards).await?,
            None => Some(balances.split(' ').filter_map(|balance| balance.parse().ok()).collect()),
        };
        let Some(mut balances) = balances else { continue };
        let longest = if table.is_none() { 2_000 } else { 200_000 };
        sleep(Duration::from_micros(rng.u64(0..longest))).await;
        let amount = rng.i64(1..20);
        if let [first, .., last] = &mut balances[..] {
            *first -= amount;
            *last += amount;
        }
        let written: Vec<_> = accounts.iter().copied().zip(balances).collect();
        if let Some(table) = &mut table {
            table.commit(&written).await?;
        }
        let in_bank = if table.is_none() { &written[..] } else { &[] };
        let commit = in_bank.iter().fold("commit".to_owned(), |line, (of, balance)| format!("{line} {of}:{balance}"));
        bank.ask(commit).await?;
        drop(guards.release());
    }
}

// === impl Table ===

impl Table {
    /// Begins a transaction, and reads the balances in it. `None`: a lock is not held any more.
    async fn begin(&mut self, accounts: &[u64], guards: &LockGuards) -> Result<Option<Vec<i64>>, Failure> {
        let Self(session) = self;
        session.values("START TRANSACTION").await?;
        for lock in accounts.iter().filter_map(|account| guards.get(("account", *account))) {
            let check = session.check_fence(&lock);
            match session.values(&check).await {
                Err(error) if format!("{error:?}").contains("is not held any more") => {
                    session.values("ROLLBACK").await?;
                    return Ok(None);
                }
                checked => checked?,
            };
        }
        let mut balances = Vec::new();
        for account in accounts {
            let balance = session.values(&format!("SELECT balance FROM accounts WHERE number = {account}")).await?;
            balances.push(balance.into_iter().flatten().next().ok_or("no account")?.parse()?);
        }
        Ok(Some(balances))
    }

    /// Writes the balances, and ends the transaction.
    async fn commit(&mut self, balances: &[(u64, i64)]) -> Result<(), Failure> {
        for (account, balance) in balances {
            self.0.values(&format!("UPDATE accounts SET balance = {balance} WHERE number = {account}")).await?;
        }
        self.0.values("COMMIT").await.map(drop)
    }
}

/// Some calls do not wait, and some are dropped while they wait.
async fn acquire(locks: &LockManager, accounts: &[u64], keys: Keys, rng: &mut Rng) -> Option<LockGuards> {
    let count = if keys == Keys::First { 1 } else { accounts.len() };
    let wait = if rng.u8(0..4) == 0 { Duration::ZERO } else { Duration::from_secs(30) };
    let call =
        locks.lock_all(accounts.iter().take(count).map(|account| ("account", *account))).wait(wait).into_future();
    let limit = if rng.u8(0..8) == 0 { Duration::from_micros(rng.u64(0..5_000)) } else { Duration::from_secs(60) };
    timeout(limit, call).await.ok()?.ok()
}
