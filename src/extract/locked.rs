use std::ops::Deref;

use axum::{
    extract::{FromRequest, FromRequestParts, Request},
    response::{IntoResponse, Response},
};
use http::{Extensions, StatusCode, request::Parts};

use crate::{
    body::budget::Share,
    lock::HeldLock,
    lock_key::LockKey,
    middleware::{ClientConnection, context::Slot},
    rejection::{Rejection, RejectionBody},
    telemetry::route::Route,
};

/// A value that says what is to be locked before it is worked on: what [`Locked`] takes its key from.
///
/// For what the extractor leads to: `Claim` for `Locked<Json<Claim>>`, a type of your own for `Locked<Path<FamilyId>>`.
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
    message = "`{Self}` does not say what is to be locked",
    label = "`Locked` needs a key from this",
    note = "implement `tower_lock::HasLockKey` for it, or for a type of your own around it (`struct FamilyId(u64)`): `fn lock_key(&self) -> impl Into<LockKey> {{ (\"reward\", self.family_id) }}`"
)]
pub trait HasLockKey {
    /// The key. Make it of all that the work is about, and of nothing that a client can spell in two ways.
    fn lock_key(&self) -> impl Into<LockKey>;
}

/// An extractor, and the lock of what it has extracted: the key is made of the very value that the handler sees.
///
/// `E` is any extractor that leads to a [`HasLockKey`] (`Json`, `Path`, `Query`, `Form`, `Extension`, `State`). The lock is taken when it has
/// succeeded, held to the end of the response as if the route had a [`LockLayer`](crate::LockLayer), and behaves as the nearest
/// [`LockManagerLayer`](crate::LockManagerLayer) says (wait, lease, `max_hold`, ..), or the `LockLayer` whose lock the request holds already. It goes last in the handler's arguments if it reads the body; what stands before it
/// runs without the lock.
///
/// ```
/// # use axum::{Json, Router, routing::post};
/// # use tower_lock::{LockKey, HasLockKey, Locked, LockManager, LockManagerLayer};
/// # #[derive(serde::Deserialize)] struct Claim { family_id: u64, reward_type: u32 }
/// # impl HasLockKey for Claim {
/// #     fn lock_key(&self) -> impl Into<LockKey> { ("reward", self.family_id, self.reward_type) }
/// # }
/// async fn claim(Locked(Json(claim), lock): Locked<Json<Claim>>) -> String {
///     format!("family {} is alone with this reward, under {}", claim.family_id, lock.fencing_token())
/// }
///
/// # fn app(locks: &LockManager) -> Router {
/// Router::new().route("/rewards/claim", post(claim)).layer(LockManagerLayer::new(locks))
/// # }
/// ```
///
/// The key is of this one extractor. Is it to be of several, the path and the body perhaps, put a [`LockLayer`](crate::LockLayer) on the route.
/// (Where `HasLockKey` is missing Axum says only that the handler is none; `#[axum::debug_handler]` says why.)
///
/// The body of the request is complete before the lock is acquired, also where the key is of the
/// head, unless the layer has
/// [`request_body(RequestBodyMode::Stream)`](crate::LockManagerLayer::request_body).
///
/// # Errors
///
/// What the extractor rejects is answered as it says. Who cannot have the lock is answered as from a layer: 409, 503, .., with the typed
/// [`Rejection`](crate::Rejection) in the extensions. Where neither a `LockManagerLayer` nor a `LockLayer` stands outside, 500 says which is missing, and where.
///
/// # Cancel safety
///
/// A client that leaves while its request waits is out of the line at once; one that leaves later finds its handler
/// [finished](crate::LockManagerLayer::on_disconnect) without it.
#[derive(Debug)]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub struct Locked<E>(
    /// What was extracted.
    pub E,
    /// Its lock.
    pub HeldLock,
);

const MISSING_LAYER: &str = "`Locked` found nothing to take its lock from. Put a `LockManagerLayer` on the router, outside of the handler and after its \
    routes: `Router::new().route(\"/claim\", post(claim)).layer(LockManagerLayer::new(&locks))`. A task that outlives its request has no lock, either.";

/// Where a lock is left when it is taken.
struct Place {
    slot: Slot,
    route: Route,
    client: Option<ClientConnection>,
}

impl<E, S> FromRequestParts<S> for Locked<E>
where
    E: FromRequestParts<S> + Deref<Target: HasLockKey> + Send,
    S: Send + Sync,
{
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        let place = Place::of(&parts.extensions)?;
        let value = E::from_request_parts(parts, state).await.map_err(IntoResponse::into_response)?;
        let key = value.lock_key().into();
        let _waits = place.slot.waits();
        // A client that does not wait is spared its body.
        if let Some(rejection) = place.slot.refusal(&place.route, &key) {
            return Err(place.rejected(rejection));
        }
        // Before the lock: a client that does not send its body keeps no other request waiting.
        let mut room = place.read_body(parts).await?;
        let lock = place.lock(key, room.as_mut()).await?;
        // The innermost one, for extractors behind this one.
        parts.extensions.insert(lock.clone());
        Ok(Self(value, lock))
    }
}

impl<E, S> FromRequest<S> for Locked<E>
where
    E: FromRequest<S> + Deref<Target: HasLockKey> + Send,
    S: Send + Sync,
{
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let place = Place::of(request.extensions())?;
        let _waits = place.slot.waits();
        let (mut parts, body) = request.into_parts();
        let mut room = place.read_body(&mut parts).await?;
        let request = Request::from_parts(parts, body);
        let value = E::from_request(request, state).await.map_err(IntoResponse::into_response)?;
        let lock = place.lock(value.lock_key().into(), room.as_mut()).await?;
        Ok(Self(value, lock))
    }
}

impl Place {
    fn of(extensions: &Extensions) -> Result<Self, Response> {
        let slot = extensions.get::<Slot>().cloned().ok_or_else(missing_layer)?;
        let route = slot.route(extensions);
        Ok(Self { slot, route, client: extensions.get().cloned() })
    }

    /// Reads the body of the request, for the handler or the extractor to find it complete.
    async fn read_body(&self, head: &mut Parts) -> Result<Option<Share>, Response> {
        self.slot.read_body(&self.route, head).await.map_err(|answer| answer.map(RejectionBody::into_axum))
    }

    fn rejected(&self, rejection: Rejection) -> Response {
        self.slot.on_reject().answer(rejection).map(RejectionBody::into_axum)
    }

    /// Takes the lock, and leaves it where it stays to the end of the response.
    async fn lock(&self, key: LockKey, body: Option<&mut Share>) -> Result<HeldLock, Response> {
        let Self { slot, route, client } = self;
        let entered = slot.enter(route, key, client.as_ref(), body).await;
        let section = entered.map_err(|rejection| self.rejected(rejection))?;
        let view = section.view();
        // The response is out: whoever extracts now has kept a copy of the request, and holds nothing.
        slot.put(section).map_err(|_| missing_layer())?;
        Ok(view)
    }
}

/// 500: the routes are put together wrongly.
fn missing_layer() -> Response {
    // Whoever reads the answer may not be who can mend it.
    #[cfg(feature = "tracing")]
    tracing::error!(target: "tower_lock", "{MISSING_LAYER}");
    (StatusCode::INTERNAL_SERVER_ERROR, MISSING_LAYER).into_response()
}
