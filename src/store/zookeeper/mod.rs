//! Locks in ZooKeeper.
//!
//! ZooKeeper agrees by a majority: no failover loses a lock, and no number of replicas needs to be
//! set. A lock is an entry of a line, which is a node of the session of its process.

mod address;
mod builder;
mod error;
mod lines;
mod names;
mod session;
mod store;
pub(crate) mod wire;

pub use self::{builder::ZooKeeperStoreBuilder, error::ZooKeeperConnectError, store::ZooKeeperStore};
