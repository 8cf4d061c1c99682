//! The key of a lock, and how it is derived from a request.

pub use crate::lock_key::{
    RawKeyError,
    part::{DisplayPart, KeyPart, KeyTuple, PartWriter, display},
};
pub use crate::middleware::by_fields::{Fields, FromFields, from_fields};
pub use crate::middleware::constant::{Fixed, fixed};
pub use crate::middleware::field::{Field, extension, header, query_param};
pub use crate::middleware::key_source::{FromParts, IntoKeyRejection, IntoLockKey, KeySource, from_parts};
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use crate::middleware::{
    by::{FromFn, KeyFn, KeyFnOutput, from_fn, from_fn_with_state},
    field::{form_field, json_field, path_param},
};
pub use crate::rejection::field_error::{FieldError, FieldProblem};
