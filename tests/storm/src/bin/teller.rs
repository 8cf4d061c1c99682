//! A process that transfers money between accounts, under locks of a fleet.
//!
//! ```text
//! LOCK_URL=url teller NAME BANK memory|table SEED
//! ```
//!
//! The accounts are in the memory of the bank, or in a table of the database at the URL.

use std::{error::Error, time::Duration};

use tower_lock::{LockManager, LockPolicy};
use tower_lock_storm::{Keys, transfer};
use tower_lock_testkit::limits;

type Failure = Box<dyn Error + Send + Sync>;

/// Short, because a killed process blocks its keys for it.
const LEASE: Duration = Duration::from_secs(2);

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [name, bank, of, seed] = &*arguments else { return Err("teller NAME BANK memory|table SEED".into()) };
    let url = std::env::var("LOCK_URL")?;
    let locks = LockManager::connect(&url).await?.instance(name).lease(LEASE).build();
    let locks = locks.with_policy(LockPolicy::new().lock_delay(Duration::from_millis(100)));
    let table = (of == "table").then_some(&*url);
    transfer(&locks, bank.parse()?, table, Keys::All, seed.parse()?).await?;
    let left = locks.shutdown(limits::BROKEN).await;
    if left == 0 { Ok(()) } else { Err(format!("{left} locks are left").into()) }
}
