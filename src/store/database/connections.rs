//! Several connections for calls whose commits wait for the disk. A connection executes one call
//! after the other. The commits of several connections wait for the disk together.

use std::sync::Arc;

use crate::store::remote::link::{Connect, Link};

/// The connections. Those after the first one are opened when there is a call for them.
///
/// Each call under way is an owner of its connection.
pub(crate) struct Connections<C: Connect>(Box<[Arc<Link<C>>]>);

impl<C: Connect> Connections<C> {
    pub(crate) fn new(connections: impl IntoIterator<Item = Link<C>>) -> Self {
        Self(connections.into_iter().map(Arc::new).collect())
    }

    /// The connection with the fewest calls. No call waits for another connect while one of them is
    /// open: the server may refuse it.
    pub(crate) fn take(&self) -> Arc<Link<C>> {
        let by_calls = |connection: &&Arc<Link<C>>| Arc::strong_count(connection);
        let idle = self.0.iter().min_by_key(by_calls).expect("a store has a connection");
        // If it is not open, this opens it.
        let taken = if idle.is_connected() {
            idle
        } else {
            self.0.iter().filter(|connection| connection.is_open()).min_by_key(by_calls).unwrap_or(idle)
        };
        Arc::clone(taken)
    }
}
