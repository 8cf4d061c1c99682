//! Many processes on one Redis, and a referee that sees what each of them does.
//!
//! ```text
//! storm (a test) ──HTTP──▶ service × 4 ──▶ proxy, which does what networks do ──▶ Redis
//!    │ ASK, ANSWER, GONE      │ ENTER, WRITE, EXIT
//!    └────────▶ referee ◀─────┘
//! ```
//!
//! The referee is a process of its own: it believes nobody, and what it says at the end is the outcome of the storm.

mod report;
mod referee;
mod reporter;
mod doubles;
mod site;

pub use self::{
    doubles::{FreesAnybody, LosesTrackOfTime},
    referee::{Referee, Summary},
    report::{Answer, NotUnderstood, Report},
    reporter::Reporter,
    site::{Farewell, Seen, Service, Site},
};

/// What time it is, in nanoseconds: the same for every process of this machine.
#[must_use]
pub fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0).saturating_mul(1_000_000_000);
    seconds.saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}
