//! The store, whose operations are those of every server of lines.

use std::sync::Arc;

use crate::store::LockStore;

/// Store of locks in ZooKeeper, which any number of instances share.
///
/// A lock is an entry in the line of its key: a node of the session of its process. The servers
/// agree by a majority, so that no failover loses a lock. Waiters are in the order in which they
/// came. There are no records, permits and reads.
///
/// A process proves every second that it lives, by a write that only a leader of a majority
/// accepts. A grant or a renewal counts only with such a proof.
///
/// The keys of a process that crashes are free when its session has ended. A waiter that crashes
/// delays those behind it until then.
#[derive(Debug)]
pub struct ZooKeeperStore(pub(in crate::store) Arc<dyn LockStore>);
