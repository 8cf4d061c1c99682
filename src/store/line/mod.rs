//! Locks as lines of entries, at servers whose sessions end with their processes.
//!
//! A server such as ZooKeeper has no script that decides about a key. It has sessions, which end
//! when a process dies, and an order of all writes. So a lock is a line: each acquisition appends
//! an entry of the session of its process, and the first entry holds the key. A waiter watches the
//! entry before its own, so that the end of one entry wakes one process. The entries of a dead
//! process vanish with its session.
//!
//! A process knows its own entries. The adapter has their leases, offers and blocks, and ends them.
//! A backend has a dozen operations of a server.

mod lines;
mod table;
mod shared;
mod acquires;
mod releases;
mod operations;
mod store;
#[cfg(test)]
mod tests;

pub(crate) use self::{
    lines::{Block, Entry, Line, LineError, Lines, OnEvent, OwnEntry, Page, SessionEvent},
    store::LineStore,
};
