//! Keys from the head of a request, without Axum.

use http::request::Parts;

use super::{IntoLockKey, KeyRejection, KeySource};
use crate::body::reader::BodyReader;

/// Source that calls a function of the request head.
#[derive(Clone)]
struct FromParts<F>(F);

/// Creates a source that derives keys from the request head with a function. Works without Axum.
///
/// Parse each value as the handler does. `01`, `+1` and `1` are one number for the handler, but
/// three locks if the key is made of their text.
///
/// ```
/// use http::StatusCode;
/// use tower_lock::{LockLayer, LockManager, key};
///
/// # async fn answers(locks: LockManager) -> Result<(), tower::BoxError> {
/// let layer = LockLayer::new(&locks, key::from_parts(|parts| {
///     let text = parts.headers.get("x-account").and_then(|value| value.to_str().ok());
///     let account = text.and_then(|text| text.parse::<u64>().ok());
///     // Not `None`: a request whose key cannot be read would run without a lock.
///     account.map(|id| ("account", id)).ok_or(StatusCode::BAD_REQUEST)
/// }));
/// # use tower::{Layer, ServiceExt, service_fn};
/// # use tower_lock::middleware::RequestBody;
/// # let ok = service_fn(async |_: http::Request<RequestBody>| {
/// #     Ok::<_, tower::BoxError>(http::Response::new(String::new()))
/// # });
/// # let _held = locks.try_lock(("account", 7)).await?;
/// # let cases =
/// #     [(Some("8"), 200), (Some("7"), 409), (Some("007"), 409), (Some("7a"), 400), (None, 400)];
/// # for (account, status) in cases {
/// #     let mut request = http::Request::new(String::new());
/// #     if let Some(account) = account {
/// #         request.headers_mut().insert("x-account", account.parse()?);
/// #     }
/// #     assert_eq!(layer.layer(ok).oneshot(request).await?.status(), status, "{account:?}");
/// # }
/// # Ok(())
/// # }
/// # #[cfg(feature = "memory")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(answers(LockManager::in_memory())).unwrap();
/// ```
pub fn from_parts<F, R>(f: F) -> impl KeySource<Keys = R::Keys>
where
    F: Fn(&Parts) -> R + Clone + Send + Sync + 'static,
    R: IntoLockKey,
{
    FromParts(f)
}

impl<F, R> KeySource for FromParts<F>
where
    F: Fn(&Parts) -> R + Clone + Send + Sync + 'static,
    R: IntoLockKey,
{
    type Keys = R::Keys;

    async fn extract_key(&self, head: &mut Parts, _: &mut BodyReader<'_>) -> Result<Option<R::Keys>, KeyRejection> {
        (self.0)(head).into_lock_key().map_err(|response| KeyRejection::Response(response, None))
    }
}
