//! Locks in real Redis processes, that are killed, stopped, flushed and cut off. Each test has a server of its own.
//!
//! Without a `redis-server` they pass, and say on stderr that they were skipped.

#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

mod support;

mod bounds;
mod conformance;
mod connecting;
mod command_counts;
mod release_timing;
mod fences;
mod forged_messages;
mod forks;
mod interop;
mod leases;
mod network_faults;
mod names;
mod outages;
mod recorded;
mod error_mapping;

#[path = "../it/sockets/matrix.rs"]
#[allow(dead_code, reason = "in part for the tests with a store in memory")]
mod matrix;
