//! Locks in Redis, shared by the instances of a service.

// In the order of a call: from the URL to the reply.
mod builder;
pub(super) mod self_test;
mod store;
mod operations;
mod calls;
mod shared;
#[allow(
    unreachable_pub,
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    reason = "public for the simulator alone: feature `__internals`"
)]
pub mod wire;
pub(crate) mod topology;
mod messages;
mod wakeups;
pub(super) mod error;
mod list;
pub(crate) mod redlock;

pub use self::{
    builder::RedisStoreBuilder,
    error::RedisConnectError,
    redlock::{RedlockStore, RedlockStoreBuilder},
    store::RedisStore,
};
