//! The locks of the layers as arguments of a handler.

use std::fmt;

use axum::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::{Method, StatusCode, request::Parts};

use crate::{
    lock::{HeldLock, HeldLocks, HeldPermit},
    middleware::service::Unlocked,
    telemetry::route::Route,
};

/// Rejection of [`HeldLock`], [`HeldLocks`] and [`HeldPermit`] as extractors: the request holds no
/// such lock.
///
/// The text names the reason and its remedy.
#[derive(Clone, Debug)]
pub struct MissingLock {
    extractor: &'static str,
    reason: Reason,
    method: Method,
    route: Route,
}

#[derive(Clone, Copy, Debug)]
enum Reason {
    NoLayer,
    Unlocked(Unlocked),
    /// The layer has locked several keys.
    Several,
    /// The layer holds the key with others.
    Permit,
    /// The layer holds the key alone.
    Alone,
}

/// Extracts the innermost lock of the request.
///
/// ```
/// # use axum::Json;
/// # use tower_lock::HeldLock;
/// async fn claim(lock: HeldLock) -> String {
///     format!("under {} until {:?} from now", lock.fencing_token(), lock.remaining())
/// }
/// async fn either_way(lock: Option<HeldLock>) -> &'static str {
///     if lock.is_some() { "alone" } else { "perhaps not alone" }
/// }
/// ```
///
/// # Errors
///
/// Rejects with 500 if the request holds no lock. The response names the reason: no layer is around
/// the handler, the layer skipped the request, or its key function returned
/// [`key::all`](crate::key::all), whose locks are [`HeldLocks`], or the layer holds the key with
/// others, and the handler takes a [`HeldPermit`]. An `Option<HeldLock>` is rejected only for the
/// last two reasons.
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl<S: Send + Sync> FromRequestParts<S> for HeldLock {
    type Rejection = MissingLock;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, MissingLock> {
        parts.extensions.get().cloned().ok_or_else(|| MissingLock::of("HeldLock", parts))
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl<S: Send + Sync> OptionalFromRequestParts<S> for HeldLock {
    type Rejection = MissingLock;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, MissingLock> {
        match parts.extensions.get() {
            Some(lock) => Ok(Some(Self::clone(lock))),
            None if holds_other_view(parts) => Err(MissingLock::of("HeldLock", parts)),
            None => Ok(None),
        }
    }
}

/// Extracts the permit of the innermost layer with [`at_most`](crate::LockLayer::at_most) or
/// [`shared_for`](crate::LockLayer::shared_for).
///
/// # Errors
///
/// Rejects with 500 if the request has none. The response names the reason. An `Option<HeldPermit>`
/// is rejected only if the layer holds the key alone, and the handler takes a [`HeldLock`].
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl<S: Send + Sync> FromRequestParts<S> for HeldPermit {
    type Rejection = MissingLock;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, MissingLock> {
        parts.extensions.get().cloned().ok_or_else(|| MissingLock::of("HeldPermit", parts))
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl<S: Send + Sync> OptionalFromRequestParts<S> for HeldPermit {
    type Rejection = MissingLock;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, MissingLock> {
        match parts.extensions.get() {
            Some(permit) => Ok(Some(Self::clone(permit))),
            None if parts.extensions.get::<HeldLock>().is_some() => Err(MissingLock::of("HeldPermit", parts)),
            None => Ok(None),
        }
    }
}

/// Extracts the locks of the innermost layer whose key function returned
/// [`key::all`](crate::key::all). Without one, the lock of the innermost layer.
///
/// # Errors
///
/// Rejects with 500 if the request holds no lock. An `Option<HeldLocks>` is rejected only if the
/// layer holds the key with others, and the handler takes a [`HeldPermit`].
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl<S: Send + Sync> FromRequestParts<S> for HeldLocks {
    type Rejection = MissingLock;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, MissingLock> {
        held_locks(parts).ok_or_else(|| MissingLock::of("HeldLocks", parts))
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl<S: Send + Sync> OptionalFromRequestParts<S> for HeldLocks {
    type Rejection = MissingLock;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, MissingLock> {
        match held_locks(parts) {
            None if parts.extensions.get::<HeldPermit>().is_some() => Err(MissingLock::of("HeldLocks", parts)),
            locks => Ok(locks),
        }
    }
}

/// Whether the request holds a lock that is no single one. `None` would say that the handler runs
/// without a lock, and needs no fence.
fn holds_other_view(head: &Parts) -> bool {
    head.extensions.get::<HeldLocks>().is_some() || head.extensions.get::<HeldPermit>().is_some()
}

fn held_locks(head: &Parts) -> Option<HeldLocks> {
    let one = || head.extensions.get().map(|lock: &HeldLock| HeldLocks::new([lock.clone()]));
    head.extensions.get().cloned().or_else(one)
}

impl MissingLock {
    fn of(extractor: &'static str, head: &Parts) -> Self {
        let reason = match head.extensions.get() {
            _ if extractor == "HeldPermit" && head.extensions.get::<HeldLock>().is_some() => Reason::Alone,
            _ if head.extensions.get::<HeldLocks>().is_some() => Reason::Several,
            _ if head.extensions.get::<HeldPermit>().is_some() => Reason::Permit,
            Some(unlocked) => Reason::Unlocked(*unlocked),
            None => Reason::NoLayer,
        };
        Self { extractor, reason, method: head.method.clone(), route: Route::from_extensions(&head.extensions, None) }
    }

    /// Returns the status, 500.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        StatusCode::INTERNAL_SERVER_ERROR
    }

    /// Returns the text of the response: the error and its remedy.
    #[must_use]
    pub fn body_text(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for MissingLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.extractor;
        write!(f, "the request holds no lock for `{name}`: ")?;
        match self.reason {
            Reason::NoLayer => write!(
                f,
                "no `LockLayer` is around this handler. Put one on its route: \
                 `post(handler).route_layer(LockLayer::new(&locks, key::from_fn(..)))`. A layer covers only the methods \
                 and routes that were added before it: on a method router, call `.route_layer(..)` after `.put(..)` and \
                 `.merge(..)`, and `.layer(..)` to cover a fallback, too; on a router, call either one after \
                 `.route(..)`. A `LockManagerLayer` acquires no lock. If the handler may run without a lock, use \
                 `Option<{name}>`."
            ),
            Reason::Unlocked(Unlocked::Skipped) => write!(
                f,
                "the `LockLayer` of this route skipped it (`.skip(..)` or `.skip_methods(..)`). Use `Option<{name}>`, \
                 or do not skip requests to this handler."
            ),
            Reason::Unlocked(Unlocked::NoKey) => write!(
                f,
                "the key function of this route returned `None` for it. Use `Option<{name}>`, or return a key for \
                 each request to this handler."
            ),
            Reason::Several => f.write_str(
                "the key function of this route returned `key::all`. Use `HeldLocks`, which has the lock of each key.",
            ),
            Reason::Permit => f.write_str(
                "its layer holds the key with others (`.at_most(..)` or `.shared_for(..)`), and no fencing token \
                 orders their writes. Use `HeldPermit`.",
            ),
            Reason::Alone => f.write_str(
                "its layer holds the key alone. Use `HeldLock`, or set `.at_most(..)` or `.shared_for(..)` at the layer.",
            ),
        }
    }
}

impl std::error::Error for MissingLock {}

impl IntoResponse for MissingLock {
    fn into_response(self) -> Response {
        self.route.log_error(&self.method, &self);
        (self.status(), self.body_text()).into_response()
    }
}
