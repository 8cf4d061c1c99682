//! Locks in a real MariaDB or MySQL. The tests share one server, and each has tables and a user of
//! its own; a test that stops its server has another one.
//!
//! Without `mariadbd` the tests pass, with a note on stderr that they were skipped.

#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

mod support;

mod clocks;
mod conformance;
mod connecting;
mod costs;
mod fences;
mod networks;
mod outages;
mod permits;
mod runbook;
mod shared_calls;
mod sweeps;
mod upgrades;
