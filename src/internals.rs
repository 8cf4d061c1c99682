//! The state machine and the protocol with Redis, for the simulator of this repository.
//!
//! Needs the feature `__internals`. No part of the public API: any release may change it.

/// The state machine of a lock, and the settings that it runs with.
pub mod proto {
    use std::time::Duration;

    pub use crate::store::FreeKeys;
    pub use crate::{
        clock::{BootInstant, LazyNow},
        proto::{
            Action, Actions, DriverTypes, Env, Event, EventContext, FreeKey, GuardEnd, LockRequest, QueuePosition,
            Redeemed, Requested,
            calls::{Calls, Numbered},
            entry::LockEntry,
            grant::{Grant, NextCheck},
            hold_limits::HoldLimits,
            lease::LeaseBounds,
            section::{ReleaseOutcome, Section},
            several::{Next, Several},
            sharing::Sharing,
            table::LockTable,
        },
    };
    use crate::{limits, store::QueueConfig};

    /// The settings of every queue.
    pub const QUEUE: QueueConfig = crate::proto::QUEUE;
    /// The default lease of a grant.
    pub const LEASE: Duration = limits::LEASE;
    /// The default lock-delay.
    pub const LOCK_DELAY: Duration = limits::LOCK_DELAY;
    /// The interval at which a waiter polls the store, before jitter.
    pub const QUEUE_POLL_INTERVAL: Duration = limits::QUEUE_POLL_INTERVAL;
    /// The timeout of one call of the store.
    pub const STORE_CALL_TIMEOUT: Duration = limits::STORE_CALL_TIMEOUT;
    /// The time without a reply after which waiters are rejected.
    pub const STORE_TIMEOUT: Duration = limits::STORE_TIMEOUT;
    /// The longest time of local handoffs under one grant.
    pub const LOCAL_HANDOFF_TIME: Duration = limits::LOCAL_HANDOFF_TIME;
    /// The least time between two rechecks of one grant.
    pub const RECHECK_INTERVAL: Duration = limits::RECHECK_INTERVAL;
    /// Grants that are due within this time are renewed in one call.
    pub const RENEWAL_BATCH_WINDOW: Duration = limits::RENEWAL_BATCH_WINDOW;
}

/// What every store over a network has.
#[cfg(feature = "redis")]
pub mod remote {
    pub use crate::store::remote::{batch::next_call, server_clock::ServerClock};
}

#[cfg(feature = "redis")]
pub use crate::store::redis::wire as redis_wire;

/// The decisions of a store on several independent servers.
#[cfg(feature = "redis")]
pub use crate::store::redis::redlock::quorum;
