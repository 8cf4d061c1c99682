//! Helpers that the tests of tower-lock share.
//!
//! | module | content |
//! |---|---|
//! | [`wait`] | waiting for a condition or a future, with a long limit |
//! | [`limits`] | the time limits of tests on real servers, and stores that have them |
//! | [`app`] | requests to a router, with and without a server |
//! | [`http`] | clients that see each byte of HTTP/1.1 and each frame of HTTP/2 |
//! | [`browser`] | a browser without a window |
//! | [`body`] | a body that follows a script |
//! | [`endings`] | each kind of response, under a key of its own |
//! | [`locks`] | keys and lock managers of the tests |
//! | [`store`] | stores that change some operations of another one |
//! | [`caller`] | calls of one key each, straight to a store |
//! | [`clocks`] | the clock of a server is set |
//! | [`sections`] | sections under one key, beside faults |
//! | [`costs`] | the cost of locks in calls of their store: one table for all stores |
//! | [`parity`] | a store beside the one in memory, in random sequences of calls |
//! | [`exclusion`] | the rule of mutual exclusion, for the checkers |
//! | [`log`] | the text of the log |
//! | [`panics`] | planned panics |
//! | [`runtimes`] | runtimes that end, in a process of their own |
//! | the root | real servers for one test each, and a proxy that injects network faults |
//!
//! ```no_run
//! # async fn example() {
//! use tower_lock_testkit::{NetworkFault, Proxy, RedisServer};
//!
//! let redis = RedisServer::start().await;
//! let proxy = Proxy::start(redis.address()).await;
//! // The client of `proxy.url()` gets no reply to its next script.
//! proxy.all().next_of("EVALSHA", NetworkFault::CutBeforeReply);
//! redis.freeze();
//! # }
//! ```
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]
#![allow(clippy::missing_errors_doc, reason = "`Cut` and `io::Error` say it")]
#![allow(clippy::missing_panics_doc, reason = "a helper panics if its test fails")]
#![allow(clippy::must_use_candidate, reason = "only tests use it")]

mod process;
mod resp;
mod redis;
mod redis_cluster;
mod sentinel;
mod mariadb;
mod postgres;
mod pgbouncer;
mod proxy;
mod zookeeper;

#[cfg(feature = "service")]
pub mod app;
#[cfg(feature = "service")]
pub mod body;
#[cfg(feature = "service")]
pub mod browser;
#[cfg(feature = "service")]
pub mod caller;
#[cfg(feature = "service")]
pub mod clocks;
#[cfg(feature = "service")]
pub mod costs;
#[cfg(feature = "service")]
pub mod endings;
#[cfg(feature = "service")]
pub mod http;
#[cfg(feature = "service")]
pub mod locks;
#[cfg(feature = "service")]
pub mod permits;
#[cfg(feature = "service")]
pub mod runtimes;
#[cfg(feature = "service")]
pub mod log;
#[cfg(feature = "service")]
pub mod parity;
#[cfg(feature = "service")]
pub mod sections;
#[cfg(feature = "service")]
pub mod store;
pub mod exclusion;
pub mod limits;
pub mod panics;
pub mod wait;

pub use self::{
    mariadb::MariaDb,
    pgbouncer::PgBouncer,
    postgres::PostgresServer,
    process::{Process, ReservedPort, TempFolder, certificate, skipped},
    proxy::{Chaos, Direction, FaultControl, NetworkFault, Proxy, Push, Request},
    redis::{RedisOptions, RedisServer},
    redis_cluster::{RedisCluster, RedisClusterOptions},
    resp::{Connection, Reply},
    sentinel::{SentinelGroup, SentinelOptions},
    zookeeper::ZooKeeper,
};
