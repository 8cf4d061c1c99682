//! Locks in real Redis processes that are killed, stopped, flushed and disconnected. Each test has
//! its own server.
//!
//! Without `redis-server` the tests pass, with a note on stderr that they were skipped.

#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

mod support;
mod tls;

mod bounds;
mod conformance;
mod connecting;
mod command_counts;
mod release_timing;
mod fences;
mod data_loss;
mod forged_messages;
mod interop;
mod redisson;
mod leases;
mod permits;
mod logs;
mod listing;
mod network_faults;
mod names;
mod outages;
mod replay;
mod records;
mod redlock;
mod runbook;
mod shared_calls;
mod error_mapping;
mod failover;
mod sentinels;
mod cluster;
