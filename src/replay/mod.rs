//! Replay of answers: each retry of a request gets the first answer.
//!
//! A client repeats a request when it has received no answer. The first attempt may have run: a
//! second run would pay twice. [`ReplayLayer`] runs one attempt, and keeps its answer for the
//! others. The [guide](crate::guide::idempotency) shows how.

// In the order in which a request reaches them.
mod layer;
mod config;
mod service;
pub(crate) mod idempotency_key;
pub(crate) mod fingerprint;
mod once;
mod recorder;
mod scope_usage;
mod keep;
mod headers;
pub(crate) mod answer;
mod docs_link;

#[cfg(feature = "axum")]
pub(crate) use self::once::Unrecorded;
pub use self::{
    keep::Keep,
    layer::ReplayLayer,
    once::{AnswerError, Once, OnceAnswer},
    service::ReplayService,
};
