//! The examples as processes, with real databases and a real Redis.

#![allow(clippy::disallowed_methods, reason = "tests spawn their clients, and know the runtime they are in")]

mod services;

mod programs;
mod shown_commands;
mod fencing;
#[cfg(feature = "redis")]
mod instances;
