//! Locks without HTTP: the manager, its calls, and guards.

// From the handle to the guard, then the driver and its parts.
mod manager;
mod status;
mod holding;
#[cfg(feature = "signal")]
mod signal;
mod acquire;
mod request_scope;
mod all;
mod several;
mod order;
mod once;
mod permit;
mod lead;
mod guard;
mod guards;
mod held;
mod held_locks;
mod ticket;
mod redeem;
mod driver;
mod driver_data;
mod lost_timers;
mod renewal_queue;
mod renewal_turns;
mod watchdog;

#[cfg(all(test, tower_lock_shuttle))]
mod shuttle_tests;

#[cfg(feature = "signal")]
#[cfg_attr(docsrs, doc(cfg(feature = "signal")))]
pub use self::signal::ShutdownOnSignal;
#[cfg(feature = "console")]
pub(crate) use self::status::Rfc3339;
pub(crate) use self::{
    acquire::{AcquireFuture, LockParams},
    driver::Driver,
    driver_data::NotGranted,
    held::{LossSignal, poll_any, while_held},
    redeem::redeem,
    request_scope::{RequestInfo, RequestScope},
    several::acquire_several,
    ticket::{TicketTerms, check_gap},
};
pub use self::{
    acquire::{LockBuilder, LockFuture},
    all::LockAllBuilder,
    guard::{LockGuard, ReleaseFuture},
    guards::LockGuards,
    held::HeldLock,
    held_locks::HeldLocks,
    holding::Holding,
    manager::{LockManager, LockManagerBuilder},
    once::{OnceBuilder, OnceOutcome},
    permit::{HeldPermit, PermitBuilder, PermitFuture, PermitGuard},
    status::LockStatus,
    ticket::{InvalidTicket, Ticket, TicketError},
};
#[cfg(feature = "axum")]
pub(crate) use self::{redeem::take_over, status::whole_ms, ticket::UNNAMED};
pub use crate::{
    error::{InsufficientTime, LockAllError, QueueBound},
    proto::section::ReleaseOutcome,
};
