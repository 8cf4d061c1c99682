//! Locks without HTTP: the handle, the line in this process, the guard.
//!
//! Nothing here knows a request, a status or a backend. What is decided is decided in pure code (`table`, `conversation`, `attempt`,
//! `grant`): events in, actions out, time as an argument. The shell around it (`core`, `watchdog`) asks the store, wakes, and keeps time.
//!
//! # Invariants
//!
//! Numbered, and cited where the code serves them.
//!
//! - **I1** A key is freed or handed on only for the acquisition that holds it.
//! - **I2** Nothing is asked of the store without a way back: the room for it is reserved first.
//! - **I3** A local deadline counts from before the request that was granted was sent, minus drift.
//! - **I4** "Held" is claimed only before that deadline, and only the store's word moves it.
//! - **I5** Lost fires at the deadline at the latest, whether the store answers or not; it never un-fires.
//! - **I6** The deadline is compared before every poll of what runs under the lock.
//! - **I7** Events may be lost, doubled, late: what stands in the store decides.
//! - **I8** An acquisition whose outcome is unknown is given back. A dropped store call is not a cancelled one.
//! - **I9** Each grant is given back exactly once. `Drop` never waits, fails or panics.
//! - **I10** A section that ended badly (panic, abort, lost, dropped) may have a statement on its way still: its key is given on
//!   only after the lock-delay. The store's lease is longer than ours by as much.
//! - **I11** No mutex is held over an await; every queue, table, body and wait has a bound.

// In the order in which a newcomer reads them: from the handle to the guard, what decides, what drives it, what both say.
mod locks;
mod state;
#[cfg(feature = "signal")]
mod signal;
mod call;
mod owner;
mod guard;
mod held;
#[allow(unreachable_pub, clippy::must_use_candidate, reason = "reached by simulators alone: feature `test-util`")]
mod table;
#[allow(unreachable_pub, clippy::must_use_candidate, reason = "reached by simulators alone: feature `test-util`")]
mod conversation;
#[allow(unreachable_pub, reason = "reached by simulators alone: feature `test-util`")]
mod line;
mod attempt;
mod deadline;
#[allow(unreachable_pub, clippy::must_use_candidate, reason = "reached by simulators alone: feature `test-util`")]
mod grant;
#[allow(unreachable_pub, clippy::must_use_candidate, reason = "reached by simulators alone: feature `test-util`")]
mod section;
#[allow(unreachable_pub, clippy::must_use_candidate, reason = "reached by simulators alone: feature `test-util`")]
mod terms;
mod attached;
mod core;
mod watchdog;
mod told;
mod room;
mod sync;
mod metrics;
mod complaints;
mod reports;
mod detached;
mod policy;
mod error;

#[cfg(all(test, tower_lock_shuttle))]
mod schedules;

pub(crate) use self::{
    call::Ask,
    core::Core,
    detached::{Detached, DetachedRoute},
    owner::InRequest,
    policy::{request_setters, settings},
    room::{Abort, NoRoom, Room, Share},
    sync::Mutex,
};
pub use self::{
    call::{LockCall, LockFuture},
    error::{LockError, LockLost, QueueBound, RunError},
    guard::{LockGuard, Release},
    held::HeldLock,
    locks::{Locks, LocksBuilder},
    owner::Owner,
    policy::{ClientGone, Hold, KeyInLogs, OnLost, Policy, RequestBodyMode, TimeoutStatus},
    state::LockState,
    terms::Lease,
};

/// The decisions without their shell, for simulators: no promise is made of it.
#[cfg(feature = "test-util")]
pub mod decisions {
    use std::time::Duration;

    pub use super::{
        conversation::{
            Action, Actions, Ahead, Call, Context, Conversation, DriverTypes, Ending, Event, Request, Verb,
        },
        grant::{Grant, Need},
        section::Section,
        table::Table,
        terms::Terms,
    };
    pub use crate::{
        clock::{Moment, Now},
        lease::OwnerIds,
    };
    use crate::{defaults, store::LineTerms};

    /// How every line is served.
    pub const LINE: LineTerms = super::core::LINE;
    /// How long a grant lasts.
    pub const LEASE: Duration = defaults::LEASE;
    /// The least that the store keeps a key beyond that.
    pub const LOCK_DELAY: Duration = defaults::LOCK_DELAY;
    /// How often a waiter asks again, give or take a fifth.
    pub const CHECK_IN: Duration = defaults::CHECK_IN;
    /// How long one call of the store may take.
    pub const STORE_CALL: Duration = defaults::STORE_CALL;
    /// When those who wait are told that the store is silent.
    pub const STORE_TIMEOUT: Duration = defaults::STORE_TIMEOUT;
    /// How long a process hands a key on within itself.
    pub const HAND_OVER_TIME: Duration = defaults::HAND_OVER_TIME;
    /// Between two questions to the store about one grant that messages ask for.
    pub const HINT_PAUSE: Duration = defaults::HINT_PAUSE;
    /// What is due within this time is renewed with what is due already.
    pub const RENEWAL_TICK: Duration = defaults::RENEWAL_TICK;
}
