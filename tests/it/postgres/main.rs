//! Locks in real PostgreSQL processes. The tests share one server, and each has a schema of its
//! own; a test that stops its server has another one.
//!
//! Without `postgres` the tests pass, with a note on stderr that they were skipped.

#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

mod support;

mod application;
mod clocks;
mod conformance;
mod connecting;
mod upgrades;
mod crashes;
mod failover;
mod fences;
mod runbook;
mod handover;
mod permits;
mod outages;
mod transactions;
mod statement_counts;
