//! Request in, response body out: the HTTP half. It names no store.
//!
//! The way of a request, file by file, is a table in the README.

#[cfg(feature = "axum")]
mod body_in;
mod body_out;
#[cfg(feature = "axum")]
mod by;
mod config;
mod future;
mod key_source;
mod layer;
mod locks_layer;
mod rejection;
mod retry_after;
mod section;
mod service;
mod trace;

#[cfg(feature = "axum")]
pub use self::by::{Answer, By, KeyFn, by, by_with_state};
pub use self::{
    body_out::ResponseBody,
    future::ResponseFuture,
    key_source::{ByParts, IntoLockKey, KeyError, KeySource, KeySourceFor, by_parts},
    layer::LockLayer,
    locks_layer::{LocksLayer, LocksService},
    rejection::{Rejection, RejectionBody},
    service::LockService,
};
