//! What can be taken from a request by name.

use std::{any::type_name, fmt};

use http::{Extensions, HeaderName};

use crate::{
    lock_key::{part::KeyPart, writer::KeyWriter},
    rejection::field_error::Place,
};

/// A field of a request: the text of one part of a key. For [`from_fields`](crate::key::from_fields).
///
/// Made by [`header`], [`query_param`], [`extension`], [`path_param`](crate::key::path_param), [`json_field`](crate::key::json_field) and
/// [`form_field`](crate::key::form_field).
#[must_use = "a field says nothing before `by_fields` has it"]
#[derive(Clone, Copy)]
pub struct Field {
    pub(super) source: Source,
}

/// Where the text of a field comes from.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub enum Source {
    /// The client wrote it.
    Text(Place, &'static str),
    /// A layer outside has put it there: the name of its type, and how to write it if it is there.
    Extension(&'static str, fn(&Extensions, &mut KeyWriter) -> bool),
}

/// A header, by its name in any case. Without Axum, too.
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
/// 400 if it is missing, given twice, not visible ASCII, or of no use as a part ([`from_fields`](crate::key::from_fields)). A list with
/// commas in one header is one text. (`host` is none over HTTP/2: it is a part of the URI there.)
///
/// # Panics
///
/// If no header can have this name.
pub fn header(name: &'static str) -> Field {
    let is_one = HeaderName::try_from(name).is_ok();
    assert!(is_one, "{name:?} is not the name of a header");
    Field::text(Place::Header, name)
}

/// A parameter of the query, decoded (`%31` is `1`, `+` a blank). Without Axum, too.
///
/// ```
/// # use tower_lock::{LockLayer, LockManager, key};
/// # fn layer(locks: &LockManager) {
/// LockLayer::new(locks, key::from_fields("order", key::query_param("id")));       // /pay?id=7: order:7
/// # }
/// ```
///
/// # Errors
///
/// 400 if it is missing, given twice, or of no use as a part ([`from_fields`](crate::key::from_fields)).
pub fn query_param(name: &'static str) -> Field {
    Field::text(Place::Query, name)
}

/// A value that a layer outside has put into the extensions of the request: the tenant that was authenticated. Without
/// Axum, too.
///
/// It is written as its [`KeyPart`] says: what no client spelled needs no refusal.
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
/// 500 if it is missing, as of Axum's `Extension`: the layer that puts it there must stand outside of the lock.
pub fn extension<T: KeyPart + Send + Sync + 'static>() -> Field {
    let write = |extensions: &Extensions, key: &mut KeyWriter| match extensions.get::<T>() {
        Some(value) => {
            key.part(value);
            true
        }
        None => false,
    };
    Field { source: Source::Extension(type_name::<T>(), write) }
}

/// A parameter of the path that an Axum router has matched, decoded (`%31` is `1`). Needs the feature `axum`.
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
/// 400 if it is no UTF-8, or of no use as a part ([`from_fields`](crate::key::from_fields)); 500 if the route has no parameter of this name, or two.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub fn path_param(name: &'static str) -> Field {
    Field::text(Place::Path, name)
}

/// A field of the JSON object in the body, at its top: a string, an integer between -2^53 and 2^53, or a bool. Needs the feature `axum`.
///
/// The body is read as [`key::from_fn`](crate::key::from_fn) reads it: once, before anything is locked, within the route's `DefaultBodyLimit`, and given on byte for byte. Its
/// `Content-Type` is not looked at: that is for the handler, which must read it as JSON and nothing else.
///
/// ```
/// # use axum::{Router, routing::post};
/// # use tower_lock::{LockLayer, LockManager, key};
/// # async fn claim() {}
/// # fn app(locks: &LockManager) -> Router {
/// Router::new().route("/rewards/claim", post(claim).route_layer(
///     LockLayer::new(locks, key::from_fields("reward", (key::json_field("family_id"), key::json_field("reward_type"))))))  // reward:42:gold
/// # }
/// ```
///
/// `42` and `"42"` are one part, `true` and `"true"` are.
///
/// # Errors
///
/// 413 if the body is too long; 503 if the bodies of others take up the room that there is for those that wait; 400 if it is no
/// JSON. 422 if it is no object, or if the field is missing, given twice, a float (`1.0`, `1e0`, `-0`), an integer from 2^53 on (a reader that knows floats alone,
/// JavaScript for one, takes two of them for one: send it as a string), `null`, an array, an
/// object, or a string of no use as a part ([`from_fields`](crate::key::from_fields)). A name in other letters (`serde(alias)`) is missing.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub fn json_field(name: &'static str) -> Field {
    Field::text(Place::Json, name)
}

/// A field of a form (`application/x-www-form-urlencoded`), decoded (`%31` is `1`, `+` a blank): of the body, and for a `GET` of the query,
/// where Axum's `Form` finds it. Needs the feature `axum`.
///
/// The body is read as that of a [`json_field`]; its `Content-Type` is for the handler to look at.
///
/// ```
/// # use axum::{Router, routing::post};
/// # use tower_lock::{LockLayer, LockManager, key};
/// # async fn seat() {}
/// # fn app(locks: &LockManager) -> Router {
/// Router::new().route("/seats", post(seat).route_layer(
///     LockLayer::new(locks, key::from_fields("seat", (key::form_field("row"), key::form_field("no"))))))       // row=B&no=7: seat:B:7
/// # }
/// ```
///
/// # Errors
///
/// 413 and 503 as of a [`json_field`]; 422 if the field is missing, given twice, or of no use as a part
/// ([`from_fields`](crate::key::from_fields)).
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub fn form_field(name: &'static str) -> Field {
    Field::text(Place::Form, name)
}

impl Field {
    fn text(place: Place, name: &'static str) -> Self {
        Self { source: Source::Text(place, name) }
    }
}

impl Source {
    /// Whether it stands in the body.
    pub(super) fn is_of_body(&self) -> bool {
        #[cfg(feature = "axum")]
        return self.is_in(Place::Json) || self.is_in(Place::Form);
        #[cfg(not(feature = "axum"))]
        false
    }

    pub(super) fn is_in(&self, place: Place) -> bool {
        matches!(self, Self::Text(at, _) if *at == place)
    }

    /// Its name, if it is this field.
    pub(super) fn is(&self, place: Place, name: &str) -> Option<&'static str> {
        match self {
            Self::Text(at, own) if *at == place && *own == name => Some(*own),
            _ => None,
        }
    }
}

impl fmt::Debug for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(place, name) => write!(f, "{place:?}({name})"),
            Self::Extension(name, _) => write!(f, "Extension({name})"),
        }
    }
}
