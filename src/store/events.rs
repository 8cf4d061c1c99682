//! Events that a store sends to a process.

use std::{fmt, sync::Arc};

use crate::{acquisition::AcquisitionId, lock_key::LockKey};

/// Receiver of a store's events for one [`LockManager`](crate::LockManager).
///
/// A sink has no buffer: [`send`](Self::send) updates the state of the manager before it returns. A
/// store must not hold a mutex of its own during `send`, because the receiver may call the store.
#[derive(Clone)]
pub struct EventSink {
    manager: Arc<str>,
    /// Returns whether the manager is still alive. `None` only checks.
    deliver: Arc<dyn Fn(Option<StoreEvent>) -> bool + Send + Sync>,
}

/// Event of a store.
///
/// An event is a hint. The receiver verifies it with a call of the store before it acts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreEvent {
    /// The key was offered to this waiter.
    Offered {
        /// The key.
        key: LockKey,
        /// The acquisition that waited for it.
        id: AcquisitionId,
    },
    /// The key was revoked from this holder.
    Revoked {
        /// The key.
        key: LockKey,
        /// The acquisition that held it.
        id: AcquisitionId,
    },
    /// Events may have been lost. Every waiter should poll the store.
    Lagged,
}

impl EventSink {
    /// Creates a sink for the manager with this id.
    ///
    /// `deliver` receives each event, or `None` to check the manager. It returns whether the
    /// manager is still alive.
    pub fn new(
        manager: impl Into<Arc<str>>,
        deliver: impl Fn(Option<StoreEvent>) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { manager: manager.into(), deliver: Arc::new(deliver) }
    }

    /// Returns the id of the manager: the [`AcquisitionId::manager`] of all its acquisitions.
    #[must_use]
    pub fn manager(&self) -> &str {
        &self.manager
    }

    /// Sends an event. A closed sink ignores it.
    pub fn send(&self, event: StoreEvent) {
        (self.deliver)(Some(event));
    }

    /// Returns whether the manager still receives events.
    #[must_use]
    pub fn is_open(&self) -> bool {
        (self.deliver)(None)
    }
}

impl fmt::Debug for EventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventSink").field("manager", &self.manager).finish_non_exhaustive()
    }
}
