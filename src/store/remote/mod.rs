//! What every store over a network needs, without its server.
//!
//! A store of another kind of server brings its language and its topology. These modules bring what
//! is the same for all of them: calls that are under way together share the next one, a call
//! expires by an estimate of the server's clock, a connection is replaced when it breaks, and
//! messages reach their managers.

#[cfg(any(feature = "__database", feature = "redis"))]
#[allow(unreachable_pub, reason = "public for the simulator alone: feature `__internals`")]
pub(crate) mod batch;
#[cfg(any(feature = "__database", feature = "redis"))]
pub(crate) mod batching;
#[cfg(any(feature = "__database", feature = "redis"))]
pub(crate) mod inline;
#[allow(unreachable_pub, reason = "public for the simulator alone: feature `__internals`")]
pub(crate) mod server_clock;
pub(crate) mod settings;
pub(crate) mod credentials;
pub(crate) mod tls;
#[cfg(any(feature = "redis", feature = "zookeeper"))]
pub(crate) mod stream;
pub(crate) mod link;
#[cfg(any(feature = "postgres", feature = "redis"))]
pub(crate) mod inbox;
#[cfg(any(feature = "postgres", feature = "redis"))]
pub(crate) mod session;
pub(crate) mod task;
