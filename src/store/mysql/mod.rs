//! Locks in MySQL and MariaDB, in the database that an application has already.
//!
//! A lock is a row with a lease, and each operation calls one procedure of the database. The server
//! has no messages, so that there is no queue: waiters ask again. A transaction of the application
//! can read the fence of its lock: the key is then not granted again before that transaction has
//! ended, although the lease may have expired. No transaction of the store is open between two
//! messages, no statement has a name, and no setting of a session is needed, so that a pooler may
//! be in between.

// In the order of a call: from the URL to the reply.
mod builder;
mod address;
mod self_test;
mod store;
mod connection;
mod tls;
mod schema;
mod error;

pub use self::{builder::MysqlStoreBuilder, error::MysqlConnectError, store::MysqlStore};
