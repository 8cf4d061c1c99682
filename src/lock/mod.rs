//! The runtime side of a lock, without HTTP: the handle, the guard, and the driver of the
//! state machine.

// From the handle to the guard, then the driver and its parts.
mod manager;
mod status;
#[cfg(feature = "signal")]
mod signal;
mod acquire;
mod request_scope;
mod guard;
mod held;
mod driver;
mod driver_data;
mod watchdog;
mod detached;

#[cfg(all(test, tower_lock_shuttle))]
mod shuttle_tests;

pub(crate) use self::{
    acquire::LockParams,
    detached::{Detached, DetachedRoute},
    driver::Core,
    request_scope::InRequest,
};

pub use self::{
    acquire::{LockBuilder, LockFuture},
    guard::{LockGuard, ReleaseFuture},
    held::HeldLock,
    manager::{LockManager, LockManagerBuilder},
    status::LockStatus,
};
pub use crate::error::QueueBound;

/// The decisions without their shell, for simulators: no promise is made of it.
#[cfg(feature = "test-util")]
#[doc(hidden)]
pub mod decisions {
    use std::time::Duration;

    pub use crate::proto::{
        Action, Actions, Ahead, Call, Context, DriverTypes, Ending, Event, Request, Verb,
        entry::Conversation,
        grant::{Grant, Need},
        hold_limits::Terms,
        section::Section,
        table::Table,
    };
    pub use crate::{
        acquisition::AcquisitionIds,
        clock::{BootInstant, LazyNow},
    };
    use crate::{limits, store::QueueConfig};

    /// How every line is served.
    pub const LINE: QueueConfig = crate::lock::driver::LINE;
    /// How long a grant lasts.
    pub const LEASE: Duration = limits::LEASE;
    /// The least that the store keeps a key beyond that.
    pub const LOCK_DELAY: Duration = limits::LOCK_DELAY;
    /// How often a waiter asks again, give or take a fifth.
    pub const QUEUE_POLL_INTERVAL: Duration = limits::QUEUE_POLL_INTERVAL;
    /// How long one call of the store may take.
    pub const STORE_CALL_TIMEOUT: Duration = limits::STORE_CALL_TIMEOUT;
    /// When those who wait are told that the store is silent.
    pub const STORE_TIMEOUT: Duration = limits::STORE_TIMEOUT;
    /// How long a process hands a key on within itself.
    pub const LOCAL_HANDOFF_TIME: Duration = limits::LOCAL_HANDOFF_TIME;
    /// Between two questions to the store about one grant that messages ask for.
    pub const RECHECK_INTERVAL: Duration = limits::RECHECK_INTERVAL;
    /// What is due within this time is renewed with what is due already.
    pub const RENEWAL_BATCH_WINDOW: Duration = limits::RENEWAL_BATCH_WINDOW;
}
