//! Sources of keys: from a request to its lock key.

#[cfg(feature = "axum")]
pub(crate) mod from_fn;
pub(crate) mod from_parts;
pub(crate) mod fields;
pub(crate) mod fixed;

use std::future::Future;

use http::{Extensions, Response, request::Parts};

use crate::{
    body::reader::BodyReader,
    lock::{HeldLock, HeldLocks},
    lock_key::{AllKeys, KeyCountError, LockKey, part::KeyTuple},
    rejection::{Rejection, RejectionBody},
};

/// Type that a key function returns.
///
/// | value | meaning |
/// |---|---|
/// | `("order", id)`, a tuple of a namespace and up to six parts | lock this key |
/// | a [`LockKey`] | lock this key |
/// | [`key::all([..])`](crate::key::all) of these | lock these keys, all of them or none |
/// | an `Option` of these | `None`: the request needs no lock |
/// | a `Result` of these | `Err` is the response, of any type that is `IntoResponse` |
/// | the same without Axum | `Err` is a `Response` or a `StatusCode` |
#[diagnostic::on_unimplemented(
    message = "return `(\"namespace\", part, ..)` with integers, strings, `bool` or `char` as parts (`Uuid` needs the feature `uuid`): `{Self}` is not a return type of a key function",
    label = "this cannot be made into a lock key",
    note = "return a tuple whose first element is the namespace, a `&'static str` (`(\"order\", id)`), a `LockKey`, an `Option` (`None`: no lock needed) or a `Result` of these (`Err`, an `IntoResponse`, is sent as the response)",
    note = "up to six parts follow it: integers, `bool`, `char` and strings (`Uuid` needs the feature `uuid`), a type of your own that implements `tower_lock::key::KeyPart`; floats are not allowed: `0.1 + 0.2` and `0.3` would be two locks"
)]
pub trait IntoLockKey {
    /// One key ([`LockKey`]), or several ([`AllKeys`]).
    type Keys: RequestKeys;

    #[doc(hidden)]
    fn into_lock_key(self) -> Result<Option<Self::Keys>, Response<RejectionBody>>;
}

/// One key, for a layer that keeps answers.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "take one key: a `ReplayLayer` keeps one answer for each of its keys, `newest_wins` is for one key, and `{Self}` has several",
    label = "several keys have neither one answer nor one newest request",
    note = "for a handler that also needs several locks, put a `LockLayer` with `key::all([..])` inside of the `ReplayLayer`"
)]
pub trait OneKey: RequestKeys {}

impl OneKey for LockKey {}

/// The keys of one request.
#[doc(hidden)]
pub trait RequestKeys: Into<AllKeys> + Send {
    /// What the handler finds in the extensions.
    type View: HeldView;
}

/// View of the locks of a request, for its handler.
#[doc(hidden)]
pub trait HeldView: Clone + Send + Sync + 'static {
    fn of(locks: impl Iterator<Item = HeldLock>) -> Self;

    /// Makes these the innermost locks.
    fn insert_into(self, extensions: &mut Extensions) {
        extensions.insert(self);
    }
}

/// Error type of a key function. It is converted into a response.
///
/// With the feature `axum` the trait is implemented for every `IntoResponse`. Without it, for
/// `StatusCode`, `Response` and [`RawKeyError`](crate::key::RawKeyError).
pub trait IntoKeyRejection {
    fn into_key_rejection(self) -> Response<RejectionBody>;
}

/// Source of the keys of a [`LockLayer`](crate::LockLayer).
///
/// Created by [`key::from_fn`](crate::key::from_fn),
/// [`from_fn_with_state`](crate::key::from_fn_with_state), [`from_parts`](crate::key::from_parts),
/// [`from_fields`](crate::key::from_fields) and [`fixed`](crate::key::fixed).
///
/// A function returns a layer as `LockLayer<impl KeySource>`. A struct that stores a layer has the
/// source as a type parameter.
///
/// The trait cannot be implemented outside of this crate.
#[diagnostic::on_unimplemented(
    message = "write `key::from_fn(..)`: without it around the function, `{Self}` is not a key source",
    label = "a layer cannot take keys from this",
    note = "wrap the key function: `LockLayer::new(&locks, key::from_fn(|Path(id): Path<u64>| (\"order\", id)))`, or `key::from_parts(|parts| ..)` without Axum",
    note = "a field without a function: `key::from_fields(\"order\", key::path_param(\"id\"))`, `key::fixed((\"nightly\", \"mail\"))`"
)]
pub trait KeySource: Clone + Send + Sync + 'static {
    /// One key ([`LockKey`]), or several ([`AllKeys`]). A layer locks either. The scope of a
    /// [`ReplayLayer`](crate::ReplayLayer) is one key.
    type Keys: RequestKeys;

    /// Derives the key. Rejections because of the head come before the body is read.
    #[doc(hidden)]
    fn extract_key(
        &self,
        head: &mut Parts,
        body: &mut BodyReader<'_>,
    ) -> impl Future<Output = Result<Option<Self::Keys>, KeyRejection>> + Send;
}

/// Why a request has no key.
#[doc(hidden)]
#[derive(Debug)]
pub enum KeyRejection {
    /// An extractor or the key function returned a response. With the type name of the extractor.
    Response(Response<RejectionBody>, Option<&'static str>),
    /// The request was rejected by this crate.
    Rejection(Rejection),
    /// The key needs a matched route, and no route matched.
    NoRoute,
    /// There is no key, or there are too many.
    KeyCount(KeyCountError),
    /// The key is required, and its scope is none.
    NoScope,
    /// A mistake of the service in the number of holders, which the log names.
    Mistake(String),
}

impl From<Rejection> for KeyRejection {
    fn from(rejection: Rejection) -> Self {
        Self::Rejection(rejection)
    }
}

impl From<KeyCountError> for KeyRejection {
    fn from(error: KeyCountError) -> Self {
        Self::KeyCount(error)
    }
}

/// Whether a router has matched a route. A layer on a whole router also sees other requests.
pub(crate) fn has_matched_route(head: &Parts) -> bool {
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
    type Keys = Self;

    fn into_lock_key(self) -> Result<Option<Self>, Response<RejectionBody>> {
        Ok(Some(self))
    }
}

impl IntoLockKey for AllKeys {
    type Keys = Self;

    fn into_lock_key(self) -> Result<Option<Self>, Response<RejectionBody>> {
        Ok(Some(self))
    }
}

impl<T: KeyTuple> IntoLockKey for T {
    type Keys = LockKey;

    fn into_lock_key(self) -> Result<Option<LockKey>, Response<RejectionBody>> {
        Ok(Some(LockKey::from_tuple(&self)))
    }
}

impl<T: IntoLockKey> IntoLockKey for Option<T> {
    type Keys = T::Keys;

    fn into_lock_key(self) -> Result<Option<T::Keys>, Response<RejectionBody>> {
        self.map_or(Ok(None), IntoLockKey::into_lock_key)
    }
}

impl<T: IntoLockKey, E: IntoKeyRejection> IntoLockKey for Result<T, E> {
    type Keys = T::Keys;

    fn into_lock_key(self) -> Result<Option<T::Keys>, Response<RejectionBody>> {
        self.map_err(IntoKeyRejection::into_key_rejection)?.into_lock_key()
    }
}

// === impl RequestKeys ===

impl RequestKeys for LockKey {
    type View = HeldLock;
}

impl RequestKeys for AllKeys {
    type View = HeldLocks;
}

impl HeldView for HeldLock {
    fn of(mut locks: impl Iterator<Item = Self>) -> Self {
        locks.next().expect("at least one key")
    }
}

impl HeldView for HeldLocks {
    fn of(locks: impl Iterator<Item = HeldLock>) -> Self {
        Self::new(locks)
    }

    fn insert_into(self, extensions: &mut Extensions) {
        // That of an outer layer is not the innermost one any more.
        extensions.remove::<HeldLock>();
        extensions.insert(self);
    }
}

// === impl IntoKeyRejection ===

#[cfg(feature = "axum")]
impl<E: axum::response::IntoResponse> IntoKeyRejection for E {
    fn into_key_rejection(self) -> Response<RejectionBody> {
        self.into_response().map(RejectionBody::new)
    }
}

// The types that Axum implements `IntoResponse` for, so that enabling the feature breaks no code.
#[cfg(not(feature = "axum"))]
impl IntoKeyRejection for http::StatusCode {
    fn into_key_rejection(self) -> Response<RejectionBody> {
        let mut response = Response::new(RejectionBody::full(bytes::Bytes::new()));
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
    fn into_key_rejection(self) -> Response<RejectionBody> {
        self.map(RejectionBody::new)
    }
}

#[cfg(not(feature = "axum"))]
impl IntoKeyRejection for crate::lock_key::RawKeyError {
    fn into_key_rejection(self) -> Response<RejectionBody> {
        let mut response = Response::new(RejectionBody::full(self.to_string()));
        *response.status_mut() = http::StatusCode::BAD_REQUEST;
        response
    }
}

#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl axum::response::IntoResponse for crate::lock_key::RawKeyError {
    /// 400, because the name came with the request.
    fn into_response(self) -> axum::response::Response {
        (http::StatusCode::BAD_REQUEST, self.to_string()).into_response()
    }
}
