//! The time limits of tests on real servers.
//!
//! A test is about locks, and not about the speed of its machine. So the stores of tests have
//! timeouts that no busy machine reaches. A test of a timeout takes a short one, and its fault
//! lasts until the test ends it, or [`OUTAGE`]. Then the test asserts order and counts: no test
//! compares an elapsed time with a number of its own.

use std::time::Duration;

#[cfg(feature = "service")]
use tower_lock::{
    MysqlStore, PostgresStore, RedisStore, RedlockStore,
    store::{MysqlStoreBuilder, PostgresStoreBuilder, RedisStoreBuilder, RedlockStoreBuilder},
};

/// The longest wait for a condition. Only a broken test reaches it.
pub const BROKEN: Duration = Duration::from_secs(120);

/// A call timeout that no busy machine reaches: the longest that a store has.
pub const CALL: Duration = Duration::from_secs(5);

/// A connect timeout that no busy machine reaches: the longest that a store has.
pub const CONNECT: Duration = Duration::from_secs(60);

/// A wait for replicas that no busy machine reaches: the longest that a store with [`CALL`] has.
pub const REPLICAS: Duration = Duration::from_millis(2_500);

/// The timeout of calls and connects that a test waits for.
pub const SHORT: Duration = Duration::from_millis(300);

/// Ten times as long as a failover of Sentinel goes unnoticed, as the guarantees say.
pub const LEFT: Duration = Duration::from_secs(20);

/// A fault that ends by itself, of stores with the timeout [`SHORT`].
pub const OUTAGE: Duration = Duration::from_secs(3);

/// A store on Redis whose calls fail only if the server does.
#[cfg(feature = "service")]
pub fn redis() -> RedisStoreBuilder {
    RedisStore::builder().call_timeout(CALL).connect_timeout(CONNECT)
}

/// A store on independent Redis servers whose calls fail only if a majority of them does.
#[cfg(feature = "service")]
pub fn redlock() -> RedlockStoreBuilder {
    RedlockStore::builder().call_timeout(CALL).connect_timeout(CONNECT)
}

/// A store on PostgreSQL whose calls fail only if the server does.
#[cfg(feature = "service")]
pub fn postgres() -> PostgresStoreBuilder {
    PostgresStore::builder().call_timeout(CALL).connect_timeout(CONNECT)
}

/// A store on MySQL or MariaDB whose calls fail only if the server does.
#[cfg(feature = "service")]
pub fn mysql() -> MysqlStoreBuilder {
    MysqlStore::builder().call_timeout(CALL).connect_timeout(CONNECT)
}
