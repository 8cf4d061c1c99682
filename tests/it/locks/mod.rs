//! Locks without HTTP, and the lock of a request from its grant to its release.

mod acquire;
mod cancel;
mod reentry;
mod leases;
mod renewal;
mod hold_limits;
mod several;
mod once;
mod permits;
mod tickets;
mod admin;
#[cfg(unix)]
mod rolling_restart;
mod multi_instance;
mod store_messages;
mod forks;
