//! From a request to its key, without Axum.

#[cfg(feature = "axum")]
pub(crate) mod from_fn;
pub(crate) mod from_parts;
pub(crate) mod fields;
pub(crate) mod fixed;

use std::future::Future;

use http::{Response, request::Parts};

use crate::{
    body::reader::BodyReader,
    lock_key::{LockKey, part::KeyTuple},
    rejection::{Rejection, RejectionBody},
};

/// What a key function may answer.
///
/// | answer | means |
/// |---|---|
/// | `("order", id)`, a tuple of a namespace and up to six parts | this key |
/// | a [`LockKey`] | this key |
/// | an `Option` of these | `None`: the request needs no lock |
/// | a `Result` of these | `Err` is sent as the response: anything that is `IntoResponse`, without Axum a `Response` or a `StatusCode` |
#[diagnostic::on_unimplemented(
    message = "answer `(\"namespace\", part, ..)` with integers, strings, `bool`, `char` or `Uuid` (feature `uuid`) as parts: `{Self}` is not an answer of a key function",
    label = "this cannot be made into a lock key",
    note = "answer a tuple whose first element is the namespace, a `&'static str` (`(\"order\", id)`), a `LockKey`, an `Option` (`None`: no lock needed) or a `Result` of these (`Err`, an `IntoResponse`, is sent as the response)",
    note = "up to six parts follow it: integers, `bool`, `char`, strings and `Uuid` (feature `uuid`); a float is none: `0.1 + 0.2` and `0.3` would be two locks"
)]
pub trait IntoLockKey {
    #[doc(hidden)]
    fn into_lock_key(self) -> Result<Option<LockKey>, Response<RejectionBody>>;
}

/// What the error of a key function may be: a response.
pub trait IntoKeyRejection {
    #[doc(hidden)]
    fn into_answer(self) -> Response<RejectionBody>;
}

/// Something a [`LockLayer`](crate::LockLayer) can take keys from: what [`key::from_fn`](crate::key::from_fn),
/// [`from_fn_with_state`](crate::key::from_fn_with_state), [`from_parts`], [`from_fields`](crate::key::from_fields) and [`fixed`](crate::key::fixed) make.
///
/// Not to be implemented.
#[diagnostic::on_unimplemented(
    message = "write `LockLayer::new(&locks, key::from_fn(..))`: without `key::from_fn(..)` around it `{Self}` is not a key source",
    label = "a layer cannot take keys from this",
    note = "wrap the key function: `LockLayer::new(&locks, key::from_fn(|Path(id): Path<u64>| (\"order\", id)))`, or `key::from_parts(|parts| ..)` without Axum",
    note = "without a function: `key::from_fields(\"order\", key::path_param(\"id\"))`, `key::fixed((\"nightly\", \"mail\"))`"
)]
pub trait KeySource: Clone + Send + Sync + 'static {
    /// The key. What it says of the head alone, it says before it asks for the body.
    #[doc(hidden)]
    fn derive(
        &self,
        head: &mut Parts,
        body: &mut BodyReader<'_>,
    ) -> impl Future<Output = Result<Option<LockKey>, NoKey>> + Send;
}

/// Why there is no key.
#[doc(hidden)]
#[derive(Debug)]
pub enum NoKey {
    /// An extractor or the key function answered: which one, by the name of its type.
    Answered(Response<RejectionBody>, Option<&'static str>),
    /// We could not ask.
    Rejected(Rejection),
    /// It is made of what a router has matched, and none has.
    NoRoute,
}

impl From<Rejection> for NoKey {
    fn from(rejection: Rejection) -> Self {
        Self::Rejected(rejection)
    }
}

/// Whether a router has matched a route. A layer on a whole router is asked for other requests, too.
pub(crate) fn has_route(head: &Parts) -> bool {
    #[cfg(feature = "axum")]
    return head.extensions.get::<axum::extract::MatchedPath>().is_some();
    #[cfg(not(feature = "axum"))]
    {
        let _ = head;
        true
    }
}

// === impl IntoLockKey ===

impl IntoLockKey for LockKey {
    fn into_lock_key(self) -> Result<Option<LockKey>, Response<RejectionBody>> {
        Ok(Some(self))
    }
}

impl<T: KeyTuple> IntoLockKey for T {
    fn into_lock_key(self) -> Result<Option<LockKey>, Response<RejectionBody>> {
        Ok(Some(self.into()))
    }
}

impl<T: IntoLockKey> IntoLockKey for Option<T> {
    fn into_lock_key(self) -> Result<Option<LockKey>, Response<RejectionBody>> {
        self.map_or(Ok(None), IntoLockKey::into_lock_key)
    }
}

impl<T: IntoLockKey, E: IntoKeyRejection> IntoLockKey for Result<T, E> {
    fn into_lock_key(self) -> Result<Option<LockKey>, Response<RejectionBody>> {
        self.map_err(IntoKeyRejection::into_answer)?.into_lock_key()
    }
}

// === impl KeyError ===

#[cfg(feature = "axum")]
impl<E: axum::response::IntoResponse> IntoKeyRejection for E {
    fn into_answer(self) -> Response<RejectionBody> {
        self.into_response().map(RejectionBody::new)
    }
}

// The same that Axum knows: with its feature on, what compiled without still does.
#[cfg(not(feature = "axum"))]
impl IntoKeyRejection for http::StatusCode {
    fn into_answer(self) -> Response<RejectionBody> {
        let mut response = Response::new(RejectionBody::new(http_body_util::Empty::new()));
        *response.status_mut() = self;
        response
    }
}

#[cfg(not(feature = "axum"))]
impl<B> IntoKeyRejection for Response<B>
where
    B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<tower::BoxError>,
{
    fn into_answer(self) -> Response<RejectionBody> {
        self.map(RejectionBody::new)
    }
}

#[cfg(not(feature = "axum"))]
impl IntoKeyRejection for crate::lock_key::RawKeyError {
    fn into_answer(self) -> Response<RejectionBody> {
        let mut response = Response::new(RejectionBody::new(http_body_util::Full::from(self.to_string())));
        *response.status_mut() = http::StatusCode::BAD_REQUEST;
        response
    }
}

#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl axum::response::IntoResponse for crate::lock_key::RawKeyError {
    /// 400: the name came with the request.
    fn into_response(self) -> axum::response::Response {
        (http::StatusCode::BAD_REQUEST, self.to_string()).into_response()
    }
}
