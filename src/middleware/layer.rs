use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{Method, Response, request::Parts};
use http_body::Body;
use tower::{BoxError, Layer};

use super::{config::Config, service::LockService};
use crate::{
    key_source::KeySource,
    lock::LockManager,
    policy::{LockPolicy, request_setters, settings},
    rejection::{OnReject, Rejection},
};

/// Gives each request exclusive use of what it is about to change.
///
/// # Where to put it
///
/// On the methods of a route. The layers that know no key go on the router, outside of every lock:
///
/// ```
/// # use std::time::Duration;
/// # use axum::{Router, extract::Path, http::StatusCode, routing::post};
/// # use tower::ServiceBuilder;
/// # use tower_http::{catch_panic::CatchPanicLayer, cors::CorsLayer, timeout::TimeoutLayer, trace::TraceLayer};
/// # use tower_lock::{HeldLock, LockLayer, LockManager, key};
/// # async fn pay(_lock: HeldLock) {}
/// # fn app(locks: &LockManager) -> Router {
/// let order = |Path(id): Path<u64>| ("order", id);
/// Router::new()
///     .route("/orders/{id}/pay", post(pay).route_layer(LockLayer::new(locks, key::from_fn(order))))
///     .layer(
///         // The first one is the outermost.
///         ServiceBuilder::new()
///             .layer(TraceLayer::new_for_http())
///             .layer(CatchPanicLayer::new())
///             .layer(CorsLayer::permissive())    // and authentication
///             .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_secs(30))),
///     )
/// # }
/// ```
///
/// A timeout or a panic catcher *inside* of the lock hides from it that the handler did not finish: the key is then free at once, and not
/// after the [lock-delay](Self::lock_delay). A limit for the handler (`ConcurrencyLimit`) belongs inside of the lock: a request that waits
/// for its lock takes no place of it.
///
/// With `Router::layer` the lock layer also runs for each URL that no route matches. A key that is made of the path is answered 404 there, a
/// fallback included: it never runs without its lock. `Router::route_layer` leaves such requests to Axum, but runs the key function before
/// Axum answers 405.
///
/// A method router runs these methods **without a lock**, because Axum adds them outside of the layer:
///
/// - the fallback in `post(handler).fallback(other).route_layer(lock)`
/// - all but `GET` in `any(other).get(handler).route_layer(lock)`
/// - `GET` in `post(handler).route_layer(lock).merge(get(other))`
/// - `PUT` in `post(handler).route_layer(lock).put(other)`
///
/// `.layer(lock)` in place of `.route_layer(lock)` locks the first two. The last two need the lock layer after `.merge(..)` and `.put(..)`. A
/// handler that takes a [`HeldLock`](crate::HeldLock) answers 500 instead of running without a lock.
///
/// # Examples
///
/// ```
/// # use std::time::Duration;
/// # use axum::{Json, Router, extract::Path, routing::post};
/// # use tower_lock::{LockLayer, LockManager, key};
/// # #[derive(serde::Deserialize)] struct Claim { family_id: u64, reward_type: u32 }
/// # async fn claim() {} async fn sell() {}
/// # fn app(locks: &LockManager) -> Router {
/// Router::new()
///     .route("/rewards/claim", post(claim).route_layer(
///         LockLayer::new(locks, key::from_fn(|Json(c): Json<Claim>| ("reward", c.family_id, c.reward_type)))))
///     .route("/goods/{id}/sell", post(sell).route_layer(
///         LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| ("good", id))).wait(Duration::from_secs(10))))
/// # }
/// ```
///
/// `route_layer` runs for what matched alone: a 404 and, behind a CORS layer, a preflight never reach the store. On a
/// handler's `post(..)`, as here, a 405 does not either; `any(..)` knows no other method, and wants `layer`.
///
/// The whole handler runs under the lock, its extractors included. What it answered in full gives the lock back
/// before it is sent; a stream holds it to its last byte, trailers, error or drop, and no longer than its
/// [reader reads](Self::body_idle_timeout). A 101 and the answer to a `CONNECT` give it back at the head; what the
/// body of such an answer owns may be the tunnel itself, and lives on when the next section begins.
///
/// # Errors
///
/// None of its own: who is turned away gets a response, and its handler was not started; or the handler was broken off, and what it has done is
/// not known. [`Rejection`] has them all.
///
/// # Cancel safety
///
/// A client that leaves while its request waits is out of the line at once, and its handler never starts. One that leaves later, or a timeout outside of
/// the layer, finds its handler [finished](Self::on_disconnect) without it. (A timeout *inside* drops the handler, and the layer sees a plain answer:
/// [`max_hold`](Self::max_hold) knows better.)
///
/// # Panics
///
/// A panic of the handler goes on to whoever catches it outside; the key stays taken for the [lock-delay](Self::lock_delay), because a
/// statement of the handler may be on its way still. Caught *inside* of the layer, it is a plain answer to it.
#[must_use = "a layer does nothing before it is put on a route"]
pub struct LockLayer<K> {
    // Shared, because Axum may make a service of a layer for each request.
    config: Arc<Config<K>>,
}

impl<K: KeySource> LockLayer<K> {
    /// Locks what the key function says, in these locks. The key function is made by [`key::from_fn`](crate::key::from_fn),
    /// [`from_fn_with_state`](crate::key::from_fn_with_state) or [`from_parts`](crate::key::from_parts); or there is none, and the key is made of fields by name
    /// ([`from_fields`](crate::key::from_fields)), or always the same ([`fixed`](crate::key::fixed)).
    pub fn new(locks: &LockManager, key: K) -> Self {
        let config = Config {
            locks: locks.clone(),
            key,
            policy: LockPolicy::new(),
            skip: None,
            on_reject: OnReject::default(),
            name: None,
            usual_hold: Arc::default(),
        };
        Self { config: Arc::new(config) }
    }

    settings!(request_setters);

    /// Sets what this policy sets.
    pub fn policy(self, policy: LockPolicy) -> Self {
        self.with(|config| config.policy = policy.or(config.policy))
    }

    /// Lets a request through without a lock, as if the layer were not there. Default: none. Asked before the key function; a
    /// request is skipped if any of the predicates says so.
    ///
    /// ```
    /// # use tower_lock::{LockLayer, key::KeySource};
    /// # fn layer<K: KeySource>(layer: LockLayer<K>) -> LockLayer<K> {
    /// layer.skip(|head| head.headers.contains_key("x-dry-run"))
    /// # }
    /// ```
    ///
    /// A header is the client's word: whoever can set it can leave the lock out.
    pub fn skip(self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|config| {
            config.skip = Some(match config.skip.take() {
                None => Arc::new(skip),
                Some(earlier) => Arc::new(move |head| earlier(head) || skip(head)),
            });
        })
    }

    /// Lets requests with one of these methods through without a lock. Default: none.
    ///
    /// There is no list of methods *to* lock: Axum answers `HEAD` with the handler of `GET`, so a list that forgets `HEAD`
    /// would be a way past the lock.
    pub fn skip_methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        let methods: Vec<_> = methods.into_iter().collect();
        self.skip(move |head| methods.contains(&head.method))
    }

    /// Answers requests that are turned away. Default: [`Rejection::to_response`].
    ///
    /// ```
    /// # use axum::{Json, http::StatusCode, response::{IntoResponse, Response}};
    /// # use tower_lock::{LockLayer, key::KeySource, Rejection};
    /// # fn layer<K: KeySource>(layer: LockLayer<K>) -> LockLayer<K> {
    /// layer.on_reject(|rejection| match rejection {
    ///     Rejection::Busy { .. } => (StatusCode::LOCKED, "somebody was faster").into_response(),
    ///     other => other.clone().into_response(),
    /// })
    /// # }
    /// ```
    ///
    /// The typed [`Rejection`] is in the extensions of the answer, whoever makes it. What an extractor of the key function rejects is
    /// not asked for here: its own answer goes out as it is.
    pub fn on_reject<F, B>(self, answer: F) -> Self
    where
        F: Fn(&Rejection) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        self.with(|config| config.on_reject = OnReject::new(answer))
    }

    /// What the span calls the route if no router knows the path that matched. Default: `none`.
    pub fn route_name(self, name: &'static str) -> Self {
        self.with(|config| config.name = Some(name))
    }

    fn with(mut self, change: impl FnOnce(&mut Config<K>)) -> Self {
        change(Arc::make_mut(&mut self.config));
        self
    }
}

impl<S, K> Layer<S> for LockLayer<K> {
    type Service = LockService<S, K>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService::new(inner, Arc::clone(&self.config))
    }
}

impl<K> Clone for LockLayer<K> {
    fn clone(&self) -> Self {
        Self { config: Arc::clone(&self.config) }
    }
}

impl<K> fmt::Debug for LockLayer<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Config { locks, key: _, policy, skip, on_reject, name, usual_hold } = &*self.config;
        f.debug_struct("LockLayer")
            .field("locks", locks)
            .field("policy", policy)
            .field("skips", &skip.is_some())
            .field("on_reject", on_reject)
            .field("name", name)
            .field("usual_hold", usual_hold)
            .finish_non_exhaustive()
    }
}
