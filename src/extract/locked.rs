//! An extractor that acquires the lock of the value that it has extracted.

use std::ops::Deref;

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, Request},
    response::{IntoResponse, Response},
};
use http::{Extensions, Method, StatusCode, request::Parts};

use crate::{
    body::{budget::Reservation, request_body::RequestBodyHandle},
    key_source::{HeldView, KeyRejection},
    lock::{HeldLock, HeldLocks},
    lock_key::{AllKeys, LockKey},
    middleware::{
        ClientConnection,
        acquire::{Acquired, LockCall},
        context::RequestContext,
    },
    rejection::Rejection,
    telemetry::route::Route,
};

/// Value with a lock key. [`Locked`] locks the key of the value that it extracts.
///
/// Implement it for the target of the extractor: `Claim` for `Locked<Json<Claim>>`, a newtype for
/// `Locked<Path<FamilyId>>`.
///
/// ```
/// # use tower_lock::{LockKey, HasLockKey};
/// struct Claim {
///     family_id: u64,
///     reward_type: u32,
/// }
///
/// impl HasLockKey for Claim {
///     fn lock_key(&self) -> impl Into<LockKey> {
///         ("reward", self.family_id, self.reward_type)
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no lock key",
    label = "`Locked` needs a key from this",
    note = "implement `tower_lock::HasLockKey` for it, or for a type of your own around it (`struct FamilyId(u64)`): `fn lock_key(&self) -> impl Into<LockKey> {{ (\"reward\", self.family_id) }}`"
)]
pub trait HasLockKey {
    /// Returns the key. Equal values must have equal keys, also if clients write them in different
    /// forms.
    fn lock_key(&self) -> impl Into<LockKey>;
}

/// Value with several lock keys. [`Locked<E, HeldLocks>`](Locked) locks all keys of the value that
/// it extracts, or none.
///
/// ```
/// # use axum::Json;
/// # use tower_lock::{HasLockKeys, HeldLocks, Locked, key::{self, AllKeys}};
/// # #[derive(serde::Deserialize)]
/// struct Transfer {
///     from: u64,
///     to: u64,
/// }
///
/// impl HasLockKeys for Transfer {
///     fn lock_keys(&self) -> AllKeys {
///         key::all([("account", self.from), ("account", self.to)])
///     }
/// }
///
/// async fn transfer(Locked(Json(transfer), locks): Locked<Json<Transfer>, HeldLocks>) {
///     let from = locks.get(("account", transfer.from));
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no lock keys",
    label = "`Locked<_, HeldLocks>` needs keys from this",
    note = "implement `tower_lock::HasLockKeys` for it: `fn lock_keys(&self) -> AllKeys {{ key::all([(\"account\", self.from), (\"account\", self.to)]) }}`"
)]
pub trait HasLockKeys {
    /// Returns the keys.
    fn lock_keys(&self) -> AllKeys;
}

/// View of the lock of a [`Locked`]: [`HeldLock`] for a value with one key, [`HeldLocks`] for a
/// value with several.
///
/// The trait cannot be implemented outside of this crate.
pub trait LockView<T: ?Sized>: HeldView {
    #[doc(hidden)]
    fn keys(value: &T) -> AllKeys;
}

/// Extractor that locks the key of the value that it extracts.
///
/// `E` is an extractor that dereferences to a [`HasLockKey`] (`Json`, `Path`, `Query`, `Form`,
/// `Extension`, `State`). The lock is acquired after `E` has succeeded, and held until the end of
/// the response, as with a [`LockLayer`](crate::LockLayer). Its settings (wait, lease, `max_hold`,
/// ..) are those of the nearest [`LockManagerLayer`](crate::LockManagerLayer), or of the
/// `LockLayer` whose lock the request holds. If `E` reads the body, `Locked` must be the last
/// argument of the handler. Earlier arguments are extracted without the lock.
///
/// ```
/// # use axum::{Json, Router, routing::post};
/// # use tower_lock::{LockKey, HasLockKey, Locked, LockManager, LockManagerLayer};
/// # #[derive(serde::Deserialize)] struct Claim { family_id: u64, reward_type: u32 }
/// # impl HasLockKey for Claim {
/// #     fn lock_key(&self) -> impl Into<LockKey> { ("reward", self.family_id, self.reward_type) }
/// # }
/// async fn claim(Locked(Json(claim), lock): Locked<Json<Claim>>) -> String {
///     format!("family {}, fencing token {}", claim.family_id, lock.fencing_token())
/// }
///
/// # fn app(locks: &LockManager) -> Router {
/// Router::new().route("/rewards/claim", post(claim)).layer(LockManagerLayer::new(locks))
/// # }
/// ```
///
/// For a value with several keys, implement [`HasLockKeys`], and write
/// `Locked<Json<Transfer>, HeldLocks>`.
///
/// The key is that of one extractor. For a key of several extractors, such as the path and the
/// body, use a [`LockLayer`](crate::LockLayer).
///
/// The body of the request is read before the lock is acquired, also if `E` does not need it.
/// [`request_body(RequestBodyMode::Stream)`](crate::LockManagerLayer::request_body) on the layer
/// changes that.
///
/// # Errors
///
/// A rejection of `E` is sent unchanged. If the lock is not acquired, the response is the same as
/// from a layer (409, 503, ..), with the typed [`Rejection`](crate::Rejection) in its extensions.
/// Without an outer `LockManagerLayer` or `LockLayer` the response is 500. It names the missing
/// layer and its position.
///
/// # Cancel safety
///
/// If the client disconnects while the request waits, the request leaves the queue at once. If it
/// disconnects later, the handler [finishes](crate::LockManagerLayer::on_disconnect) in the
/// background.
#[derive(Debug)]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub struct Locked<E, L = HeldLock>(
    /// The value of the extractor.
    pub E,
    /// The lock of its key, or the locks of its keys.
    pub L,
)
where
    // Here, so that the compiler reports a value without a key where the type is written. The
    // error of Axum would say that the handler is none.
    E: Deref,
    L: LockView<E::Target>;

const MISSING_LAYER: &str = "`Locked` found no `LockManagerLayer`. Put one on the router, outside of the handler: \
    `Router::new().route(\"/claim\", post(claim)).layer(LockManagerLayer::new(&locks))`. A layer covers only the routes \
    that were added before it: call `.layer(..)` after `.route(..)`.";

const HANDLER_RETURNED: &str = "`Locked` acquired no lock, because the handler of the request has already returned. \
    Extract it before the handler returns, and not from a copy of the request in a spawned task.";

/// The context that keeps the lock.
struct LockTarget {
    context: RequestContext,
    method: Method,
    route: Route,
    client: Option<ClientConnection>,
}

impl<E, L, S> FromRequestParts<S> for Locked<E, L>
where
    E: FromRequestParts<S> + Deref + Send,
    L: LockView<E::Target>,
    S: Send + Sync,
{
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        let target = LockTarget::new(&parts.method, &parts.extensions)?;
        let value = E::from_request_parts(parts, state).await.map_err(IntoResponse::into_response)?;
        let call = target.call(L::keys(&value))?;
        let _waits = target.context.start_waiting();
        // A client that does not wait need not send its body.
        if let Some(rejection) = call.immediate_rejection() {
            return Err(target.rejected(rejection));
        }
        // Before the lock: a client that does not send its body blocks no other request.
        let mut reservation = target.read_body(parts).await?;
        let held: L = target.acquire(call, reservation.as_mut()).await?;
        // For extractors that follow, this is the innermost lock.
        held.clone().insert_into(&mut parts.extensions);
        Ok(Self(value, held))
    }
}

impl<E, L, S> FromRequest<S> for Locked<E, L>
where
    E: FromRequest<S> + Deref + Send,
    L: LockView<E::Target>,
    S: Send + Sync,
{
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let target = LockTarget::new(request.method(), request.extensions())?;
        let _waits = target.context.start_waiting();
        let (mut parts, body) = request.into_parts();
        let mut reservation = target.read_body(&mut parts).await?;
        let request = Request::from_parts(parts, body);
        let value = E::from_request(request, state).await.map_err(IntoResponse::into_response)?;
        let call = target.call(L::keys(&value))?;
        let held = target.acquire(call, reservation.as_mut()).await?;
        Ok(Self(value, held))
    }
}

impl LockTarget {
    fn new(method: &Method, extensions: &Extensions) -> Result<Self, Response> {
        let Some(context) = RequestContext::of(extensions) else {
            return Err(setup_error(method, &Route::from_extensions(extensions, None), MISSING_LAYER));
        };
        let route = context.route(extensions);
        Ok(Self { context, method: method.clone(), route, client: extensions.get().cloned() })
    }

    /// Reads the body of the request, so that the extractor or the handler finds it complete. The
    /// reservation is needed while the request waits.
    async fn read_body(&self, head: &mut Parts) -> Result<Option<Reservation>, Response> {
        let Self { context, .. } = self;
        if !context.buffers_body(&head.method) {
            return Ok(None);
        }
        let Some(shared) = head.extensions.get::<RequestBodyHandle>().cloned() else { return Ok(None) };
        let Some(mut body) = shared.take() else { return Ok(None) };
        let mut reservation = None;
        let read = context.body_reader(&mut body, &mut reservation).read(head).await;
        read.map_err(|rejection| self.invalid_key(rejection))?;
        shared.put_back(body);
        Ok(reservation)
    }

    fn call(&self, keys: AllKeys) -> Result<LockCall<'_>, Response> {
        LockCall::new(&self.context, &self.route, keys).map_err(|rejection| self.invalid_key(rejection))
    }

    fn invalid_key(&self, why: impl Into<KeyRejection>) -> Response {
        self.context.invalid_key(&self.route, why).map(Body::new)
    }

    fn rejected(&self, rejection: Rejection) -> Response {
        self.context.on_reject().respond(rejection).map(Body::new)
    }

    /// Acquires the lock and keeps it until the end of the response.
    async fn acquire<L: HeldView>(&self, call: LockCall<'_>, body: Option<&mut Reservation>) -> Result<L, Response> {
        let Self { context, method, route, client } = self;
        let acquired = call.acquire(client.as_ref(), body).await;
        let lock = acquired.and_then(Acquired::into_lock).map_err(|rejection| self.rejected(rejection))?;
        let held = context.view(&lock);
        context.keep(lock).map_err(|_| setup_error(method, route, HANDLER_RETURNED))?;
        Ok(held)
    }
}

impl<T: HasLockKey + ?Sized> LockView<T> for HeldLock {
    fn keys(value: &T) -> AllKeys {
        let key: LockKey = value.lock_key().into();
        key.into()
    }
}

impl<T: HasLockKeys + ?Sized> LockView<T> for HeldLocks {
    fn keys(value: &T) -> AllKeys {
        value.lock_keys()
    }
}

/// 500: the service is not set up correctly.
fn setup_error(method: &Method, route: &Route, message: &'static str) -> Response {
    route.log_error(method, message);
    (StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
}
