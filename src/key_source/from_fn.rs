//! Key functions, written like Axum handlers.

use std::{
    any::type_name,
    fmt,
    future::{Future, ready},
    marker::PhantomData,
};

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts},
    response::IntoResponse,
};
use http::{Request, Response, request::Parts};

use super::{IntoLockKey, KeySource, NoKey};
use crate::{body::reader::BodyReader, lock_key::LockKey, rejection::RejectionBody};

/// Keys from extractors: the function says which key the request needs, and takes what a handler would take.
///
/// A closure or a function, sync or async, of none to four extractors, each with its type written out; the last may read the
/// body. What it may answer is the table of [`IntoLockKey`].
///
/// ```
/// # use axum::{Json, extract::Path, http::{HeaderMap, StatusCode}};
/// # use tower_lock::{LockLayer, LockManager, key};
/// # #[derive(serde::Deserialize)] struct Claim { family_id: u64, reward_type: u32 }
/// # fn layers(locks: &LockManager) {
/// LockLayer::new(locks, key::from_fn(|Json(c): Json<Claim>| ("reward", c.family_id, c.reward_type)));
/// LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>, headers: HeaderMap| async move {
///     if headers.contains_key("x-dry-run") { None } else { Some(("order", id)) }
/// }));
/// # }
/// ```
///
/// # What it promises
///
/// - The key is made of what the handler will see: `01`, `+1` and `%31` are the number 1, and one lock.
/// - What an extractor rejects is answered as it says, untouched, before anything is locked: a body that is no claim
///   is a 422. [`Rejection::InvalidKey`](crate::Rejection::InvalidKey) is in the extensions. What it rejects of the head, it rejects before the body is read.
/// - The body is read before anything is locked, whether or not the key is made of it
///   ([`request_body`](crate::LockLayer::request_body)): once, within the route's `DefaultBodyLimit` (413 beyond it), and given on byte for byte
///   with its headers, trailers and length. A `DefaultBodyLimit` must stand *outside* the lock to be seen by it.
/// - A body that is read or waits takes up room: those of one [`LockManager`](crate::LockManager) and its clones 64 MiB together, counted as they come. A client
///   that sends too slowly is told 408 ([`body_idle_timeout`](crate::LockLayer::body_idle_timeout)). Where room is short, of the
///   bodies larger than the average the one that has been idle for longest is aborted, and a smaller one only if no larger one
///   is there. A request is told 503 if complete bodies take up all of the room, or those for its key an eighth of what is left.
///
/// An extractor that *takes* something out of the request (`WebSocketUpgrade`) would take it from the handler, too: do not
/// lock by such a one. Needs the feature `axum`.
pub fn from_fn<F, T, M>(f: F) -> FromFn<F, T, M, ()>
where
    F: KeyFn<T, ()>,
    F::Answer: KeyFnOutput<M>,
{
    from_fn_with_state((), f)
}

/// [`from_fn`], for extractors that need the application's state.
///
/// ```
/// # use axum::{extract::{Path, State}, http::StatusCode};
/// # use tower_lock::{LockLayer, LockManager, key};
/// # #[derive(Clone)] struct Db;
/// # impl Db { async fn tenant_of(&self, _: u64) -> Result<u64, StatusCode> { Ok(1) } }
/// # fn layer(locks: &LockManager, db: Db) {
/// LockLayer::new(locks, key::from_fn_with_state(db, |State(db): State<Db>, Path(order): Path<u64>| async move {
///     Ok::<_, StatusCode>(("tenant", db.tenant_of(order).await?))
/// }));
/// # }
/// ```
pub fn from_fn_with_state<F, T, M, S>(state: S, f: F) -> FromFn<F, T, M, S>
where
    F: KeyFn<T, S>,
    F::Answer: KeyFnOutput<M>,
    S: Clone + Send + Sync + 'static,
{
    FromFn { f, state, marker: PhantomData }
}

/// A key function that was accepted. Made by [`from_fn`] and [`from_fn_with_state`].
pub struct FromFn<F, T, M, S> {
    f: F,
    state: S,
    // As a function that makes them: whether a layer is `Send` does not hang on its extractors.
    marker: PhantomData<fn() -> (T, M)>,
}

/// A function of extractors that answers a key.
///
/// Not to be implemented: closures and functions of up to four extractors do.
#[diagnostic::on_unimplemented(
    message = "take up to four extractors with their types, of which only the last may read the body: `{Self}` is not a key function",
    label = "not a key function for state `{S}`",
    note = "a key function takes up to four extractors, each with its type written out (`|Path(id): Path<u64>| ..`); only the last may read the body (`Json`, `Form`, `Bytes`)",
    note = "it answers a tuple `(\"namespace\", part, ..)`, a `LockKey`, an `Option` or a `Result` of these, or a future of one",
    note = "an extractor that needs the application's state needs `key::from_fn_with_state(state, ..)`"
)]
pub trait KeyFn<T, S>: Clone + Send + Sync + 'static {
    /// What it answers. Not bounded here, so that a wrong answer is an error of its own.
    type Answer;

    #[doc(hidden)]
    fn find<M>(
        &self,
        parts: &mut Parts,
        body: &mut BodyReader<'_>,
        state: &S,
    ) -> impl Future<Output = Result<Option<LockKey>, NoKey>> + Send
    where
        Self::Answer: KeyFnOutput<M>;
}

/// What a key function answers: [`IntoLockKey`], or a future of one.
///
/// Not to be implemented.
#[diagnostic::on_unimplemented(
    message = "answer `(\"namespace\", part, ..)` with integers, strings, `bool`, `char` or `Uuid` (feature `uuid`) as parts: `{Self}` is not an answer of a key function",
    label = "this cannot be made into a lock key",
    note = "answer a tuple whose first element is the namespace, a `&'static str` (`(\"order\", id)`), a `LockKey`, an `Option` (`None`: no lock needed), a `Result` of these (`Err`, an `IntoResponse`, is sent as the response), or a future of one",
    note = "up to six parts follow it, or none: integers, `bool`, `char`, strings and `Uuid` (feature `uuid`), `tower_lock::key::display(..)` of a type whose text is unique; a float is none: `0.1 + 0.2` and `0.3` would be two locks"
)]
pub trait KeyFnOutput<M> {
    #[doc(hidden)]
    fn answer(self) -> impl Future<Output = Result<Option<LockKey>, Response<RejectionBody>>> + Send;
}

/// Marks a key function whose extractors are all of the head of a request.
#[doc(hidden)]
#[derive(Debug)]
pub enum FromHead {}

/// Marks one whose last extractor reads the body.
#[doc(hidden)]
#[derive(Debug)]
pub enum FromBody {}

/// Marks a key function that answers at once.
#[doc(hidden)]
#[derive(Debug)]
pub enum Now {}

/// Marks a key function that answers a future.
#[doc(hidden)]
#[derive(Debug)]
pub enum Later {}

// === impl KeyFn ===

macro_rules! from_head {
    ($($part:ident)*) => {
        impl<F, R, S, $($part,)*> KeyFn<(FromHead, $($part,)*), S> for F
        where
            F: Fn($($part,)*) -> R + Clone + Send + Sync + 'static,
            S: Send + Sync,
            $($part: FromRequestParts<S> + Send,)*
        {
            type Answer = R;

            #[allow(non_snake_case, unused_variables, reason = "with no extractor nothing is looked at")]
            async fn find<M>(
                &self,
                parts: &mut Parts,
                _: &mut BodyReader<'_>,
                state: &S,
            ) -> Result<Option<LockKey>, NoKey>
            where
                R: KeyFnOutput<M>,
            {
                $(let $part = $part::from_request_parts(parts, state).await.map_err(answered::<$part, _>)?;)*
                self($($part,)*).answer().await.map_err(|answer| NoKey::Answered(answer, None))
            }
        }
    };
}

from_head!();
from_head!(A);
from_head!(A B);
from_head!(A B C);
from_head!(A B C D);

// The last one has the default marker of `FromRequest`, which extractors that need no body do not have: this and the one
// above never overlap.
macro_rules! from_body {
    ([$($part:ident)*] $last:ident) => {
        impl<F, R, S, $($part,)* $last> KeyFn<(FromBody, $($part,)* $last,), S> for F
        where
            F: Fn($($part,)* $last) -> R + Clone + Send + Sync + 'static,
            S: Send + Sync,
            $($part: FromRequestParts<S> + Send,)*
            $last: FromRequest<S> + Send,
        {
            type Answer = R;

            #[allow(non_snake_case, reason = "an extractor is named as its type")]
            async fn find<M>(
                &self,
                parts: &mut Parts,
                body: &mut BodyReader<'_>,
                state: &S,
            ) -> Result<Option<LockKey>, NoKey>
            where
                R: KeyFnOutput<M>,
            {
                // A copy: an extractor may take something out of what it is shown.
                #[allow(unused_mut, reason = "one that is alone has the request itself")]
                let mut shown = parts.clone();
                // A bad head is answered before its body is read.
                $(let $part = $part::from_request_parts(&mut shown, state).await.map_err(answered::<$part, _>)?;)*
                let bytes = body.read(parts).await?;
                let request = Request::from_parts(shown, Body::from(bytes));
                let $last = $last::from_request(request, state).await.map_err(answered::<$last, _>)?;
                self($($part,)* $last).answer().await.map_err(|answer| NoKey::Answered(answer, None))
            }
        }
    };
}

from_body!([] A);
from_body!([A] B);
from_body!([A B] C);
from_body!([A B C] D);

fn answered<E, R: IntoResponse>(rejection: R) -> NoKey {
    NoKey::Answered(rejection.into_response().map(RejectionBody::new), Some(type_name::<E>()))
}

// === impl Answer ===

impl<R: IntoLockKey> KeyFnOutput<Now> for R {
    fn answer(self) -> impl Future<Output = Result<Option<LockKey>, Response<RejectionBody>>> + Send {
        ready(self.into_lock_key())
    }
}

impl<R> KeyFnOutput<Later> for R
where
    R: Future<Output: IntoLockKey> + Send,
{
    async fn answer(self) -> Result<Option<LockKey>, Response<RejectionBody>> {
        self.await.into_lock_key()
    }
}

// === impl By ===

impl<F, T, M, S> KeySource for FromFn<F, T, M, S>
where
    F: KeyFn<T, S, Answer: KeyFnOutput<M>>,
    T: 'static,
    M: 'static,
    S: Clone + Send + Sync + 'static,
{
    async fn derive(&self, head: &mut Parts, body: &mut BodyReader<'_>) -> Result<Option<LockKey>, NoKey> {
        self.f.find(head, body, &self.state).await
    }
}

impl<F: Clone, T, M, S: Clone> Clone for FromFn<F, T, M, S> {
    fn clone(&self) -> Self {
        Self { f: self.f.clone(), state: self.state.clone(), marker: PhantomData }
    }
}

impl<F, T, M, S> fmt::Debug for FromFn<F, T, M, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("By").finish_non_exhaustive()
    }
}
