//! Storms of processes of which one is killed or stopped now and then.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

mod permits;
mod tickets;
mod transfers;
