//! The replay layer: every retry of a request gets the first answer.

// In the order in which a request reaches them.
mod layer;
mod config;
mod service;
mod once;
mod unrecorded;

#[cfg(feature = "axum")]
pub(crate) use self::unrecorded::Unrecorded;
pub use self::{
    layer::ReplayLayer,
    once::{AnswerError, Once, OnceAnswer},
    service::ReplayService,
};
