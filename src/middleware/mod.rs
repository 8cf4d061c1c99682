//! Request in, response body out: the HTTP half. It names no store.
//!
//! The way of a request, file by file, is a table in the README.

// In the order in which a newcomer reads them: along the way of a request.
mod layer;
mod config;
mod service;
mod connection;
mod locks_layer;
pub(crate) mod slot;
mod prefer;
mod section;
mod ending;
mod body_out;
mod stream;
mod future;

#[cfg(feature = "axum")]
pub(crate) use self::slot::Slot;
pub use self::{
    body_out::ResponseBody,
    connection::ClientConnection,
    future::ResponseFuture,
    layer::LockLayer,
    locks_layer::{LockManagerLayer, LockManagerService},
    service::LockService,
};
pub use crate::body::request_body::RequestBody;
pub use crate::rejection::{Rejection, RejectionBody};
