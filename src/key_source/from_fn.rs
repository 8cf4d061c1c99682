//! Key functions, written like Axum handlers.

use std::{
    any::type_name,
    future::{Future, ready},
    marker::PhantomData,
};

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts},
    response::IntoResponse,
};
use http::{Request, Response, request::Parts};

use super::{IntoLockKey, KeyRejection, KeySource, RequestKeys};
use crate::{body::reader::BodyReader, rejection::RejectionBody};

/// Creates a source that derives keys with a key function. Needs the feature `axum`.
///
/// A key function is written like a handler: a closure or a function, sync or async, of up to four
/// extractors. Write the type of each argument. The last argument may read the body.
/// [`IntoLockKey`] lists the return types.
///
/// ```
/// # use axum::{Json, extract::Path, http::{HeaderMap, StatusCode}};
/// # use tower_lock::{LockLayer, LockManager, key};
/// # #[derive(serde::Deserialize)] struct Claim { family_id: u64, reward_type: u32 }
/// # fn layers(locks: &LockManager) {
/// LockLayer::new(locks, key::from_fn(|Json(claim): Json<Claim>| {
///     ("reward", claim.family_id, claim.reward_type)
/// }));
/// LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>, headers: HeaderMap| async move {
///     if headers.contains_key("x-dry-run") { None } else { Some(("order", id)) }
/// }));
/// # }
/// ```
///
/// # Guarantees
///
/// - The key is derived from the values that the handler sees. `01`, `+1` and `%31` are the number
///   1 for both, and therefore one lock.
/// - A rejection by an extractor is sent unchanged, before a lock is acquired. An invalid `Claim`
///   gets a 422. The extensions of the response have
///   [`Rejection::InvalidKey`](crate::Rejection::InvalidKey). An extractor of the head rejects
///   before the body is read.
/// - The body is read before a lock is acquired, also if the key does not need it
///   ([`request_body`](crate::LockLayer::request_body)). It is read once, and replayed byte for
///   byte with its headers, trailers and length. A body that is longer than the `DefaultBodyLimit`
///   of the route is rejected with 413. The `DefaultBodyLimit` must be *outside* of the lock layer
///   to apply.
/// - A client that sends too slowly gets 408
///   ([`body_idle_timeout`](crate::LockLayer::body_idle_timeout)).
/// - Bodies that are being read, or whose requests wait, use a budget of 64 MiB for one
///   [`LockManager`](crate::LockManager) and its clones. A body that is larger than half of what
///   the others leave gets 503; only a body without others may use all of it. A request also gets
///   503 if the waiting bodies for its key use an eighth of the rest.
///
/// Do not use an extractor that *takes* a part of the request (`WebSocketUpgrade`), because the
/// handler would not find that part.
pub fn from_fn<F, T, E, M>(f: F) -> impl KeySource<Keys = <F::Output as KeyFnOutput<M>>::Keys>
where
    F: KeyFn<T>,
    T: Extractors<(), E>,
    F::Output: KeyFnOutput<M>,
    T: 'static,
    E: 'static,
    M: 'static,
{
    from_fn_with_state((), f)
}

/// Creates a source as [`from_fn`] does, with state for the extractors. Needs the feature `axum`.
///
/// ```
/// # use axum::{extract::{Path, State}, http::StatusCode};
/// # use tower_lock::{LockLayer, LockManager, key};
/// # #[derive(Clone)] struct Db;
/// # impl Db { async fn tenant_of(&self, _: u64) -> Result<u64, StatusCode> { Ok(1) } }
/// # fn layer(locks: &LockManager, db: Db) {
/// async fn tenant(
///     State(db): State<Db>,
///     Path(order): Path<u64>,
/// ) -> Result<(&'static str, u64), StatusCode> {
///     Ok(("tenant", db.tenant_of(order).await?))
/// }
///
/// LockLayer::new(locks, key::from_fn_with_state(db, tenant));
/// # }
/// ```
pub fn from_fn_with_state<F, T, E, M, S>(state: S, f: F) -> impl KeySource<Keys = <F::Output as KeyFnOutput<M>>::Keys>
where
    F: KeyFn<T>,
    T: Extractors<S, E>,
    F::Output: KeyFnOutput<M>,
    T: 'static,
    E: 'static,
    M: 'static,
    S: Clone + Send + Sync + 'static,
{
    FromFn { f, state, marker: PhantomData }
}

/// Source that calls a key function.
struct FromFn<F, T, E, M, S> {
    f: F,
    state: S,
    marker: PhantomData<Parameters<T, E, M>>,
}

/// A function type: the layer is `Send` also if an extractor is not.
type Parameters<T, E, M> = fn() -> (T, E, M);

/// Function that returns a key.
///
/// The trait is implemented for closures and functions of up to four arguments. `T` is the tuple of
/// their types.
#[diagnostic::on_unimplemented(
    message = "take up to four extractors with their types: `{Self}` is not a key function",
    label = "not a key function",
    note = "a key function takes up to four extractors, each with its type written out (`|Path(id): Path<u64>| ..`); only the last may read the body (`Json`, `Form`, `Bytes`)",
    note = "it returns a tuple `(\"namespace\", part, ..)`, a `LockKey`, an `Option` or a `Result` of these, or a future of one"
)]
pub trait KeyFn<T>: Clone + Send + Sync + 'static {
    /// The return type. It has no bound here, so that the compiler reports a wrong type as such.
    type Output;

    fn call(&self, arguments: T) -> Self::Output;
}

/// Tuple of extractors, of which only the last may read the body. `M` is the tuple of their
/// markers.
///
/// A trait of its own, so that the compiler names the argument that is no extractor.
pub trait Extractors<S, M>: Sized {
    fn extract(
        parts: &mut Parts,
        body: &mut BodyReader<'_>,
        state: &S,
    ) -> impl Future<Output = Result<Self, KeyRejection>> + Send;
}

/// One extractor. `M` says what it reads: [`HeadOnly`] or [`NeedsBody`]. `P` is its position.
///
/// With one implementation the compiler would report the bound of that one, without this text.
#[diagnostic::on_unimplemented(
    message = "derive `Deserialize` for its type, let only the last one read the body, or pass the state: `{Self}` is not an extractor of this key function",
    label = "a key function with the state `{S}` cannot take this",
    note = "`Path<T>`, `Query<T>`, `Json<T>` and `Form<T>` need a type with `#[derive(Deserialize)]`; `Uuid` has it with its feature `serde`",
    note = "only the last may read the body (`Json`, `Form`, `Bytes`)",
    note = "an extractor that needs the application's state needs `key::from_fn_with_state(state, ..)`"
)]
pub trait Extractor<S, M, P>: Sized {
    const NEEDS_BODY: bool;

    /// `copy` is a copy of the head, if an extractor needs the body.
    fn extract(
        parts: &mut Parts,
        copy: &mut Option<Parts>,
        body: &mut BodyReader<'_>,
        state: &S,
    ) -> impl Future<Output = Result<Self, KeyRejection>> + Send;
}

/// Return type of a key function: an [`IntoLockKey`], or a future of one.
#[diagnostic::on_unimplemented(
    message = "return `(\"namespace\", part, ..)` with integers, strings, `bool` or `char` as parts (`Uuid` needs the feature `uuid`): `{Self}` is not a return type of a key function",
    label = "this cannot be made into a lock key",
    note = "return a tuple whose first element is the namespace, a `&'static str` (`(\"order\", id)`), a `LockKey`, an `Option` (`None`: no lock needed), a `Result` of these (`Err`, an `IntoResponse`, is sent as the response), or a future of one",
    note = "up to six parts follow it: integers, `bool`, `char` and strings (`Uuid` needs the feature `uuid`), a type of your own that implements `tower_lock::key::KeyPart`, `tower_lock::key::display(..)` of a type with unique texts; floats are not allowed: `0.1 + 0.2` and `0.3` would be two locks"
)]
pub trait KeyFnOutput<M> {
    /// See [`IntoLockKey::Keys`].
    type Keys: RequestKeys;

    fn into_key(self) -> impl Future<Output = Result<Option<Self::Keys>, Response<RejectionBody>>> + Send;
}

// Type parameters that keep the implementations of these traits apart.

/// The extractor reads the head of the request.
#[derive(Debug)]
pub enum HeadOnly {}

/// The extractor reads the body.
#[derive(Debug)]
pub enum NeedsBody {}

/// The last argument.
#[derive(Debug)]
pub enum Last {}

/// Another argument.
#[derive(Debug)]
pub enum NotLast {}

/// Position of an extractor that may read the body.
pub trait MayReadBody {}

/// The key function returns its key.
#[derive(Debug)]
pub enum Ready {}

/// The key function returns a future of its key.
#[derive(Debug)]
pub enum Async {}

// === impl KeyFn, Extractors ===

macro_rules! arguments {
    ($($part:ident $marker:ident $place:ident),*) => {
        impl<F, R, $($part,)*> KeyFn<($($part,)*)> for F
        where
            F: Fn($($part),*) -> R + Clone + Send + Sync + 'static,
        {
            type Output = R;

            #[allow(non_snake_case, reason = "an extractor is named after its type")]
            fn call(&self, ($($part,)*): ($($part,)*)) -> R {
                self($($part),*)
            }
        }

        impl<S, $($part, $marker,)*> Extractors<S, ($($marker,)*)> for ($($part,)*)
        where
            S: Send + Sync,
            $($part: Extractor<S, $marker, $place> + Send,)*
        {
            #[allow(non_snake_case, unused, reason = "an extractor is named after its type, and there may be none")]
            async fn extract(parts: &mut Parts, body: &mut BodyReader<'_>, state: &S) -> Result<Self, KeyRejection> {
                // Extractors of a request get a copy of the head: the handler must find every
                // extension.
                let mut copy = (false $(|| $part::NEEDS_BODY)*).then(|| parts.clone());
                // An invalid head is rejected before its body is read.
                $(let $part = $part::extract(parts, &mut copy, body, state).await?;)*
                Ok(($($part,)*))
            }
        }
    };
}

arguments!();
arguments!(A MA Last);
arguments!(A MA NotLast, B MB Last);
arguments!(A MA NotLast, B MB NotLast, C MC Last);
arguments!(A MA NotLast, B MB NotLast, C MC NotLast, D MD Last);

// === impl Extractor ===

impl MayReadBody for Last {}

impl<E, S, P> Extractor<S, HeadOnly, P> for E
where
    E: FromRequestParts<S> + Send,
    S: Send + Sync,
{
    const NEEDS_BODY: bool = false;

    async fn extract(
        parts: &mut Parts,
        copy: &mut Option<Parts>,
        _: &mut BodyReader<'_>,
        state: &S,
    ) -> Result<Self, KeyRejection> {
        E::from_request_parts(copy.as_mut().unwrap_or(parts), state).await.map_err(extractor_rejection::<E, _>)
    }
}

// The default marker of `FromRequest`, which extractors of the head do not have: this
// implementation and the one above never overlap.
impl<E, S, P> Extractor<S, NeedsBody, P> for E
where
    E: FromRequest<S> + Send,
    S: Send + Sync,
    P: MayReadBody,
{
    const NEEDS_BODY: bool = true;

    async fn extract(
        parts: &mut Parts,
        copy: &mut Option<Parts>,
        body: &mut BodyReader<'_>,
        state: &S,
    ) -> Result<Self, KeyRejection> {
        let bytes = body.read(parts).await?;
        let head = copy.take().expect("the last extractor needs the body");
        let request = Request::from_parts(head, Body::from(bytes));
        E::from_request(request, state).await.map_err(extractor_rejection::<E, _>)
    }
}

fn extractor_rejection<E, R: IntoResponse>(rejection: R) -> KeyRejection {
    KeyRejection::Response(rejection.into_response().map(RejectionBody::new), Some(type_name::<E>()))
}

// === impl KeyFnOutput ===

impl<R: IntoLockKey> KeyFnOutput<Ready> for R {
    type Keys = R::Keys;

    fn into_key(self) -> impl Future<Output = Result<Option<R::Keys>, Response<RejectionBody>>> + Send {
        ready(self.into_lock_key())
    }
}

impl<R> KeyFnOutput<Async> for R
where
    R: Future<Output: IntoLockKey> + Send,
{
    type Keys = <R::Output as IntoLockKey>::Keys;

    async fn into_key(self) -> Result<Option<Self::Keys>, Response<RejectionBody>> {
        self.await.into_lock_key()
    }
}

// === impl FromFn ===

impl<F, T, E, M, S> KeySource for FromFn<F, T, E, M, S>
where
    F: KeyFn<T, Output: KeyFnOutput<M>>,
    T: Extractors<S, E> + 'static,
    E: 'static,
    M: 'static,
    S: Clone + Send + Sync + 'static,
{
    type Keys = <F::Output as KeyFnOutput<M>>::Keys;

    async fn extract_key(
        &self,
        head: &mut Parts,
        body: &mut BodyReader<'_>,
    ) -> Result<Option<Self::Keys>, KeyRejection> {
        let arguments = T::extract(head, body, &self.state).await?;
        self.f.call(arguments).into_key().await.map_err(|response| KeyRejection::Response(response, None))
    }
}

impl<F: Clone, T, E, M, S: Clone> Clone for FromFn<F, T, E, M, S> {
    fn clone(&self) -> Self {
        Self { f: self.f.clone(), state: self.state.clone(), marker: PhantomData }
    }
}
