//! The named fields of a request.

use std::{any::type_name, fmt};

use http::{Extensions, HeaderName};

use crate::{
    lock_key::{part::KeyPart, writer::KeyWriter},
    rejection::field_error::FieldLocation,
};

/// Named field of a request, which becomes one part of a key of
/// [`from_fields`](crate::key::from_fields).
///
/// Created by [`header`], [`query_param`], [`extension`], [`path_param`](crate::key::path_param),
/// [`json_field`](crate::key::json_field) and [`form_field`](crate::key::form_field).
#[must_use = "a field does nothing before it is passed to `from_fields`"]
#[derive(Clone, Copy)]
pub struct Field(pub(super) Source);

/// The source of a field.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// A text that the client sends.
    Text(FieldLocation, &'static str),
    /// A value that an outer layer inserts: the name of its type, and the function that writes it.
    Extension(&'static str, fn(&Extensions, &mut KeyWriter) -> bool),
}

/// Creates a field for a header. The name is case-insensitive. Works without Axum.
///
/// ```
/// # use tower_lock::{LockLayer, LockManager, key};
/// # fn layer(locks: &LockManager) {
/// LockLayer::new(locks, key::from_fields("tenant", key::header("x-tenant")));     // tenant:acme
/// # }
/// ```
///
/// # Errors
///
/// Rejects with 400 if the header is missing, duplicated, not visible ASCII, or not a valid part
/// ([`from_fields`](crate::key::from_fields)). A list with commas in one header is one text. Over
/// HTTP/2 `host` is missing, because it is a part of the URI.
///
/// # Panics
///
/// Panics if the name is not a valid header name.
pub fn header(name: &'static str) -> Field {
    let is_valid = HeaderName::try_from(name).is_ok();
    assert!(is_valid, "{name:?} is not a valid header name");
    Field::text(FieldLocation::Header, name)
}

/// Creates a field for a query parameter, decoded (`%31` is `1`, `+` is a space). Works without
/// Axum.
///
/// ```
/// # use tower_lock::{LockLayer, LockManager, key};
/// # fn layer(locks: &LockManager) {
/// // /pay?id=7: order:7
/// LockLayer::new(locks, key::from_fields("order", key::query_param("id")));
/// # }
/// ```
///
/// # Errors
///
/// Rejects with 400 if the parameter is missing, duplicated, or not a valid part
/// ([`from_fields`](crate::key::from_fields)).
pub fn query_param(name: &'static str) -> Field {
    Field::text(FieldLocation::Query, name)
}

/// Creates a field for a value that an outer layer has inserted into the extensions of the request,
/// such as the authenticated tenant. Works without Axum.
///
/// The [`KeyPart`] implementation of the value writes its text. The text is not checked, because no
/// client wrote it.
///
/// ```
/// # use tower_lock::{key::{KeyPart, PartWriter, self}, LockLayer, LockManager};
/// #[derive(Clone)]
/// struct TenantId(u64);
///
/// impl KeyPart for TenantId {
///     fn write(&self, part: &mut PartWriter<'_>) {
///         self.0.write(part);
///     }
/// }
/// # fn layer(locks: &LockManager) {
/// LockLayer::new(locks, key::from_fields("tenant", key::extension::<TenantId>()));    // tenant:3
/// # }
/// ```
///
/// # Errors
///
/// Rejects with 500 if the value is missing, as `Extension` of Axum does. The layer that inserts
/// the value must be outside of the lock layer.
pub fn extension<T: KeyPart + Send + Sync + 'static>() -> Field {
    let write = |extensions: &Extensions, key: &mut KeyWriter| match extensions.get::<T>() {
        Some(value) => {
            key.part(value);
            true
        }
        None => false,
    };
    Field(Source::Extension(type_name::<T>(), write))
}

/// Creates a field for a path parameter of the route that an Axum router has matched, decoded
/// (`%31` is `1`). Needs the feature `axum`.
///
/// ```
/// # use axum::{Router, routing::post};
/// # use tower_lock::{LockLayer, LockManager, key};
/// # async fn pay() {}
/// # fn app(locks: &LockManager) -> Router {
/// Router::new().route("/orders/{id}/pay", post(pay).route_layer(
///     LockLayer::new(locks, key::from_fields("order", key::path_param("id")))))       // order:7
/// # }
/// ```
///
/// # Errors
///
/// Rejects with 400 if the parameter is not UTF-8, or not a valid part
/// ([`from_fields`](crate::key::from_fields)). Rejects with 500 if the route has no parameter of
/// this name, or two.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub fn path_param(name: &'static str) -> Field {
    Field::text(FieldLocation::Path, name)
}

/// Creates a field for a top-level field of the JSON object in the body: a string, an integer
/// between -2^53 and 2^53, or a boolean. Needs the feature `axum`.
///
/// The body is read as by [`key::from_fn`](crate::key::from_fn): once, before a lock is acquired,
/// within the `DefaultBodyLimit` of the route, and replayed byte for byte. The `Content-Type` is
/// not checked. The handler must check it, and must read the body as JSON.
///
/// ```
/// # use axum::{Router, routing::post};
/// # use tower_lock::{LockLayer, LockManager, key};
/// # async fn claim() {}
/// # fn app(locks: &LockManager) -> Router {
/// // {"family_id": 42, "reward_type": "gold"}: reward:42:gold
/// let fields = (key::json_field("family_id"), key::json_field("reward_type"));
/// let layer = LockLayer::new(locks, key::from_fields("reward", fields));
/// Router::new().route("/rewards/claim", post(claim).route_layer(layer))
/// # }
/// ```
///
/// `42` and `"42"` are the same part, and so are `true` and `"true"`.
///
/// # Errors
///
/// Rejects with 413 if the body is too long, with 408 if it arrives too slowly, with 503 if it
/// does not fit into its part of the budget for bodies, and with 400 if the body is not JSON.
///
/// Rejects with 422 if the body is not an object, or if the field is missing, duplicated, a float
/// (`1.0`, `1e0`, `-0`), an integer of 2^53 or more, `null`, an array, an object, or a string that
/// is not a valid part ([`from_fields`](crate::key::from_fields)). Large integers are rejected
/// because a reader that parses numbers as floats, such as JavaScript, cannot distinguish them.
/// Send them as strings. Other names of the field (`serde(alias)`) are not read.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub fn json_field(name: &'static str) -> Field {
    Field::text(FieldLocation::Json, name)
}

/// Creates a field for a field of a form (`application/x-www-form-urlencoded`), decoded (`%31` is
/// `1`, `+` is a space). Needs the feature `axum`.
///
/// The form is the body, and for `GET` the query, as for `Form` of Axum. The body is read as for a
/// [`json_field`]. Its `Content-Type` is not checked.
///
/// ```
/// # use axum::{Router, routing::post};
/// # use tower_lock::{LockLayer, LockManager, key};
/// # async fn seat() {}
/// # fn app(locks: &LockManager) -> Router {
/// // row=B&no=7: seat:B:7
/// let fields = (key::form_field("row"), key::form_field("no"));
/// let layer = LockLayer::new(locks, key::from_fields("seat", fields));
/// Router::new().route("/seats", post(seat).route_layer(layer))
/// # }
/// ```
///
/// # Errors
///
/// Rejects with 408, 413 and 503 as a [`json_field`] does, and with 422 if the field is missing,
/// duplicated, or not a valid part ([`from_fields`](crate::key::from_fields)).
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub fn form_field(name: &'static str) -> Field {
    Field::text(FieldLocation::Form, name)
}

impl Field {
    fn text(location: FieldLocation, name: &'static str) -> Self {
        Self(Source::Text(location, name))
    }

    /// Location and name. `None` for an extension, which no client sends.
    pub(crate) fn sent(&self) -> Option<(FieldLocation, &'static str)> {
        match self.0 {
            Source::Text(location, name) => Some((location, name)),
            Source::Extension(..) => None,
        }
    }

    /// Whether the field is in the body.
    pub(crate) fn reads_body(&self) -> bool {
        self.is_at(FieldLocation::Json) || self.is_at(FieldLocation::Form)
    }

    pub(super) fn is_at(&self, location: FieldLocation) -> bool {
        matches!(self.0, Source::Text(at, _) if at == location)
    }

    pub(super) fn is_named(&self, location: FieldLocation, name: &str) -> bool {
        matches!(self.0, Source::Text(at, own) if at == location && own == name)
    }
}

impl fmt::Debug for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Source::Text(location, name) => write!(f, "{location:?}({name})"),
            Source::Extension(name, _) => write!(f, "Extension({name})"),
        }
    }
}
