//! Tower layers, their services, and the types of their requests and responses.

// In the order in which a request reaches them. No module names a store.
mod layer;
mod holder_limit;
pub(crate) mod config;
pub(crate) mod service;
mod reject;
mod client;
mod manager_layer;
pub(crate) mod context;
pub(crate) mod acquire;
mod disconnect;
mod shares;
mod prefer;
pub(crate) mod handler;
pub(crate) mod request_lock;
pub(crate) mod request_locks;
pub(crate) mod record;
pub(crate) mod response;
pub(crate) mod future;

pub use self::{
    client::{ClientConnection, ClientKey},
    future::ResponseFuture,
    layer::LockLayer,
    manager_layer::{LockManagerLayer, LockManagerService},
    response::ResponseBody,
    service::LockService,
};
pub use crate::body::request_body::RequestBody;
pub use crate::rejection::RejectionBody;
