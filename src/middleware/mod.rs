//! Request in, response body out: the HTTP half. It names no store.
//!
//! The way of a request, file by file, is a table in the README.

// In the order in which a newcomer reads them: along the way of a request.
mod layer;
mod config;
mod service;
mod reject;
mod connection;
mod manager_layer;
pub(crate) mod context;
mod prefer;
mod owner_lifetime;
mod abort;
mod request_lock;
mod request_locks;
mod response;
mod response_body;
mod complete_body;
mod streaming_body;
mod shared_body;
mod stall_monitor;
mod future;

pub use self::{
    connection::ClientConnection,
    future::ResponseFuture,
    layer::LockLayer,
    manager_layer::{LockManagerLayer, LockManagerService},
    response_body::ResponseBody,
    service::LockService,
};
pub use crate::body::request_body::RequestBody;
pub use crate::rejection::{Rejection, RejectionBody};
