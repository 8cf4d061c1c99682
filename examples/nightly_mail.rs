//! A job on three machines starts at the same minute, and each customer must get one mail. The
//! machines start it some 100 ms apart.
//!
//! ```sh
//! cargo run --example nightly_mail                          # a table
//! cargo run --example nightly_mail -- --once "$(date +%F)"   # one run, as a timer starts it
//! ```
//!
//! Environment: `DATABASE_URL` (`sqlite://shop.db`, or `mysql://user:password@localhost/shop` with
//! `--features mysql`, or `postgres://..`; default: SQLite in memory), `LOCK_URL`
//! (`redis://localhost`, `mysql://..` or `postgres://..`, with such a feature: locks that all
//! instances share; default: locks within this process) and `MAIL_SERVER` (`down`: every mail
//! fails).
//!
//! The part above "the table" can be copied: from the crate `support` it needs only `Dialect`, of
//! `database`.

#![allow(clippy::disallowed_methods, reason = "a program with a runtime of its own, timed by a real clock")]

use std::{
    env,
    process::ExitCode,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use sqlx::AnyPool;
use tokio::{join, sync::Notify, time::sleep};
use tower_lock::{LockError, LockManager, MemoryStore, lock::OnceOutcome};

use support::{Failure, Table, database::Dialect};

const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS mail (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    night VARCHAR(40) NOT NULL,
    customer VARCHAR(40) NOT NULL,
    sent_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP
)";

const CUSTOMERS: [&str; 3] = ["ann", "bob", "eve"];

/// Longer than the clocks of the machines differ.
const TWO_DAYS: Duration = Duration::from_secs(2 * 24 * 60 * 60);

/// Longer than the job takes.
const ONE_HOUR: Duration = Duration::from_secs(60 * 60);

/// The delay between two machines.
const STAGGER: Duration = Duration::from_millis(100);

/// The time for one mail. Three mails take longer than one delay between machines, and less than
/// two.
const ONE_MAIL: Duration = Duration::from_millis(50);

/// One run of the job.
#[derive(Debug)]
enum Run {
    Sent(usize),
    /// Another instance runs the job, or has done it.
    LeftToAnother,
}

/// The job, as each instance runs it.
async fn nightly_mail(locks: &LockManager, mails: &Mails, night: &str) -> Result<Run, Failure> {
    // An instance that starts during the run waits for its end. The record of a run that is done
    // stays, even if this process ends. A run that fails leaves none, and the next instance tries.
    // (Some mails may have been sent. If that is likely, give each customer a key of its own:
    // `("nightly-mail", night, customer)`.)
    let job = locks.once(("nightly-mail", night)).keep_for(TWO_DAYS).wait(ONE_HOUR);
    // Not polled after the lock is lost.
    match job.try_run(async |_lock| mails.send_all(night).await).await? {
        OnceOutcome::Ran(sent) => Ok(Run::Sent(sent?)),
        OnceOutcome::Already => Ok(Run::LeftToAnother),
    }
}

/// With a lock alone: the key is free again when the next instance starts.
async fn nightly_mail_with_a_lock(locks: &LockManager, mails: &Mails, night: &str) -> Result<Run, Failure> {
    let guard = match locks.try_lock(("nightly-mail", night)).await {
        Ok(guard) => guard,
        Err(LockError::Busy { .. }) => return Ok(Run::LeftToAnother),
        Err(other) => return Err(other.into()),
    };
    let sent = mails.send_all(night).await?;
    drop(guard.release().await);
    Ok(Run::Sent(sent))
}

async fn nightly_mail_unlocked(_: &LockManager, mails: &Mails, night: &str) -> Result<Run, Failure> {
    Ok(Run::Sent(mails.send_all(night).await?))
}

// === mails ===

/// Sends mails; here it only records them.
#[derive(Clone)]
struct Mails {
    db: AnyPool,
    is_down: bool,
}

impl Mails {
    async fn send_all(&self, night: &str) -> Result<usize, Failure> {
        for customer in CUSTOMERS {
            self.send(night, customer).await?;
        }
        Ok(CUSTOMERS.len())
    }

    async fn send(&self, night: &str, customer: &str) -> Result<(), Failure> {
        sleep(ONE_MAIL).await;
        if self.is_down {
            return Err("the mail server does not reply".into());
        }
        let insert = self.db.sql("INSERT INTO mail (night, customer) VALUES (?, ?)");
        sqlx::query(&insert).bind(night).bind(customer).execute(&self.db).await?;
        Ok(())
    }

    /// Returns how many mails each customer got that night, in the order of `CUSTOMERS`.
    async fn received(&self, night: &str) -> Result<Vec<i64>, Failure> {
        let mut received = Vec::new();
        for customer in CUSTOMERS {
            let count = self.db.sql("SELECT COUNT(*) FROM mail WHERE night = ? AND customer = ?");
            received.push(sqlx::query_scalar(&count).bind(night).bind(customer).fetch_one(&self.db).await?);
        }
        Ok(received)
    }
}

// === the table ===

/// Three instances, each with its own `LockManager` on one store.
async fn three_instances() -> Result<[LockManager; 3], Failure> {
    if support::locks_are_shared() {
        return Ok([support::locks().await?, support::locks().await?, support::locks().await?]);
    }
    let store = Arc::new(MemoryStore::new());
    Ok([(); 3].map(|()| LockManager::new(Arc::clone(&store))))
}

/// Starts the job on three instances, 100 ms apart. Adds the results to the table, and returns how
/// many mails each customer got.
async fn night(
    table: &mut Table<3>,
    name: &str,
    job: impl AsyncFn(&LockManager, &Mails, &str) -> Result<Run, Failure>,
    [mails_of_first, mails]: [&Mails; 2],
) -> Result<Vec<i64>, Failure> {
    // A new night, because the database may be persistent.
    let night = format!("demo-{}", SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros());
    let [first, second, third] = three_instances().await?;
    let first_is_done = Notify::new();
    let runs = join!(
        async {
            let run = job(&first, mails_of_first, &night).await;
            first_is_done.notify_one();
            run
        },
        async {
            sleep(STAGGER).await;
            job(&second, mails, &night).await
        },
        async {
            // On a slow machine it starts later: the first instance has always finished by then.
            join!(sleep(2 * STAGGER), first_is_done.notified());
            job(&third, mails, &night).await
        },
    );
    let results = [runs.0, runs.1, runs.2].map(|run| match run {
        Ok(Run::Sent(mails)) => format!("sent {mails}"),
        Ok(Run::LeftToAnother) => "left it to another".into(),
        Err(_) => "failed".into(),
    });
    let received = mails.received(&night).await?;
    let each =
        if received.iter().all(|n| *n == received[0]) { received[0].to_string() } else { format!("{received:?}") };
    table.line([name.into(), each, results.join(", ")]);
    Ok(received)
}

/// Returns whether each customer gets one mail with `once`, and more without it.
async fn demo(mails: &Mails) -> Result<bool, Failure> {
    println!("Three instances start the nightly mail to three customers, a tenth of a second apart.\n");
    let down = Mails { is_down: true, ..mails.clone() };
    let mut table = Table::of(["", "mails to each customer", "instances"]);
    let unlocked = night(&mut table, "without a lock", nightly_mail_unlocked, [mails; 2]).await?;
    let alone = night(&mut table, "try_lock", nightly_mail_with_a_lock, [mails; 2]).await?;
    let once = night(&mut table, "once", nightly_mail, [mails; 2]).await?;
    let failed = night(&mut table, "once; the first one fails", nightly_mail, [&down, mails]).await?;
    table.print();
    println!("With a lock alone the key is free again when the third instance starts. With once it has a record then.");
    Ok(unlocked == [3; 3] && alone.iter().all(|mails| *mails > 1) && once == [1; 3] && failed == [1; 3])
}

#[tokio::main]
async fn main() -> ExitCode {
    support::exit(run().await)
}

async fn run() -> Result<(), Failure> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let mails = async || {
        let is_down = env::var("MAIL_SERVER").is_ok_and(|server| server == "down");
        Ok::<_, Failure>(Mails { db: support::database::open(SCHEMA).await?, is_down })
    };
    match arguments[..] {
        [] | ["--demo"] => {
            if demo(&mails().await?).await? {
                Ok(())
            } else {
                Err("the table is not as expected".into())
            }
        }
        ["--once", night] => {
            match nightly_mail(&support::locks().await?, &mails().await?, night).await? {
                Run::Sent(mails) => println!("sent {mails} mails"),
                Run::LeftToAnother => println!("left it to another"),
            }
            Ok(())
        }
        _ => Err("usage: [--demo | --once NIGHT]".into()),
    }
}
