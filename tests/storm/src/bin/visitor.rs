//! A process whose tasks use permits of one key, and read and write another one.
//!
//! ```text
//! LOCK_URL=url visitor NAME VISITS CAPACITY TASKS SECTION_MS SEED
//! ```

use std::{error::Error, time::Duration};

use tower_lock::LockManager;
use tower_lock_storm::Visitors;
use tower_lock_testkit::limits;

type Failure = Box<dyn Error + Send + Sync>;

/// Short, because a killed process blocks its places for it.
const LEASE: Duration = Duration::from_secs(2);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [name, visits, capacity, tasks, section_ms, seed] = &*arguments else {
        return Err("visitor NAME VISITS CAPACITY TASKS SECTION_MS SEED".into());
    };
    let locks = LockManager::connect(&std::env::var("LOCK_URL")?).await?.instance(name).lease(LEASE).build();
    let section = Duration::from_millis(section_ms.parse()?);
    let visitors = Visitors { capacity: capacity.parse()?, tasks: tasks.parse()?, section, is_mixed: true };
    visitors.run(&locks, visits.parse()?, seed.parse()?).await?;
    let left = locks.shutdown(limits::BROKEN).await;
    if left == 0 { Ok(()) } else { Err(format!("{left} locks are left").into()) }
}
