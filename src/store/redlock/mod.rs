//! Locks on a majority of several independent Redis servers.

// In the order of a call.
mod builder;
mod member;
mod unconfirmed;
mod node;
mod late;
#[allow(unreachable_pub, reason = "public for the simulator alone: feature `__internals`")]
pub mod quorum;
mod group;
mod acquires;
mod releases;
mod list;
mod store;

pub use self::{builder::RedlockStoreBuilder, store::RedlockStore};
