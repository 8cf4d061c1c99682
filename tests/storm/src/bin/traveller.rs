//! A process whose tasks keep seats by tickets.
//!
//! ```text
//! LOCK_URL=url traveller NAME SEATS SEED
//! ```

use std::{error::Error, time::Duration};

use futures_util::future::try_join_all;
use tower_lock::LockManager;
use tower_lock_storm::travel;
use tower_lock_testkit::limits;

/// Short, because a killed process blocks its seats for it.
const LEASE: Duration = Duration::from_secs(2);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [name, seats, seed] = &*arguments else { return Err("traveller NAME SEATS SEED".into()) };
    let locks = LockManager::connect(&std::env::var("LOCK_URL")?).await?.instance(name).lease(LEASE).build();
    for ended in try_join_all(travel(&locks, seats.parse()?, seed.parse()?)).await? {
        ended?;
    }
    let left = locks.shutdown(limits::BROKEN).await;
    if left == 0 { Ok(()) } else { Err(format!("{left} locks are left").into()) }
}
