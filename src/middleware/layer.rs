//! The layer that locks requests, and its settings.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Response, request::Parts};
use http_body::Body;
use tower::{BoxError, Layer};

use super::{
    config::{LayerConfig, RouteConfig},
    holder_limit::{Grace, HolderLimit},
    service::LockService,
};
use crate::{
    key_source::{KeySource, OneKey},
    limits::check_max_holders,
    lock::{LockManager, TicketTerms, check_gap},
    policy::{LockPolicy, request_setters, settings},
    rejection::{OnReject, Rejection},
};

/// Layer that serializes requests per key.
///
/// The inner service runs while the request holds the lock of its key.
///
/// # Position
///
/// Put the layer on the method router of one route. Put the other layers on the router, outside of
/// every lock:
///
/// ```
/// # use std::time::Duration;
/// # use axum::{Router, extract::Path, http::StatusCode, routing::post};
/// # use tower::ServiceBuilder;
/// # use tower_http::{
/// #     catch_panic::CatchPanicLayer, cors::CorsLayer, timeout::TimeoutLayer, trace::TraceLayer,
/// # };
/// # use tower_lock::{HeldLock, LockLayer, LockManager, key};
/// # async fn pay(_lock: HeldLock) {}
/// # fn app(locks: &LockManager) -> Router {
/// let order = key::from_fn(|Path(id): Path<u64>| ("order", id));
/// let timeout = Duration::from_secs(30);
/// Router::new()
///     .route("/orders/{id}/pay", post(pay).route_layer(LockLayer::new(locks, order)))
///     .layer(
///         // The first one is the outermost.
///         ServiceBuilder::new()
///             .layer(TraceLayer::new_for_http())
///             .layer(CatchPanicLayer::new())
///             .layer(CorsLayer::permissive())    // and authentication
///             .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, timeout)),
///     )
/// # }
/// ```
///
/// A timeout or a panic handler *inside* of the lock makes an aborted handler look like a normal
/// response. The key is then free at once, and not after the [lock-delay](Self::lock_delay). Put a
/// concurrency limit (`ConcurrencyLimit`) inside of the lock, so that a waiting request uses none
/// of its capacity.
///
/// With `Router::layer` the lock layer also runs for each URL that no route matches. If the key
/// needs the path, such a request is rejected with 404, also if the router has a fallback: the
/// fallback never runs without its lock. `Router::route_layer` leaves unmatched URLs to Axum, but
/// runs the key function before Axum responds with 405.
///
/// A method router runs these handlers **without a lock**, because Axum adds them outside of the
/// layer:
///
/// - the fallback in `post(handler).fallback(other).route_layer(lock)`
/// - all but `GET` in `any(other).get(handler).route_layer(lock)`
/// - `GET` in `post(handler).route_layer(lock).merge(get(other))`
/// - `PUT` in `post(handler).route_layer(lock).put(other)`
///
/// `.layer(lock)` in place of `.route_layer(lock)` locks the first two. The last two need the lock
/// layer after `.merge(..)` and `.put(..)`. A handler with a [`HeldLock`](crate::HeldLock) argument
/// responds with 500 instead of running without a lock.
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
/// let reward = key::from_fn(|Json(c): Json<Claim>| ("reward", c.family_id, c.reward_type));
/// let good = key::from_fn(|Path(id): Path<u64>| ("good", id));
/// Router::new()
///     .route("/rewards/claim", post(claim).route_layer(LockLayer::new(locks, reward)))
///     .route(
///         "/goods/{id}/sell",
///         post(sell).route_layer(LockLayer::new(locks, good).wait(Duration::from_secs(10))),
///     )
/// # }
/// ```
///
/// `route_layer` on a method router, as here, runs for matched routes and methods only. Requests
/// that get a 404 or a 405 never reach the store, and neither do preflights behind a CORS layer.
/// The handler of `any(..)` is a fallback, so it needs `.layer(..)`.
///
/// The handler and its extractors run under the lock. A response that is complete in memory
/// releases the lock before it is sent. A stream holds the lock until its last byte, its trailers,
/// an error or its drop. It is aborted if its client [does not read](Self::body_idle_timeout). A
/// 101 and a successful response to `CONNECT` release the lock at the head. The body of such a
/// response may be the tunnel, so it is not dropped and may outlive the section.
///
/// # Errors
///
/// The layer adds no errors: a rejected request gets a response. [`Rejection`] lists the reasons.
/// The handler of a rejected request was not started, unless its lock was lost while it ran.
///
/// # Cancel safety
///
/// If the client disconnects while its request waits, the request leaves the queue at once and its
/// handler is not started. If the client disconnects later, or an outer timeout fires, the handler
/// [finishes](Self::on_disconnect) in the background. A timeout *inside* of the layer drops the
/// handler and looks like a normal response; use [`max_hold`](Self::max_hold) instead.
///
/// # Panics
///
/// A panic of the handler is not caught. The key stays blocked for the
/// [lock-delay](Self::lock_delay), because a statement of the handler may still be in flight. A
/// panic that is caught *inside* of the layer looks like a normal response.
#[must_use = "a layer does nothing before it is put on a route"]
pub struct LockLayer<K> {
    // Shared, because Axum may create a service for each request.
    config: Arc<LayerConfig<K>>,
}

impl<K: KeySource> LockLayer<K> {
    /// Creates a layer that derives keys from this source.
    ///
    /// The source is a key function ([`key::from_fn`](crate::key::from_fn),
    /// [`from_fn_with_state`](crate::key::from_fn_with_state),
    /// [`from_parts`](crate::key::from_parts)), named fields of the request
    /// ([`from_fields`](crate::key::from_fields)), or one key for all requests
    /// ([`fixed`](crate::key::fixed)).
    pub fn new(locks: &LockManager, key: K) -> Self {
        let route = RouteConfig::new(locks, LockPolicy::new());
        let config = LayerConfig {
            route,
            key,
            skip: None,
            limit: HolderLimit::default(),
            tickets: None,
            without_key: Arc::default(),
        };
        Self { config: Arc::new(config) }
    }

    settings!(request_setters);

    /// Sets each setting that this policy sets.
    pub fn policy(self, policy: LockPolicy) -> Self {
        self.with(|config| config.route.policy = policy.or(config.route.policy))
    }

    /// Runs requests that match this predicate without a lock.
    ///
    /// Default: none. The predicate is called before the key function. With several predicates a
    /// request is skipped if any of them matches.
    ///
    /// ```
    /// # use tower_lock::{LockLayer, key::KeySource};
    /// # fn layer<K: KeySource>(layer: LockLayer<K>) -> LockLayer<K> {
    /// layer.skip(|head| head.headers.contains_key("x-dry-run"))
    /// # }
    /// ```
    ///
    /// Do not rely on a header that clients can set: they could skip the lock.
    pub fn skip(self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|config| {
            config.skip = Some(match config.skip.take() {
                None => Arc::new(skip),
                Some(earlier) => Arc::new(move |head| earlier(head) || skip(head)),
            });
        })
    }

    /// Runs requests with one of these methods without a lock. Default: none.
    ///
    /// No setting lists the methods *to* lock. Axum also calls the handler of `GET` for `HEAD`, so
    /// a list without `HEAD` would let requests bypass the lock.
    pub fn skip_methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        let methods: Vec<_> = methods.into_iter().collect();
        self.skip(move |head| methods.contains(&head.method))
    }

    /// Lets up to `limit` requests for one key run at the same time, in all instances together.
    ///
    /// Default: one, and the handler takes a [`HeldLock`](crate::HeldLock). With this setting it
    /// takes a [`HeldPermit`](crate::HeldPermit), also if the limit is 1.
    ///
    /// Further requests are rejected with 429 `no-permit`, or wait ([`wait`](Self::wait)): in order
    /// of arrival within an instance, and instances take turns. A request that times out is
    /// rejected with 429, too. Each holder has its own lease, so that a crash frees one permit.
    ///
    /// Instances with different limits may run beside each other, as during a deployment: each
    /// request counts all holders, and compares their number with its own limit. A holder whose
    /// limit is 1 excludes all others until it ends.
    ///
    /// The last one of `at_most`, [`at_most_by`](Self::at_most_by) and
    /// [`shared_for`](Self::shared_for) counts. They are for requests with one key: one with
    /// several ([`key::all`](crate::key::all)) or with a raw key is rejected with 500, and the log
    /// says why.
    ///
    /// Several limits at once are nested layers, the narrowest one outside: a request that waits
    /// for its organization then holds a permit of its own tenant, and none that another one needs.
    ///
    /// ```
    /// # use axum::{Router, extract::Path, routing::post};
    /// # use tower_lock::{HeldPermit, LockLayer, LockManager, key};
    /// async fn export(permit: HeldPermit) -> String {
    ///     format!("one of four: {}", permit.key())
    /// }
    ///
    /// # fn app(locks: &LockManager) -> Router {
    /// let tenant = key::from_fn(|Path(tenant): Path<u64>| ("export", tenant));
    /// Router::new().route(
    ///     "/tenants/{tenant}/exports",
    ///     post(export).route_layer(LockLayer::new(locks, tenant).at_most(4)),
    /// )
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the limit is 0 or above 1,024, if it is above 1 and the store has no
    /// [shares](crate::store::StoreTraits::shares), or with [`tickets`](Self::tickets) or
    /// [`newest_wins`](Self::newest_wins).
    #[track_caller]
    pub fn at_most(self, limit: u16) -> Self {
        let limit = HolderLimit::AtMost(check_max_holders(limit)).checked(&self.config.route.locks, "at_most");
        self.limited(limit)
    }

    /// The same as [`at_most`](Self::at_most), with a limit for each request, such as that of the
    /// plan of its tenant. Read the plan on the server: a client may send any header.
    ///
    /// A request with the limit 0 is rejected with 429 `no-permit` without a call of the store. The
    /// response asks for a retry: reject a tenant without a plan with 403, in an outer layer. One
    /// with a limit above 1,024 is rejected with 500, and the log names the limit.
    ///
    /// ```
    /// # use tower_lock::{LockLayer, key::KeySource};
    /// # #[derive(Clone)] struct Plan { exports: u16 }
    /// # fn layer<K: KeySource>(layer: LockLayer<K>) -> LockLayer<K> {
    /// // An outer layer has inserted the plan of the tenant.
    /// layer.at_most_by(|head| head.extensions.get().map_or(0, |plan: &Plan| plan.exports))
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the store has no [shares](crate::store::StoreTraits::shares), or with
    /// [`tickets`](Self::tickets) or [`newest_wins`](Self::newest_wins).
    #[track_caller]
    pub fn at_most_by(self, limit: impl Fn(&Parts) -> u16 + Send + Sync + 'static) -> Self {
        let limit = HolderLimit::AtMostBy(Arc::new(limit)).checked(&self.config.route.locks, "at_most_by");
        self.limited(limit)
    }

    /// Lets requests with these methods share their key: they exclude requests with the other
    /// methods, and not each other. Name `HEAD` beside `GET`.
    ///
    /// Default: none. A handler of these methods takes a [`HeldPermit`](crate::HeldPermit). One of
    /// the other methods takes a [`HeldLock`](crate::HeldLock), which has a fencing token, or a
    /// `HeldPermit`.
    ///
    /// A refused request gets 409. With a [`wait`](Self::wait), readers that come after a waiting
    /// writer wait for it, so that neither starves. Readers of one process share a grant of the
    /// store for up to 100 ms. A key has at most 1,024 grants of readers at a time.
    ///
    /// ```
    /// # use axum::{Router, extract::Path, http::Method, routing::get};
    /// # use tower_lock::{HeldLock, HeldPermit, LockLayer, LockManager, key};
    /// # async fn show(_: HeldPermit) {} async fn replace(_: HeldLock) {}
    /// # fn app(locks: &LockManager) -> Router {
    /// let document = key::from_fn(|Path(id): Path<u64>| ("document", id));
    /// let layer = LockLayer::new(locks, document).shared_for([Method::GET, Method::HEAD]);
    /// Router::new().route("/documents/{id}", get(show).put(replace).route_layer(layer))
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the store has no [shares](crate::store::StoreTraits::shares), or no queue, as
    /// `MysqlStore`.
    #[track_caller]
    pub fn shared_for(self, methods: impl IntoIterator<Item = Method>) -> Self {
        let limit = HolderLimit::SharedFor(methods.into_iter().collect());
        let limit = limit.checked(&self.config.route.locks, "shared_for");
        self.limited(limit)
    }

    /// Lets a newer request for a key replace the older ones, in all instances: agent servers,
    /// search as you type, autosave.
    ///
    /// Default: off, and the newer request is rejected or waits. With this setting the handler that
    /// runs is dropped where it is, at an await: its resources are dropped, then the key is
    /// released, without a [lock-delay](Self::lock_delay), and then the newer handler starts. The
    /// client of the older request gets 409 `superseded`, with the outcome `unknown`, or an error
    /// in its stream. A request that still waits is replaced, too: it gets the same with the
    /// outcome `not-started`. The newest request is the one that comes to the store last, after its
    /// body: a slow upload may replace a newer one.
    ///
    /// A handler that awaits [`HeldLock::superseded`](crate::HeldLock::superseded) has `grace` to
    /// end in order and send its response, before it is dropped: zero to 30 seconds. A statement
    /// that was sent before the drop may still be executed: check its fencing token, or end in
    /// order.
    ///
    /// A request waits for the older one for its [`wait`](Self::wait), and at least for the grace,
    /// a third of the lease and two seconds. It never replaces a section of another kind, such as
    /// that of a layer without this setting: it waits for it.
    ///
    /// A layer further in with the same key, or a guard of it in the handler, ends with a
    /// lock-delay. So does a lock of another key that the handler has acquired.
    ///
    /// **Each user can stop the requests for a key**: the key names the user, or what the user
    /// alone may change. A [`ReplayLayer`](crate::ReplayLayer) goes outside of this layer, and
    /// leaves no answer of a handler that was dropped.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use axum::{Router, extract::Path, routing::post};
    /// # use tower_lock::{HeldLock, LockLayer, LockManager, key};
    /// # async fn turn(_: HeldLock) {}
    /// # fn app(locks: &LockManager) -> Router {
    /// let session = key::from_fn(|Path((user, id)): Path<(u64, u64)>| ("turn", user, id));
    /// let layer = LockLayer::new(locks, session).newest_wins(Duration::ZERO);
    /// Router::new().route("/users/{user}/sessions/{id}/turns", post(turn).route_layer(layer))
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the grace is longer than 30 seconds, if the store does not
    /// [support](crate::store::StoreTraits::supersedes) it, and with [`at_most`](Self::at_most),
    /// [`at_most_by`](Self::at_most_by), [`shared_for`](Self::shared_for) or
    /// [`tickets`](Self::tickets). Several keys ([`key::all`](crate::key::all)) do not compile, and
    /// raw keys are rejected with 500.
    #[track_caller]
    pub fn newest_wins(self, grace: Duration) -> Self
    where
        K::Keys: OneKey,
    {
        let limit = HolderLimit::Newest(Grace::new(grace)).checked(&self.config.route.locks, "newest_wins");
        self.limited(limit)
    }

    /// Lets a handler keep its key for a later request, which presents a ticket.
    ///
    /// Default: off. A handler calls [`HeldLock::keep`](crate::HeldLock::keep), and the response
    /// has the ticket in the header `Lock-Ticket`. A request with this header continues the work:
    /// its handler runs under the same key, although that is locked for all others. A handler that
    /// does not call `keep` ends the work, if it succeeds. If it fails (a status of 400 or higher,
    /// an error), the key stays with the ticket, and the response has the header again: a declined
    /// payment does not lose the seat.
    ///
    /// `gap` is how long the key waits for the next request at most, and `total` how long the whole
    /// work takes at most, from its first request on: both from 1 second to 24 hours. The age of
    /// the work is measured by the clocks of the instances.
    ///
    /// A value that is no ticket of the key of the request is rejected with 400, and a ticket that
    /// does not hold the key (any more) with 409 `ticket-not-held`. Of two requests with one ticket
    /// one runs. The other one is rejected at once: it does not wait. A request without the header
    /// takes a free key as a first one does, so that a later step checks
    /// [`HeldLock::is_redeemed`](crate::HeldLock::is_redeemed).
    ///
    /// A ticket is for one key, which its holder has alone: a request with several keys or a raw
    /// key is rejected with 500, and the log says why.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use axum::{Router, extract::Path, http::StatusCode, routing::post};
    /// # use tower_lock::{HeldLock, LockLayer, LockManager, key};
    /// const GAP: Duration = Duration::from_secs(5 * 60);
    ///
    /// async fn reserve(seat: HeldLock) -> Result<(), StatusCode> {
    ///     seat.keep(GAP).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    ///     Ok(())
    /// }
    ///
    /// async fn confirm(seat: HeldLock) -> StatusCode {
    ///     if !seat.is_redeemed() {
    ///         return StatusCode::CONFLICT;
    ///     }
    ///     // .. write, under seat.fencing_token()
    ///     StatusCode::OK
    /// }
    ///
    /// # fn app(locks: &LockManager) -> Router {
    /// let seat = key::from_fn(|Path(seat): Path<String>| ("seat", seat));
    /// let layer = LockLayer::new(locks, seat).tickets(GAP, 4 * GAP);
    /// Router::new()
    ///     .route("/seats/{seat}/reserve", post(reserve))
    ///     .route("/seats/{seat}/confirm", post(confirm))
    ///     .route_layer(layer)
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if a time is out of bounds, if the store has no
    /// [tickets](crate::store::StoreTraits::tickets), or with [`at_most`](Self::at_most),
    /// [`at_most_by`](Self::at_most_by), [`shared_for`](Self::shared_for) or
    /// [`newest_wins`](Self::newest_wins).
    #[track_caller]
    pub fn tickets(self, gap: Duration, total: Duration) -> Self {
        check_gap(gap);
        check_gap(total);
        if let Some(why) = self.config.route.locks.driver().tickets_refused(false) {
            panic!("`tickets` needs another store: {why}");
        }
        self.config.check_limit(&self.config.limit, true);
        self.with(|config| config.tickets = Some(TicketTerms { gap, total }))
    }

    /// Sets the function that creates the responses to rejected requests. Default:
    /// [`Rejection::to_response`].
    ///
    /// ```
    /// # use axum::{Json, http::StatusCode, response::{IntoResponse, Response}};
    /// # use tower_lock::{LockLayer, key::KeySource, Rejection};
    /// # fn layer<K: KeySource>(layer: LockLayer<K>) -> LockLayer<K> {
    /// layer.on_reject(|rejection| match rejection {
    ///     Rejection::Busy { .. } => (StatusCode::LOCKED, "please try again").into_response(),
    ///     other => other.clone().into_response(),
    /// })
    /// # }
    /// ```
    ///
    /// The status is that of the response: a text without a status is a 200. Every such response
    /// has the typed [`Rejection`] in its extensions. The function is not
    /// called if an extractor of the key function rejects the request: the response of the
    /// extractor is sent unchanged.
    pub fn on_reject<F, B>(self, respond: F) -> Self
    where
        F: Fn(&Rejection) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        self.with(|config| config.route.on_reject = OnReject::new(respond))
    }

    /// Sets how many keys a request may have. Default: 64, which is also the most.
    ///
    /// A request with more is rejected with 422 `invalid-key`. A request that waits holds its
    /// smaller keys meanwhile. If a client names the keys in a list, set the number that the route
    /// needs, or one request holds the keys of 63 others.
    pub fn max_keys(self, max: usize) -> Self {
        self.with(|config| config.route.max_keys = max)
    }

    /// Sets the name of the route in spans and metrics. Default: `none`.
    ///
    /// The matched path of an Axum router has precedence.
    pub fn route_name(self, name: &'static str) -> Self {
        self.with(|config| config.route.name = Some(name))
    }

    #[track_caller]
    fn limited(self, limit: HolderLimit) -> Self {
        self.config.check_limit(&limit, self.config.tickets.is_some());
        self.with(|config| config.limit = limit)
    }

    fn with(self, change: impl FnOnce(&mut LayerConfig<K>)) -> Self {
        let mut config = LayerConfig::clone(&self.config);
        change(&mut config);
        Self { config: Arc::new(config) }
    }
}

// Its service needs `Clone`: here, the compiler names the bound and the type.
impl<S: Clone, K> Layer<S> for LockLayer<K> {
    type Service = LockService<S, K>;

    fn layer(&self, inner: S) -> Self::Service {
        self.config.route.note_policy();
        LockService { inner, config: Arc::clone(&self.config) }
    }
}

impl<K> Clone for LockLayer<K> {
    fn clone(&self) -> Self {
        Self { config: Arc::clone(&self.config) }
    }
}

impl<K> fmt::Debug for LockLayer<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LayerConfig { route, skip, limit, .. } = &*self.config;
        f.debug_struct("LockLayer")
            .field("route", route)
            .field("limit", limit)
            .field("skips", &skip.is_some())
            .finish_non_exhaustive()
    }
}
