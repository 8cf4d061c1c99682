//! Request in, response body out: the HTTP half. It names no store.
//!
//! The way of a request, file by file, is a table in the README.

// In the order in which a newcomer reads them: along the way of a request.
mod layer;
mod config;
mod service;
mod key_source;
#[cfg(feature = "axum")]
mod by;
mod by_fields;
mod field;
mod finder;
mod spelling;
mod field_error;
mod constant;
mod request_body;
mod connection;
mod body_in;
mod pace;
mod locks_layer;
mod slot;
mod prefer;
mod section;
mod ending;
mod body_out;
mod stream;
mod future;
mod rejection;
mod retry_after;
mod trace;

pub use self::{
    body_out::ResponseBody,
    by_fields::{ByFields, Fields, by_fields},
    connection::ClientConnection,
    constant::{Constant, constant},
    field::{Field, extension, header, query_param},
    field_error::{FieldError, FieldProblem},
    future::ResponseFuture,
    key_source::{ByParts, IntoLockKey, KeyError, KeySource, by_parts},
    layer::LockLayer,
    locks_layer::{LocksLayer, LocksService},
    rejection::{Rejection, RejectionBody},
    request_body::RequestBody,
    service::LockService,
};
#[cfg(feature = "axum")]
pub use self::{
    by::{Answer, By, KeyFn, by, by_with_state},
    field::{form_field, json_field, path_param},
};
#[cfg(feature = "axum")]
pub(crate) use self::{slot::Slot, trace::Route};
