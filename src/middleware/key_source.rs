//! From a request to its key, without Axum.

use std::{
    fmt,
    future::{Future, ready},
};

use http::{Request, Response, request::Parts};

use super::rejection::{Rejection, RejectionBody};
use crate::{
    key::{KeyTuple, LockKey},
    lock::{Locks, Share},
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
    message = "answer `(\"namespace\", part, ..)` with integers, strings, `bool`, `char` or `Uuid` as parts: `{Self}` is not an answer of a key function",
    label = "this cannot be made into a lock key",
    note = "answer a tuple whose first element is the namespace, a `&'static str` (`(\"order\", id)`), a `LockKey`, an `Option` (`None`: no lock needed) or a `Result` of these (`Err`, an `IntoResponse`, is sent as the response)",
    note = "up to six parts follow it: integers, `bool`, `char`, strings and `Uuid`; a float is none: `0.1 + 0.2` and `0.3` would be two locks"
)]
pub trait IntoLockKey {
    #[doc(hidden)]
    fn into_lock_key(self) -> Result<Option<LockKey>, Response<RejectionBody>>;
}

/// What the error of a key function may be: a response.
pub trait KeyError {
    #[doc(hidden)]
    fn into_answer(self) -> Response<RejectionBody>;
}

/// Something a [`LockLayer`](crate::LockLayer) can take keys from: what [`by`](crate::by),
/// [`by_with_state`](crate::by_with_state), [`by_parts`], [`by_fields`](crate::by_fields) and [`constant`](crate::constant) make.
///
/// Not to be implemented.
#[diagnostic::on_unimplemented(
    message = "write `LockLayer::new(&locks, by(..))`: without `by(..)` around it `{Self}` is not a key source",
    label = "a layer cannot take keys from this",
    note = "wrap the key function: `LockLayer::new(&locks, by(|Path(id): Path<u64>| (\"order\", id)))`, or `by_parts(|parts| ..)` without Axum",
    note = "without a function: `by_fields(\"order\", path_param(\"id\"))`, `constant((\"nightly\", \"mail\"))`"
)]
pub trait KeySource: Clone + Send + Sync + 'static {}

/// A key source for requests with this body.
///
/// Not to be implemented.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot give a lock key for requests with body `{B}`",
    label = "not a key source for this body",
    note = "wrap the key function in `by(..)`; one that reads the body (or `json_field`, `form_field`) needs `{B}: http_body::Body<Data = Bytes> + Send + 'static`, with an error that is `Into<BoxError>`"
)]
pub trait KeySourceFor<B>: KeySource {
    /// The body that the inner service gets.
    type Body;

    /// The request as the inner service gets it, when no key is asked for.
    #[doc(hidden)]
    fn pass(request: Request<B>) -> Request<Self::Body>;

    /// The key, and the request as the inner service gets it.
    #[doc(hidden)]
    fn derive(
        &self,
        request: Request<B>,
        locks: &Locks,
    ) -> impl Future<Output = Result<Derived<Self::Body>, NoKey>> + Send;
}

/// The request to go on with, and the key it needs, if it needs one.
#[doc(hidden)]
#[derive(Debug)]
pub struct Derived<B> {
    pub(super) request: Request<B>,
    pub(super) key: Option<LockKey>,
    /// What its body takes up while it waits.
    pub(super) room: Option<Share>,
}

/// Why there is no key.
#[doc(hidden)]
#[derive(Debug)]
pub enum NoKey {
    /// An extractor or the key function answered.
    Answered(Response<RejectionBody>),
    /// We could not ask.
    Rejected(Rejection),
}

/// A key function over the head of a request. Made by [`by_parts`].
#[derive(Clone)]
pub struct ByParts<F>(F);

/// Keys from the head of the request alone: for plain Tower services, with any body and without Axum.
///
/// Make keys of **parsed** values where the handler parses: `01`, `+1` and `1` are one number to it, and would be three
/// locks to a key made of text.
///
/// ```
/// use http::StatusCode;
/// use tower_lock::{LockLayer, Locks, by_parts};
///
/// # async fn answers(locks: Locks) -> Result<(), tower::BoxError> {
/// let layer = LockLayer::new(&locks, by_parts(|parts| {
///     let account = parts.headers.get("x-account").and_then(|text| text.to_str().ok()?.parse::<u64>().ok());
///     // Not `None`: a request whose key cannot be read would run without a lock.
///     account.map(|id| ("account", id)).ok_or(StatusCode::BAD_REQUEST)
/// }));
/// # use tower::{Layer, ServiceExt, service_fn};
/// # let ok = service_fn(async |_: http::Request<String>| Ok::<_, tower::BoxError>(http::Response::new(String::new())));
/// # let _held = locks.try_lock(("account", 7)).await?;
/// # for (account, status) in [(Some("8"), 200), (Some("7"), 409), (Some("007"), 409), (Some("7a"), 400), (None, 400)] {
/// #     let mut request = http::Request::new(String::new());
/// #     if let Some(account) = account {
/// #         request.headers_mut().insert("x-account", account.parse()?);
/// #     }
/// #     assert_eq!(layer.layer(ok).oneshot(request).await?.status(), status, "{account:?}");
/// # }
/// # Ok(())
/// # }
/// # #[cfg(feature = "memory")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(answers(Locks::in_memory())).unwrap();
/// ```
pub fn by_parts<F, R>(f: F) -> ByParts<F>
where
    F: Fn(&Parts) -> R + Clone + Send + Sync + 'static,
    R: IntoLockKey,
{
    ByParts(f)
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

impl<T: IntoLockKey, E: KeyError> IntoLockKey for Result<T, E> {
    fn into_lock_key(self) -> Result<Option<LockKey>, Response<RejectionBody>> {
        self.map_err(KeyError::into_answer)?.into_lock_key()
    }
}

// === impl KeyError ===

#[cfg(feature = "axum")]
impl<E: axum::response::IntoResponse> KeyError for E {
    fn into_answer(self) -> Response<RejectionBody> {
        self.into_response().map(RejectionBody::new)
    }
}

// The same that Axum knows: with its feature on, what compiled without still does.
#[cfg(not(feature = "axum"))]
impl KeyError for http::StatusCode {
    fn into_answer(self) -> Response<RejectionBody> {
        let mut response = Response::new(RejectionBody::new(http_body_util::Empty::new()));
        *response.status_mut() = self;
        response
    }
}

#[cfg(not(feature = "axum"))]
impl<B> KeyError for Response<B>
where
    B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<tower::BoxError>,
{
    fn into_answer(self) -> Response<RejectionBody> {
        self.map(RejectionBody::new)
    }
}

#[cfg(not(feature = "axum"))]
impl KeyError for crate::key::RawKeyError {
    fn into_answer(self) -> Response<RejectionBody> {
        let mut response = Response::new(RejectionBody::new(http_body_util::Full::from(self.to_string())));
        *response.status_mut() = http::StatusCode::BAD_REQUEST;
        response
    }
}

#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl axum::response::IntoResponse for crate::key::RawKeyError {
    /// 400: the name came with the request.
    fn into_response(self) -> axum::response::Response {
        (http::StatusCode::BAD_REQUEST, self.to_string()).into_response()
    }
}

// === impl ByParts ===

impl<F, R> KeySource for ByParts<F>
where
    F: Fn(&Parts) -> R + Clone + Send + Sync + 'static,
    R: IntoLockKey,
{
}

impl<B, F, R> KeySourceFor<B> for ByParts<F>
where
    B: Send + 'static,
    F: Fn(&Parts) -> R + Clone + Send + Sync + 'static,
    R: IntoLockKey,
{
    type Body = B;

    fn pass(request: Request<B>) -> Request<B> {
        request
    }

    fn derive(&self, request: Request<B>, _: &Locks) -> impl Future<Output = Result<Derived<B>, NoKey>> + Send {
        let (parts, body) = request.into_parts();
        let key = (self.0)(&parts).into_lock_key();
        let derived = key.map(|key| Derived { request: Request::from_parts(parts, body), key, room: None });
        ready(derived.map_err(NoKey::Answered))
    }
}

impl<F> fmt::Debug for ByParts<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByParts").finish_non_exhaustive()
    }
}
