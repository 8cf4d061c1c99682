//! Events that a store sends to a process.

use std::{
    any::Any,
    fmt,
    sync::{Arc, Weak},
};

use crate::{acquisition::AcquisitionId, lock_key::LockKey};

/// Receiver of a store's events for one [`LockManager`](crate::LockManager).
///
/// A sink has no buffer: [`send`](Self::send) updates the state of the manager before it returns. A
/// store must not hold a mutex of its own during `send`, because the receiver may call the store.
#[derive(Clone)]
pub struct EventSink {
    manager: Arc<str>,
    /// The sink is open while it lives. A store checks that under its mutexes: no code of others
    /// runs then.
    receiver: Weak<dyn Any + Send + Sync>,
    deliver: Arc<dyn Fn(StoreEvent) + Send + Sync>,
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
    /// The key may be free. For stores that do not know which waiter is next: all waiters of the
    /// manager for this key ask again, at most ten times a second.
    Freed {
        /// The key.
        key: LockKey,
    },
    /// Events may have been lost. Every waiter should poll the store.
    Lagged,
    /// The store may have lost locks: it was restarted, it was replaced, or it has lost data. The
    /// manager starts no further section of a key that it holds before the store has confirmed
    /// that it still does.
    Doubted,
    /// The same, and the store replies. The manager renews each lock that it holds, at most once in
    /// a second and a thirtieth of its lease, and ends those that are lost.
    Recovered,
}

impl EventSink {
    /// Creates a sink for the manager with this id.
    ///
    /// `deliver` gets each event while the receiver lives. The sink is closed when the receiver has
    /// been dropped.
    pub fn new<R: Send + Sync + 'static>(
        manager: impl Into<Arc<str>>,
        receiver: &Arc<R>,
        deliver: impl Fn(&Arc<R>, StoreEvent) + Send + Sync + 'static,
    ) -> Self {
        let receiver = Arc::downgrade(receiver);
        let open = Weak::clone(&receiver);
        let deliver = move |event| {
            if let Some(receiver) = receiver.upgrade() {
                deliver(&receiver, event);
            }
        };
        Self { manager: manager.into(), receiver: open, deliver: Arc::new(deliver) }
    }

    /// Creates a sink that is open as long as this one, for a store in front of another one.
    /// `deliver` gets each event, with this sink.
    #[must_use]
    pub fn wrap(self, deliver: impl Fn(&Self, StoreEvent) + Send + Sync + 'static) -> Self {
        let (manager, receiver) = (Arc::clone(&self.manager), Weak::clone(&self.receiver));
        Self { manager, receiver, deliver: Arc::new(move |event| deliver(&self, event)) }
    }

    /// Returns the id of the manager: the [`AcquisitionId::manager`] of all its acquisitions.
    #[must_use]
    pub fn manager(&self) -> &str {
        &self.manager
    }

    /// Sends an event. A closed sink ignores it.
    pub fn send(&self, event: StoreEvent) {
        (self.deliver)(event);
    }

    /// Returns whether the manager still receives events. Runs no code of the receiver.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.receiver.strong_count() > 0
    }
}

impl fmt::Debug for EventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventSink").field("manager", &self.manager).finish_non_exhaustive()
    }
}
