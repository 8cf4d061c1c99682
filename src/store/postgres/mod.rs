//! Locks in PostgreSQL, in the database that an application has already.
//!
//! A lock is a row with a lease, and each operation is one statement that calls a function of the
//! database. So a transaction of the application can read the row of its lock: the key is then not
//! granted again before that transaction has ended, although the lease may have expired. No
//! transaction of the store is open between two messages, and no statement has a name, so that a
//! pooler may be in between.

// In the order of a call: from the URL to the reply.
mod builder;
pub(crate) mod address;
mod self_test;
mod store;
mod connection;
mod tls;
mod schema;
mod messages;
mod error;

pub use self::{builder::PostgresStoreBuilder, error::PostgresConnectError, store::PostgresStore};
