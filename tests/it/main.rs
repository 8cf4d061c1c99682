//! The public behavior of the crate, one folder per subject.

#![allow(clippy::disallowed_methods, reason = "tests spawn their clients, and know the runtime they are in")]

mod keys;
mod middleware;
mod extractors;
mod locks;
mod telemetry;
mod console;
mod contract;
mod repository;
