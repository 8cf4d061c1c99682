//! Tower layers, their services, and the types of their requests and responses.

// In the order in which a request reaches them. No module names a store.
mod layer;
mod config;
mod service;
pub(crate) mod unlocked;
mod reject;
mod connection;
mod manager_layer;
pub(crate) mod context;
mod manager_state;
mod disconnect;
mod prefer;
mod abort;
mod handler;
mod pipeline;
mod request_lock;
mod request_locks;
mod response;
mod response_body;
mod eager;
mod complete_body;
mod streaming_body;
mod shared_body;
mod stall_monitor;
mod future;
mod replay;

#[cfg(feature = "axum")]
pub(crate) use self::replay::Unrecorded;
pub use self::{
    connection::ClientConnection,
    future::ResponseFuture,
    layer::LockLayer,
    manager_layer::{LockManagerLayer, LockManagerService},
    replay::{AnswerError, Once, OnceAnswer, ReplayLayer, ReplayService},
    response_body::ResponseBody,
    service::LockService,
};
pub use crate::body::request_body::RequestBody;
pub use crate::rejection::{Rejection, RejectionBody};
