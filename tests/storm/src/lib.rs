//! Storms: clients of every kind, services of one or many processes, and a checker that records all
//! of them.
//!
//! ```text
//! storm (a test) ──HTTP──▶ service × n ──▶ proxy with network faults ──▶ Redis
//!    │                        │             or a pooler, or nothing ──▶ a database, its own memory
//!    │ REQUEST, RESPONSE,     │ ENTER, WRITE, EXIT, ABORT
//!    │ LEFT, BROKEN           │
//!    └────────▶ checker ◀─────┘
//! ```
//!
//! The checker is a process of its own, and its summary is the result of the storm. A seed
//! determines the requests, the work of the handlers and the clients that disconnect, before the
//! storm starts.
//!
//! [`ReplayStorm`] has other services and a check of its own: duplicates of requests with an
//! idempotency key, and processes that kill themselves. So have [`Bank`], for transfers under
//! several locks, [`Visits`], for permits, readers and writers, and [`Seats`], for tickets.
//! [`Environment::end_bursts_with_the_newest`] sends requests that replace each other.

mod report;
mod checker;
mod reporter;
mod workload;
mod client;
mod cluster;
mod database;
mod database_storm;
mod ledger;
mod kills;
mod permits;
mod replay;
mod storm;
mod bursts;
mod tickets;
mod transfers;

pub use self::{
    checker::{Checker, Summary},
    client::{Observed, Request},
    cluster::{Cluster, Residue, Service, ShutdownReport},
    database::{Database, Route, connect},
    database_storm::DatabaseStorm,
    kills::{Fault, Progress, run_with_faults},
    permits::{Occupancy, Visitors, Visits},
    replay::{Crash, CrashPoint, ReplayOutcome, ReplayStorm},
    report::{InvalidReport, Reply, Report},
    reporter::Reporter,
    storm::{Environment, Outcome, Storm, is, scale, seed, turn},
    tickets::{Seats, travel},
    transfers::{Bank, Keys, transfer},
    workload::{Disconnect, DisconnectKind, DisconnectPoint, LockPath, Panics, Patience, Protocol, Work, Workload},
};

/// The time in nanoseconds, shared by all processes of this machine.
#[must_use]
pub fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0).saturating_mul(1_000_000_000);
    seconds.saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}
