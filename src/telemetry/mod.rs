//! Logs, spans and metrics.
//!
//! A subscriber and a recorder are code of the application: they may call into this crate, panic,
//! or block. So nothing here is called under a mutex of this crate, and panics of theirs end here.

#[cfg(feature = "tracing")]
mod log;
pub(crate) mod metrics;
#[cfg(not(all(feature = "tracing", feature = "metrics")))]
mod noop;
pub(crate) mod isolated;
pub(crate) mod report;
pub(crate) mod reports;
pub(crate) mod throttle;
pub(crate) mod route;
pub(crate) mod span;
