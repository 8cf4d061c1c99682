//! The store, whose operations are those of every database.

use std::sync::Arc;

use crate::store::LockStore;

/// Store of locks in MySQL (8.0 or later) or MariaDB (10.6 or later), which any number of instances
/// share. Needs the feature `mysql`.
///
/// ```no_run
/// # use tower_lock::{LockManager, MysqlStore, store::MysqlConnectError};
/// # #[tokio::main]
/// # async fn main() -> Result<(), MysqlConnectError> {
/// let store = MysqlStore::builder()
///     .migrate(true)
///     .connect("mysql://user:password@localhost/app")
///     .await?;
/// let locks = LockManager::new(store);
/// # Ok(())
/// # }
/// ```
///
/// A lock is a row of a table, and each operation is one call of a procedure of the database. The
/// tables and the procedures begin with a [prefix](crate::store::MysqlStoreBuilder::prefix), and
/// are made by the [migration](crate::store::MysqlStoreBuilder::migration).
///
/// The server has no messages, and the store has no queue. A waiter asks again every 50 to 150 ms,
/// and a free key goes to the first one that asks.
/// [`LockManager::permit`](crate::LockManager::permit) works in the same way.
/// [`LockManager::read`](crate::LockManager::read) is refused: without a queue, a stream of readers
/// would keep a writer waiting for ever.
///
/// A transaction of the application can keep its key: while a transaction has called
/// `tower_lock_check_fence`, the key is busy, although its lease may have expired. Renewals and
/// releases do not wait for such a transaction.
///
/// A store has two connections: one for acquires and releases, and one for renewals. Under load it
/// opens more, up to [`connections`](crate::store::MysqlStoreBuilder::connections). A broken
/// connection is replaced. No statement has a name, and no transaction is open between two
/// messages, so that a pooler may be in between.
///
/// A fence is the clock of the server in microseconds, or one more than the last fence of the key,
/// if that is larger.
///
/// Grants, renewals and releases are on the disk of the server when the reply arrives.
///
/// While the server cannot be reached, no lock is acquired (503, not started), and a held lock is
/// lost when its lease expires.
#[derive(Debug)]
pub struct MysqlStore(pub(in crate::store) Arc<dyn LockStore>);
