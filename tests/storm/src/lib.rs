//! All storms of the crate: clients of every kind, services of one process or of many, and a checker that sees what each of them does.
//!
//! ```text
//! storm (a test) ──HTTP──▶ service × n ──▶ proxy, which does what networks do ──▶ Redis, or its own memory
//!    │ ASK, ANSWER, GONE,     │ ENTER, WRITE, EXIT, FALL
//!    │ BROKEN                 │
//!    └────────▶ checker ◀─────┘
//! ```
//!
//! The checker is a process of its own: it believes nobody, and what it says at the end is the outcome of the storm. What is asked, what
//! handlers do and which clients leave is thrown by a seed, before anything happens.

mod report;
mod checker;
mod reporter;
mod broken_stores;
mod workload;
mod client;
mod cluster;
mod storm;

pub use self::{
    broken_stores::{ReleasesAnyHolder, ShortensLeases},
    checker::{Checker, Summary},
    client::{Observed, Request},
    cluster::{Cluster, Residue, Service, ShutdownReport},
    report::{InvalidReport, Reply, Report},
    reporter::Reporter,
    storm::{Environment, Outcome, Storm, is, seed},
    workload::{ClientLeaves, LeaveKind, LeavePoint, LockPath, Panics, Patience, Protocol, Work, Workload},
};

/// What time it is, in nanoseconds: the same for every process of this machine.
#[must_use]
pub fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0).saturating_mul(1_000_000_000);
    seconds.saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}
