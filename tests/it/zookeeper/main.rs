//! Locks in a real ZooKeeper. The tests share one server, and each has a root of its own; a test
//! that stops servers has others.
//!
//! Without `java` and ZooKeeper the tests pass, with a note on stderr that they were skipped.

#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

mod support;

mod conformance;
mod connecting;
mod faults;
mod fences;
mod outages;
mod runbook;
mod sessions;
