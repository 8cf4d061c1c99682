//! Real servers for one test each, and a proxy that injects network faults in front of them.
//!
//! ```no_run
//! # async fn example() {
//! use tower_lock_faults::{NetworkFault, Proxy, RedisServer};
//!
//! let redis = RedisServer::start().await;
//! let proxy = Proxy::start(redis.address()).await;
//! // The client of `proxy.url()` gets no reply to its next script.
//! proxy.all().next_of("EVALSHA", NetworkFault::CutBeforeReply);
//! redis.freeze();
//! # }
//! ```
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time"))]

mod process;
mod resp;
mod redis;
mod mariadb;
mod proxy;

pub use self::{
    mariadb::MariaDb,
    process::{Process, skipped},
    proxy::{Chaos, Direction, FaultControl, NetworkFault, Proxy, Push, Request},
    redis::{RedisOptions, RedisServer},
    resp::{Connection, Reply},
};
