//! Several connections for calls whose commits wait for the disk. A connection executes one call
//! after the other. The commits of several connections wait for the disk together.

use std::{
    ops::Deref,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::connection::Calls;

/// The connections. Those after the first one are opened when there is a call for them.
#[derive(Debug)]
pub(super) struct Connections(Box<[Shared]>);

#[derive(Debug)]
struct Shared {
    connection: Calls,
    /// The calls under way.
    calls: AtomicUsize,
}

/// A connection for one call.
pub(super) struct Taken<'a>(&'a Shared);

impl Connections {
    pub(super) fn new(connections: impl IntoIterator<Item = Calls>) -> Self {
        let shared = |connection| Shared { connection, calls: AtomicUsize::new(0) };
        Self(connections.into_iter().map(shared).collect())
    }

    /// The connection with the fewest calls. No call waits for another connect while one of them is
    /// open: the server may refuse it.
    pub(super) fn take(&self) -> Taken<'_> {
        let by_calls = |shared: &&Shared| shared.calls.load(Ordering::Relaxed);
        let [first, ..] = &*self.0 else { unreachable!("a store has a connection") };
        let idle = self.0.iter().min_by_key(by_calls).unwrap_or(first);
        // If it is not open, this opens it.
        let taken = if idle.connection.is_connected() {
            idle
        } else {
            self.0.iter().filter(|shared| shared.connection.is_open()).min_by_key(by_calls).unwrap_or(idle)
        };
        taken.calls.fetch_add(1, Ordering::Relaxed);
        Taken(taken)
    }
}

impl Deref for Taken<'_> {
    type Target = Calls;

    fn deref(&self) -> &Calls {
        &self.0.connection
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
    }
}
