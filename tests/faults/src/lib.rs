//! Real servers, each started for one test and gone with it, and a proxy that does to their clients what networks do.
//!
//! ```no_run
//! # async fn example() {
//! use tower_lock_faults::{Mishap, Proxy, RedisServer};
//!
//! let redis = RedisServer::start().await;
//! let proxy = Proxy::start(redis.address()).await;
//! // The client of `proxy.url()` never hears what became of its next script.
//! proxy.all().next_of("EVALSHA", Mishap::CutBeforeReply);
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
