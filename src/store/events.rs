use std::{fmt, sync::Arc};

use crate::{acquisition::AcquisitionId, lock_key::LockKey};

/// Where a store puts the events of one process.
///
/// There is no queue in it: what is told is noted at once, so nothing can pile up. A store tells what it has to tell when it holds none
/// of its own locks; whoever is told may ask the store something from in there.
#[derive(Clone)]
pub struct EventSink {
    manager: Arc<str>,
    /// Answers whether somebody still listens.
    deliver: Arc<dyn Fn(Option<StoreEvent>) -> bool + Send + Sync>,
}

/// What a store tells a process, as a hint: what stands in the store decides (I7).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreEvent {
    /// This owner's turn has come: the key is offered to it.
    Offered {
        /// What it waited for.
        key: LockKey,
        /// Who waited.
        id: AcquisitionId,
    },
    /// The key was taken away from this owner.
    Revoked {
        /// What it had.
        key: LockKey,
        /// Who had it.
        id: AcquisitionId,
    },
    /// Events may have been lost: whoever waits should ask again.
    Lagged,
}

impl EventSink {
    /// An inbox of this process. `deliver` is told of each event, and answers whether somebody still listens; `None` only asks.
    pub fn new(
        process: impl Into<Arc<str>>,
        deliver: impl Fn(Option<StoreEvent>) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { manager: process.into(), deliver: Arc::new(deliver) }
    }

    /// Whose it is: what [`AcquisitionId::manager`] says of all its owners.
    #[must_use]
    pub fn manager(&self) -> &str {
        &self.manager
    }

    /// Tells this event; nobody hears it if the inbox is closed.
    pub fn send(&self, event: StoreEvent) {
        (self.deliver)(Some(event));
    }

    /// Whether somebody still listens.
    #[must_use]
    pub fn is_open(&self) -> bool {
        (self.deliver)(None)
    }
}

impl fmt::Debug for EventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("process", &self.manager).finish_non_exhaustive()
    }
}
