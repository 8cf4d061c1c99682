//! Tower middleware and Axum extractors that serialize requests per key, in one process or across a
//! fleet.
//!
//! A [`LockLayer`] on a route acquires the lock of a key before the handler runs, and releases it
//! at the end of the response. Another request for the same key is rejected with `409 Conflict`,
//! waits, or [replaces](LockLayer::newest_wins) the older one. Requests for other keys are not
//! affected.
//!
//! # High-level features
//!
//! - Keys are derived from extractors, from named fields of the request, or from extracted values.
//! - Locks are kept in memory, or in a Redis (one server, Sentinel, Cluster, Redlock), a PostgreSQL
//!   or a MySQL that all instances share.
//! - A lock is renewed while its handler runs. A handler that loses its lock is aborted.
//! - Each section of a key has a larger [`FencingToken`], so that a database can reject a stale
//!   writer.
//! - A request can lock up to 64 keys at once, all of them or none: [`key::all`].
//! - A retry with the same `Idempotency-Key` gets the first answer: [`ReplayLayer`]. With
//!   PostgreSQL or MySQL, the answer and the check of the lock can be in the transaction of the
//!   handler.
//! - An operator sees the holder and the waiters of each key, and revokes a lock: the feature
//!   `console`.
//! - Streams, disconnects, re-entrancy and graceful shutdown are handled.
//!
//! [`guide`] has one page per subject. Start with [which lock do I need?](guide::which_lock) or
//! with [getting started](guide::getting_started). [`docs::guarantees`] lists what is guaranteed
//! under which assumptions.
//!
//! # Example
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use axum::{Json, Router, routing::post};
//! use tower_lock::{HeldLock, LockLayer, LockManager, key};
//!
//! #[derive(serde::Deserialize)]
//! struct Claim {
//!     family_id: u64,
//!     reward_type: u32,
//! }
//!
//! #[tokio::main]
//! async fn main() -> std::io::Result<()> {
//!     // One manager for the whole application. Its clones share the locks.
//!     let locks = LockManager::in_memory();
//!     let reward = key::from_fn(|Json(c): Json<Claim>| ("reward", c.family_id, c.reward_type));
//!     let app = Router::new()
//!         .route("/rewards/claim", post(claim).route_layer(LockLayer::new(&locks, reward)));
//!
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//!     // After SIGTERM or Ctrl-C, handlers finish and release their locks.
//!     let stop = locks.shutdown_on_signal(Duration::from_secs(20));
//!     axum::serve(listener, app).with_graceful_shutdown(stop).await
//! }
//!
//! // Runs alone for its key: check, compute, write.
//! async fn claim(lock: HeldLock, Json(claim): Json<Claim>) -> String {
//!     format!("claimed for family {} under {}\n", claim.family_id, lock.fencing_token())
//! }
//! ```
//!
//! Put the layer on the method router of the route, inside of all other layers:
//! [layer order](guide::layer_order).
//!
//! # Keys
//!
//! The second argument of [`LockLayer::new`] derives the key:
//!
//! ```
//! # use axum::extract::Path;
//! # use tower_lock::{LockLayer, LockManager, key};
//! # fn layers(locks: &LockManager) {
//! // A function of extractors.
//! LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| ("order", id)));
//! // Named fields.
//! LockLayer::new(locks, key::from_fields("order", key::path_param("id")));
//! // One key for all requests.
//! LockLayer::new(locks, key::fixed(("nightly", "mail")));
//! # }
//! ```
//!
//! [`key::from_parts`] derives keys from the request head, without Axum. See [`key`] and the page
//! about [keys](guide::keys).
//!
//! # Waiting
//!
//! By default a request is rejected at once while its key is held. With
//! [`wait`](LockLayer::wait) it waits, first come, first served. A [`LockManagerLayer`] provides
//! settings to all routes of a router:
//!
//! ```
//! # use std::time::Duration;
//! # use axum::{Router, routing::post};
//! # use tower_lock::{LockLayer, LockManager, LockManagerLayer, key};
//! # async fn pay() {}
//! # fn app(locks: &LockManager) -> Router {
//! # let order = key::fixed(("order",));
//! Router::new()
//!     .route("/pay", post(pay).route_layer(LockLayer::new(locks, order)))
//!     .layer(LockManagerLayer::new(locks).wait(Duration::from_secs(2)))
//! # }
//! ```
//!
//! See [`LockPolicy`] for all settings, and [configuration](guide::configuration) for the decisions
//! behind them.
//!
//! # Extractors
//!
//! - [`HeldLock`] is the lock of the request: its key, its fencing token and the time that remains.
//!   A handler that takes it does not run without a lock.
//! - [`HeldPermit`] is the same for one of several holders: [`LockLayer::at_most`] and
//!   [`LockLayer::shared_for`].
//! - [`Locked`] acquires the lock of the value that it extracts, which implements [`HasLockKey`].
//!
//! # Retries and jobs
//!
//! A [`ReplayLayer`] sends the first answer to each retry of a request, by its `Idempotency-Key`.
//! [`Once`] keeps the answer in the transaction of the handler. See
//! [idempotency](guide::idempotency). [`LockManager::once`] runs a job once on several machines,
//! and [`LockManager::lead`] runs a worker in one process at a time.
//!
//! # Locks without HTTP
//!
//! [`LockManager::lock`] and [`LockManager::try_lock`] return a [`LockGuard`],
//! [`LockManager::permit`] and [`LockManager::read`] a [`PermitGuard`]. In a handler they re-enter
//! the lock of the request. See [without HTTP](guide::without_http) and
//! [nested locks](guide::nested_locks).
//!
//! # Errors
//!
//! The layers add no errors to a service. A request without its lock gets a response, with the
//! [`Rejection`] in its extensions; its handler is not started.
//! [Waiting and rejections](guide::waiting_and_rejections) lists the statuses. Calls without HTTP
//! return a [`LockError`]. A lock that is lost reports [`LockLost`].
//!
//! # Feature flags
//!
//! | feature | default | content |
//! |---|---|---|
//! | `axum` | yes | [`key::from_fn`], fields of paths and bodies, [`HeldLock`], [`Locked`] |
//! | `memory` | yes | [`MemoryStore`] and [`LockManager::in_memory`]: locks within one process |
//! | `signal` | yes | [`LockManager::shutdown_on_signal`] |
//! | `console` | no | [`console::router`]: holders and waiters for an operator, revocation |
//! | `metrics` | no | counters, gauges and histograms of the `metrics` facade |
//! | `mysql` | no | [`MysqlStore`]: locks in the MySQL or MariaDB of an application |
//! | `mysql-tls` | no | `sslmode=require`, with rustls, as `redis-tls` |
//! | `postgres` | no | [`PostgresStore`]: locks in the database that an application has already |
//! | `postgres-tls` | no | `sslmode=require`, with rustls, as `redis-tls` |
//! | `redis` | no | [`RedisStore`], [`RedlockStore`]: locks that many instances share |
//! | `redis-tls` | no | `rediss://`, with rustls, and *ring* if no other provider is installed |
//! | `test-util` | no | [`test_util`], for tests only: [testing handlers] |
//! | `uuid` | no | `Uuid` as a part of a key |
//! | `zookeeper` | no | [`ZooKeeperStore`]: locks in an ensemble of ZooKeeper |
//! | `zookeeper-tls` | no | `zookeepers://`, with rustls, as `redis-tls` |
//!
//! Every feature can be enabled on its own; the crate also builds without features.
//!
//! [observability]: guide::observability
//! [testing handlers]: guide::testing_handlers

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(all(
        feature = "axum",
        feature = "console",
        feature = "memory",
        feature = "redis",
        feature = "signal",
        feature = "test-util",
    )),
    allow(rustdoc::broken_intra_doc_links, reason = "the pages link to items of every feature")
)]

// Keys, the HTTP half, the lock half, stores.
pub mod key;
pub mod lock;
pub mod middleware;
pub mod replay;
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub mod extract;
#[cfg(feature = "console")]
#[cfg_attr(docsrs, doc(cfg(feature = "console")))]
pub mod console;
pub mod store;
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub mod tickets;
#[cfg(feature = "test-util")]
#[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
pub mod test_util;
#[cfg(feature = "__internals")]
#[doc(hidden)]
#[path = "internals.rs"]
pub mod __internals;

#[cfg(fuzzing)]
#[doc(hidden)]
#[path = "../fuzz/parsers.rs"]
pub mod parsers;

mod proto;
#[allow(unreachable_pub, reason = "public in `key`")]
mod key_source;
#[allow(unreachable_pub, reason = "public in `middleware` and in `key`")]
mod rejection;
#[allow(unreachable_pub, reason = "public in `middleware`")]
mod body;
mod telemetry;
mod policy;
mod owner;
mod error;
#[allow(unreachable_pub, reason = "public in `key`")]
mod lock_key;
#[allow(unreachable_pub, clippy::must_use_candidate, reason = "public in `store`")]
mod acquisition;
mod fencing;
pub mod trace;
#[cfg(feature = "axum")]
mod origin;
mod process;
mod background;
mod runtime;
#[allow(
    unreachable_pub,
    clippy::must_use_candidate,
    reason = "in part public for the simulator alone: feature `__internals`"
)]
mod clock;
mod sync;
mod limits;

#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use self::extract::{HasLockKey, HasLockKeys, Locked};
#[cfg(feature = "memory")]
#[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
pub use self::store::MemoryStore;
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
pub use self::store::PostgresStore;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use self::store::{RedisStore, RedlockStore};
pub use self::{
    acquisition::AcquisitionId,
    error::{LockError, LockLost, RunError},
    fencing::FencingToken,
    lock::{
        HeldLock, HeldLocks, HeldPermit, Holding, LockGuard, LockGuards, LockManager, LockManagerBuilder, LockStatus,
        PermitGuard, Ticket,
    },
    lock_key::LockKey,
    middleware::{LockLayer, LockManagerLayer},
    owner::Owner,
    policy::{LockPolicy, LogKey, OnDisconnect, OnLost, ReleaseAt, RequestBodyMode},
    proto::lease::Lease,
    rejection::Rejection,
    replay::{AnswerError, Keep, Once, ReplayLayer},
};
#[cfg(feature = "mysql")]
#[cfg_attr(docsrs, doc(cfg(feature = "mysql")))]
pub use crate::store::MysqlStore;
#[cfg(feature = "zookeeper")]
#[cfg_attr(docsrs, doc(cfg(feature = "zookeeper")))]
pub use crate::store::ZooKeeperStore;
/// The version of `deadpool_redis` whose types this crate uses.
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use deadpool_redis;

// The examples need all of these features.
#[cfg(all(
    any(doc, doctest),
    any(
        not(doctest),
        all(
            feature = "axum",
            feature = "console",
            feature = "memory",
            feature = "redis",
            feature = "signal",
            feature = "test-util",
        ),
    ),
))]
pub mod guide {
    //! The guide: one page per subject.
    //!
    //! - [Which lock do I need?](which_lock): one key, several, once, lead, replay, or no lock
    //! - [Getting started](getting_started): a 409 on your own handler in ten minutes
    //! - [Keys](keys): key functions, named fields, extracted values
    //! - [Waiting and rejections](waiting_and_rejections): when to wait, each status, and whether
    //!   to retry
    //! - [Layer order](layer_order): the lock among other layers, `route_layer` or `layer`
    //! - [Configuration](configuration): each setting and its default, and all limits
    //! - [Streaming and disconnects](streaming_and_disconnects): when a lock is released
    //! - [Idempotency](idempotency): each retry gets the first answer
    //! - [Tickets](tickets): a lock over several requests, and the lock of an editor
    //! - [Nested locks and spawned tasks](nested_locks): re-entrancy and owners
    //! - [Observability](observability): logs, spans, metrics, the state of a key
    //! - [Console](console): pages for an operator, and revocation
    //! - [Testing handlers](testing_handlers): a 409, a store that fails, a lock that is lost
    //! - [Without HTTP](without_http): jobs, guards, revocation, shutdown
    //! - [Redis in production](redis_in_production): sizing, permissions, failures, a runbook
    //! - [PostgreSQL in production](postgres_in_production): rights, poolers, failures, a runbook
    //! - [MySQL in production](mysql_in_production): rights, settings, failures, a runbook
    //! - [ZooKeeper in production](zookeeper_in_production): sessions, rights, failures, a runbook
    //! - [Locks and transactions](locks_and_transactions): the check of a lock in a transaction
    //! - [Topologies](topologies): one Redis, Sentinel, Cluster, Redlock, a database, ZooKeeper
    //! - [Recipes](recipes): a nightly job, sessions, server-sent events, gRPC, an outbox

    macro_rules! pages {
        ($examples:meta: $($(#[$pictures:meta])? $page:ident = $file:literal,)*) => {$(
            $(#[$pictures])?
            #[cfg_attr(not(doctest), doc = include_str!("links.md"))]
            #[cfg_attr($examples, doc = include_str!(concat!("../docs/guide/", $file)))]
            pub mod $page {}
        )*};
    }

    pages! {
        all():
        getting_started = "getting-started.md",
        keys = "keys.md",
        waiting_and_rejections = "waiting-and-rejections.md",
        layer_order = "layer-order.md",
        configuration = "configuration.md",
        streaming_and_disconnects = "streaming-and-disconnects.md",
        nested_locks = "nested-locks.md",
        tickets = "tickets.md",
        observability = "observability.md",
        // The first definition of a label counts, and rustdoc has no place for files beside a page.
        #[cfg_attr(not(doctest), doc = include_str!("pictures.txt"))]
        console = "console.md",
        testing_handlers = "testing-handlers.md",
        without_http = "without-http.md",
        redis_in_production = "redis-in-production.md",
        postgres_in_production = "postgres-in-production.md",
        mysql_in_production = "mysql-in-production.md",
        zookeeper_in_production = "zookeeper-in-production.md",
        topologies = "topologies.md",
    }
    // The examples crate tests the code of these, which needs a database.
    pages! {
        not(doctest):
        which_lock = "which-lock.md",
        idempotency = "idempotency.md",
        locks_and_transactions = "locks-and-transactions.md",
        recipes = "recipes.md",
    }
}

/// The other pages of `docs/`.
#[cfg(any(doc, doctest))]
pub mod docs {
    #[doc = "[redis-failures]: crate::guide::redis_in_production#what-happens-when-redis-fails\n"]
    #[doc = "[postgres-rights]: crate::guide::postgres_in_production#which-rights-are-required\n"]
    #[doc = "[mysql-rights]: crate::guide::mysql_in_production#which-rights-are-required\n"]
    #[doc = "[mysql-settings]: crate::guide::mysql_in_production#which-settings-must-mysql-have\n"]
    #[cfg_attr(not(doctest), doc = include_str!("../docs/guarantees.md"))]
    pub mod guarantees {}
    #[doc = include_str!("../docs/comparison.md")]
    pub mod comparison {}
    #[doc = "[`LockStore`]: crate::store::LockStore\n[`StoreErrorKind`]: crate::store::StoreErrorKind\n"]
    #[doc = include_str!("../docs/implementing-a-store.md")]
    pub mod implementing_a_store {}
    #[cfg_attr(not(doctest), doc = include_str!("links.md"))]
    #[doc = include_str!("../docs/migrating-from-redisson.md")]
    pub mod migrating_from_redisson {}
}

#[cfg(any(doc, doctest))]
#[doc = include_str!("../docs/problem-types.md")]
pub mod problem {}

/// Tests the examples of the README.
#[cfg(all(doctest, feature = "axum", feature = "memory", feature = "redis", feature = "signal"))]
#[doc = include_str!("../README.md")]
mod readme {}
