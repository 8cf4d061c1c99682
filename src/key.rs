//! Sources that derive the keys of locks from requests, and parts of keys.

pub use crate::key_source::fields::field::{Field, extension, header, query_param};
pub use crate::key_source::fields::from_fields;
pub use crate::key_source::fixed::{Fixed, fixed};
pub use crate::key_source::{IntoLockKey, KeySource, from_parts::from_parts};
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use crate::key_source::{
    fields::field::{form_field, json_field, path_param},
    from_fn::{from_fn, from_fn_with_state},
};
pub use crate::lock_key::{
    AllKeys, KeyCountError, RawKeyError,
    part::{KeyPart, PartWriter, display},
    several::all,
};
pub use crate::rejection::field_error::{FieldError, FieldProblem};
