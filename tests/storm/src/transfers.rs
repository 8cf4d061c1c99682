//! A storm of transfers between fifty accounts, in tasks of one process or of processes that are
//! killed. A transfer reads the balances of its accounts and then writes them. The sum of all
//! balances never changes, unless two transfers of one account overlap.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::IntoFuture,
    io,
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
    kills::Progress,
    ledger::{Ledger, LedgerClient, LedgerServer},
};

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

/// The number of accounts.
const ACCOUNTS: u64 = 50;
/// The first balance of each.
const BALANCE: i64 = 1_000;
/// The transfers of one process that are under way.
const TASKS: u64 = 16;

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
        let (sum, first) = (books.accounts.values().map(|account| account.balance).sum::<i64>(), BALANCE * 50);
        let changed = (sum != first).then(|| format!("the sum was {first} and is {sum}"));
        books.violations.iter().cloned().chain(changed).collect()
    }
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

/// Transfers money until the bank is closed, in several tasks of this process.
///
/// # Errors
///
/// Fails if the connection to the bank breaks.
pub async fn transfer(locks: &LockManager, bank: SocketAddr, keys: Keys, seed: u64) -> io::Result<()> {
    let tasks = (0..TASKS).map(|task| {
        let locks = locks.clone();
        let rng = Rng::with_seed(seed.wrapping_mul(1_000).wrapping_add(task));
        Handle::current().spawn(async move { transfer_one_by_one(&locks, bank, keys, rng).await })
    });
    join_all(tasks).await.into_iter().try_for_each(|result| result.map_err(io::Error::other)?)
}

async fn transfer_one_by_one(locks: &LockManager, bank: SocketAddr, keys: Keys, mut rng: Rng) -> io::Result<()> {
    let mut bank = LedgerClient::connect(bank).await?;
    loop {
        // A few of them are hot.
        let most = if rng.bool() { 5 } else { ACCOUNTS };
        let accounts: BTreeSet<_> = (0..rng.usize(2..5)).map(|_| rng.u64(0..most)).collect();
        // Not in order.
        let mut accounts: Vec<_> = accounts.into_iter().collect();
        rng.shuffle(&mut accounts);
        let Some(guards) = acquire(locks, &accounts, keys, &mut rng).await else { continue };
        let token = |account: u64| guards.get(("account", account)).map_or(0, |lock| lock.fencing_token().as_u64());
        let begin =
            accounts.iter().fold("begin".to_owned(), |line, account| format!("{line} {account}:{}", token(*account)));
        let balances = bank.ask(begin).await?;
        if balances == "closed" {
            drop(guards.release());
            return Ok(());
        }
        sleep(Duration::from_micros(rng.u64(0..2_000))).await;
        let mut balances: Vec<i64> = balances.split(' ').filter_map(|balance| balance.parse().ok()).collect();
        let amount = rng.i64(1..20);
        if let [first, .., last] = &mut balances[..] {
            *first -= amount;
            *last += amount;
        }
        let written = accounts.iter().zip(balances);
        let commit =
            written.fold("commit".to_owned(), |line, (account, balance)| format!("{line} {account}:{balance}"));
        bank.ask(commit).await?;
        drop(guards.release());
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
