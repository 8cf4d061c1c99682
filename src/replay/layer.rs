//! The layer that keeps answers, and its settings.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, Method, Response, request::Parts, response};
use http_body::Body;
use tower::{BoxError, Layer};

use super::{
    config::{EqualRequests, ReplayConfig},
    docs_link::DocsLink,
    headers::HeaderFilter,
    idempotency_key::IdempotencyKeyField,
    recorder::AnswerSettings,
    scope_usage::ScopeLimits,
    service::ReplayService,
};
use crate::{
    body::reader::BodyReader,
    key_source::{
        KeyRejection, KeySource, OneKey,
        fields::field::{Field, header},
    },
    limits::{EQUAL_WAIT, EQUAL_WITHIN_MAX, EQUAL_WITHIN_MIN, KEEP_FOR, KEEP_UP_TO, KEEP_UP_TO_MAX, check_keep_for},
    lock::LockManager,
    lock_key::LockKey,
    middleware::config::RouteConfig,
    policy::{LockPolicy, OnDisconnect, OnLost, ReleaseAt},
    rejection::{OnReject, Rejection},
};

/// Layer that sends the answer of the first request to each of its retries.
///
/// A client creates a key for each request, and sends it with every attempt in the header
/// `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header). The first attempt runs the inner
/// service under the lock of the key. Its answer is kept in the store. Every later attempt, at any
/// instance, gets that answer, with the header `Idempotency-Replayed: true`, and the inner service
/// does not run.
///
/// ```
/// # use axum::{Extension, Json, Router, routing::post};
/// # use tower_lock::{LockLayer, LockManager, ReplayLayer, key};
/// # #[derive(Clone)] struct User { id: u64 }
/// # #[derive(serde::Deserialize)] struct Claim { family_id: u64 }
/// # async fn claim() {}
/// # fn app(locks: &LockManager) -> Router {
/// let user = key::from_fn(|Extension(user): Extension<User>| ("user", user.id));
/// let family = key::from_fn(|Json(claim): Json<Claim>| ("family", claim.family_id));
/// Router::new().route(
///     "/rewards/claim",
///     post(claim)
///         .route_layer(LockLayer::new(locks, family))
///         .route_layer(ReplayLayer::new(locks, user).required()),
/// )
/// # }
/// ```
///
/// # Position
///
/// Put the layer inside of the authentication, because its scope is the authenticated client, and
/// outside of a [`LockLayer`](crate::LockLayer), so that a retry needs no lock. Put compression
/// and CORS outside of it: an answer is kept with its encoding, and with the headers for the origin
/// of the first attempt. The layer works without Axum and
/// without a `LockLayer`. Of two nested layers with the same scope, the outer one keeps the answer.
///
/// # What is kept
///
/// | the first attempt ends with | a retry |
/// |---|---|
/// | a status below 400, and a body in memory of at most [`keep_up_to`] | gets the answer |
/// | a status below 400, and a longer body or a stream | 409 `answer-not-kept` |
/// | a status of 400 or more | runs |
/// | a panic, a lost lock, a stream that failed | runs, after the lock-delay |
/// | a crash | runs, after the lease and the lock-delay |
///
/// A 409 `answer-not-kept` has the status, the `Location` and the `ETag` of the answer.
/// A stream whose frames are all ready when its head is sent is a body in memory.
/// [`keep_if`](Self::keep_if) and [`Keep`](crate::Keep) change which answers are kept.
///
/// If the client disconnects, the handler finishes, and its record is left. A stream is not read to
/// its end without its client, and its record has no body. While the store cannot be reached,
/// requests with a key are rejected with 503: none runs without its record.
///
/// The layer keeps status, body and headers, except for headers of the connection and of the first
/// attempt: `Connection` and the headers that it names, `Keep-Alive`, `TE`, `Trailer`,
/// `Transfer-Encoding`, `Upgrade`, `Proxy-*`, `Content-Length` (it is set anew), `Date`,
/// `Set-Cookie`, `Age`, `Authentication-Info`, `Preference-Applied`, `Server-Timing` and
/// `Traceparent`.
///
/// If the process is killed after the handler has committed its work and before the record is left,
/// a retry runs the handler again. [`Once`](crate::Once) closes this window.
///
/// [`keep_up_to`]: Self::keep_up_to
///
/// # Rejections
///
/// | | status | [`Rejection`] |
/// |---|---|---|
/// | no key, and [`required`](Self::required) | 400 | `IdempotencyKeyMissing` |
/// | an invalid key | 400 | `IdempotencyKeyInvalid` |
/// | the key of another request | 422 | `IdempotencyKeyReused` |
/// | the first attempt still runs | 409 | `InFlight` |
/// | its answer was not kept | 409 | `AnswerNotKept` |
/// | its scope has too many answers | 429 | `TooManyAnswers` |
/// | no record, and [`require_record`](Self::require_record) | 503 | `AnswerUnconfirmed` |
///
/// # Cancel safety
///
/// The same as that of a [`LockLayer`](crate::LockLayer#cancel-safety).
#[must_use = "a layer does nothing before it is put on a route"]
pub struct ReplayLayer<K, V = WholeRequest> {
    // Shared, because Axum may create a service for each request.
    config: Arc<ReplayConfig<K>>,
    /// The values of the fingerprint.
    values: V,
}

/// No values: the fingerprint is that of the whole request.
#[derive(Clone, Copy, Debug)]
pub struct WholeRequest;

impl<K: KeySource<Keys: OneKey>> ReplayLayer<K> {
    /// Creates a layer whose keys are unique within this scope, which is one key.
    ///
    /// The scope is the client that authentication has verified: a user, an account, an
    /// organisation and its user. Two clients that choose the same key have nothing in common.
    /// Without a scope, one client could read the answers of another one by its keys.
    /// [`key::fixed`](crate::key::fixed) is one scope for all clients, for routes whose answers are
    /// public. A request for which a key function returns `None` runs without a record. With
    /// [`required`](Self::required) it is rejected with 400.
    ///
    /// A service that selects its tenant by the host name has the tenant in the scope: the host is
    /// not a part of the request that is compared.
    ///
    /// Do not use a token as the scope: a retry with a refreshed token would be another request.
    ///
    /// A record that the store has not confirmed within a lease is lost. A manager whose
    /// [lease](crate::LockManagerBuilder::lease) is shorter than ten call timeouts of the store
    /// leaves a warning: after a few calls without a reply, such a lease is over.
    ///
    /// # Panics
    ///
    /// Panics if the store keeps no [records](crate::store::StoreTraits::records).
    #[track_caller]
    pub fn new(locks: &LockManager, scope: K) -> Self {
        if let Some(error) = locks.records_refused("replay") {
            panic!("a `ReplayLayer` needs a store that keeps records: {error:?}");
        }
        locks.check_record_lease();
        // Not inherited: they would keep the answer from being recorded.
        let policy = LockPolicy::new()
            .wait(Duration::ZERO)
            .min_hold(Duration::ZERO)
            .release_at(ReleaseAt::BodyEnd)
            .on_disconnect(OnDisconnect::Finish)
            .on_lost(OnLost::Abort);
        let answers = AnswerSettings {
            keep_for: KEEP_FOR,
            keep_up_to: KEEP_UP_TO,
            headers: HeaderFilter::default(),
            keep_if: None,
            is_record_required: false,
        };
        let config = ReplayConfig {
            route: RouteConfig::new(locks, policy),
            scope,
            key_field: IdempotencyKeyField::new(header("idempotency-key")),
            is_required: false,
            methods: None,
            docs: None,
            answers: Arc::new(answers),
            scope_limits: ScopeLimits::default(),
            scope_usage: Arc::default(),
            find_answer: None,
            equal_requests: None,
            has_warned: Arc::default(),
        };
        Self { config: Arc::new(config), values: WholeRequest }
    }
}

impl<K: KeySource> ReplayLayer<K> {
    /// Sends the answer to a `POST` or `PATCH` also to each equal request without a key that
    /// arrives while the first one runs, or within this time after its answer: the double click.
    /// From 1 second to 10 minutes. Default: off.
    ///
    /// Requests are equal if they have the same scope, method, path, query, media type, content
    /// encoding and body, byte for byte. Two orders that are meant twice are equal, too: the second
    /// one needs a key of the client, or a longer pause. A request with a key is compared by its
    /// key alone.
    ///
    /// An equal request waits for the answer, for 30 seconds at most, and so does a retry with a
    /// key; [`wait`](Self::wait) after this call sets another time. Then it gets 409 `in-flight`.
    /// Its body is read before it runs, also if its handler would stream it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use axum::Extension;
    /// # use tower_lock::{LockManager, ReplayLayer, key};
    /// # #[derive(Clone)] struct User { id: u64 }
    /// # let locks = LockManager::in_memory();
    /// let user = key::from_fn(|Extension(user): Extension<User>| ("user", user.id));
    /// let once = ReplayLayer::new(&locks, user).equal_requests(Duration::from_secs(10));
    /// ```
    ///
    /// With [`required`](Self::required), each request without a key is rejected, so that this
    /// setting changes nothing.
    ///
    /// # Panics
    ///
    /// Panics if the time is out of range, or with [`find_answer`](Self::find_answer).
    #[track_caller]
    pub fn equal_requests(self, window: Duration) -> Self {
        assert!(
            (EQUAL_WITHIN_MIN..=EQUAL_WITHIN_MAX).contains(&window),
            "`equal_requests({window:?})` cannot be set: it must be from {EQUAL_WITHIN_MIN:?} to {EQUAL_WITHIN_MAX:?}"
        );
        let terms = EqualRequests { window, scope_usage: Arc::default() };
        self.wait(EQUAL_WAIT).with(|config| config.equal_requests = Some(terms)).checked()
    }
}

impl<K: KeySource, V> ReplayLayer<K, V> {
    /// Rejects requests without a key with 400: those with the [`methods`](Self::methods) that are
    /// set, otherwise all but `GET`, `HEAD`, `OPTIONS` and `TRACE`.
    ///
    /// Default: such a request runs, and nothing is kept.
    pub fn required(self) -> Self {
        self.with(|config| config.is_required = true)
    }

    /// Sets how long a request waits for the answer of the first attempt.
    ///
    /// Default: zero. The request is rejected with 409 while the first attempt runs, as the draft
    /// of the header says. One answer serves all requests that wait in one process. If the first
    /// attempt fails, one of them runs. When the wait ends, the request is rejected with 409.
    pub fn wait(self, duration: Duration) -> Self {
        self.policy(LockPolicy::new().wait(duration))
    }

    /// Sets how long an answer is kept, from 1 second to 366 days. Default: 24 hours.
    ///
    /// After this time a request with the same key runs again. Document the time for your clients.
    ///
    /// # Panics
    ///
    /// Panics if the time is out of range.
    #[track_caller]
    pub fn keep_for(self, duration: Duration) -> Self {
        let keep_for = check_keep_for(duration);
        self.with_answers(|answers| answers.keep_for = keep_for)
    }

    /// Sets how many bytes of body are kept, at most 1 MiB. Default: 64 KiB.
    ///
    /// A longer answer is sent, but not kept: a retry gets 409 `answer-not-kept`, and does not run.
    ///
    /// # Panics
    ///
    /// Panics if the number is larger.
    #[track_caller]
    pub fn keep_up_to(self, bytes: usize) -> Self {
        assert!(
            bytes <= KEEP_UP_TO_MAX,
            "`keep_up_to({bytes})` cannot be set: at most {KEEP_UP_TO_MAX} bytes are kept"
        );
        self.with_answers(|answers| answers.keep_up_to = bytes)
    }

    /// Sets how many answers one scope may have within [`keep_for`](Self::keep_for). Default:
    /// 10,000 answers, and 8 MiB of headers and bodies.
    ///
    /// One client then does not use the memory that the answers of all clients share. Beyond
    /// `answers`, a request with a new key is rejected with 429, and retries of earlier requests
    /// get their answers. Beyond `bytes`, answers are kept without their headers and bodies: a
    /// retry gets 409 `answer-not-kept`.
    ///
    /// Each process counts what it has left itself, approximately. A scope of many clients, such as
    /// [`key::fixed`](crate::key::fixed), needs larger limits.
    pub fn scope_limits(self, answers: usize, bytes: usize) -> Self {
        self.with(|config| config.scope_limits = ScopeLimits { answers, bytes })
    }

    /// Decides which answers are kept, in place of the default: those with a status below 400.
    ///
    /// A [`Keep`](crate::Keep) in the extensions of a response decides before this. Rejections of
    /// this crate are never kept.
    ///
    /// Do not keep server errors: every retry would get the error of a problem that is gone.
    pub fn keep_if(self, keep: impl Fn(&response::Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with_answers(|answers| answers.keep_if = Some(Arc::new(keep)))
    }

    /// Sends an answer only when the store has its record.
    ///
    /// Default: the answer is sent 250 ms after the handler has ended at the latest, also if the
    /// store has not replied: a client that has its answer does not retry, and only a retry can run
    /// the handler again. The lease is renewed until the record is left. If the process is killed
    /// before that, or has no reply of the store for a whole lease, a retry runs again, although
    /// the client has an answer.
    ///
    /// With this setting the client gets 503 `answer-unconfirmed` in such a case: it repeats the
    /// request with the same key, and gets the answer when the record is left. The response waits
    /// for the store for at most 2 seconds, also if its calls fail at once. A stream ends with an
    /// error before its last frame. Choose it if two different answers are worse than a retry.
    pub fn require_record(self) -> Self {
        self.with_answers(|answers| answers.is_record_required = true)
    }

    /// Keeps these headers of an answer, too.
    ///
    /// # Panics
    ///
    /// Panics if one of them belongs to a connection or to the framing of a message.
    #[track_caller]
    pub fn keep_headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        let names = HeaderFilter::check(names);
        self.with_answers(|answers| answers.headers.keep(names))
    }

    /// Does not keep these headers of an answer.
    pub fn drop_headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.with_answers(|answers| answers.headers.drop(names))
    }

    /// Sets the field of the request that has the key. Default: the header `idempotency-key`.
    ///
    /// ```
    /// # use tower_lock::{ReplayLayer, key::{self, KeySource}};
    /// # fn layer<K: KeySource>(layer: ReplayLayer<K>) -> ReplayLayer<K> {
    /// layer.key(key::json_field("request_id"))
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the field is an [`extension`](crate::key::extension), because a client sends the
    /// key.
    #[track_caller]
    pub fn key(self, field: Field) -> Self {
        let key_field = IdempotencyKeyField::new(field);
        self.with(|config| config.key_field = key_field)
    }

    /// Sets the methods whose requests can have a key. Default: `POST` and `PATCH`, and the methods
    /// of [`required`](Self::required).
    ///
    /// Requests with other methods run, and nothing is kept. The same holds for `CONNECT` and
    /// `HEAD` in any case: a tunnel has no answer, and an answer to `HEAD` lacks its body.
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|config| config.methods = Some(methods.into_iter().collect()))
    }

    /// Sets the URL of your documentation of the key. Responses that reject a request because of
    /// its key have it in the header `Link`, with `rel="describedby"`.
    ///
    /// # Panics
    ///
    /// Panics if the text has a character that a URL cannot have.
    #[track_caller]
    pub fn docs(self, url: &str) -> Self {
        let docs = DocsLink::new(url);
        self.with(|config| config.docs = Some(docs))
    }

    /// Sets the values that two attempts of one request have in common, besides method and path.
    ///
    /// Default: query, media type, content encoding and body, byte for byte. A client that
    /// serializes its request anew for each attempt may change the order of members or the form of
    /// numbers. The values of a key function are compared after they are parsed:
    ///
    /// ```
    /// # use axum::Json;
    /// # use tower_lock::{ReplayLayer, key::{self, KeySource}};
    /// # #[derive(serde::Deserialize)] struct Claim { family_id: u64, reward_type: u32 }
    /// # fn layer<K: KeySource>(layer: ReplayLayer<K>) -> ReplayLayer<K, impl KeySource> {
    /// let values = |Json(c): Json<Claim>| ("claim", c.family_id, c.reward_type);
    /// layer.fingerprint(key::from_fn(values))
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Panics after [`equal_requests`](ReplayLayer::equal_requests), which compares whole requests.
    #[track_caller]
    pub fn fingerprint<W: KeySource<Keys: OneKey>>(self, values: W) -> ReplayLayer<K, W> {
        assert!(
            self.config.equal_requests.is_none(),
            "`fingerprint` cannot be set with `equal_requests`: the answer may depend on the rest of the request"
        );
        ReplayLayer { config: self.config, values }
    }

    /// Sets the function that finds the answer that a handler has stored in its own database, with
    /// [`Once`](crate::Once).
    ///
    /// The layer calls it under the lock of the key, before it runs a handler. It also calls it if
    /// the store has kept the answer without its body. The argument is
    /// [`Once::key`](crate::Once::key). The function returns the bytes of
    /// [`OnceAnswer::as_bytes`](crate::replay::OnceAnswer::as_bytes), or `None` if there are
    /// none. If it fails, or returns other bytes, the request is rejected with 503.
    ///
    /// # Panics
    ///
    /// Panics with [`equal_requests`](ReplayLayer::equal_requests): an answer in a database does
    /// not end with the window.
    ///
    /// ```
    /// # use tower_lock::{LockKey, ReplayLayer, key::KeySource};
    /// # #[derive(Clone)] struct Database;
    /// # impl Database {
    /// #     async fn answer(&self, key: &str) -> std::io::Result<Option<Vec<u8>>> { Ok(None) }
    /// # }
    /// # fn layer<K: KeySource>(layer: ReplayLayer<K>, database: Database) {
    /// layer.find_answer(move |key: LockKey| {
    ///     let database = database.clone();
    ///     async move { database.answer(key.as_str()).await }
    /// });
    /// # }
    /// ```
    #[track_caller]
    pub fn find_answer<G, Fut, B, E>(self, find: G) -> Self
    where
        G: Fn(LockKey) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Option<B>, E>> + Send + 'static,
        B: Into<Bytes>,
        E: Into<BoxError>,
    {
        self.with(|config| {
            config.find_answer = Some(Arc::new(move |key| {
                let found = find(key);
                Box::pin(async move { found.await.map(|found| found.map(Into::into)).map_err(Into::into) })
            }));
        })
        .checked()
    }

    /// Sets each setting that this policy sets.
    ///
    /// Settings that are not set are inherited as those of a [`LockLayer`](crate::LockLayer) are,
    /// except for these: no wait, no `min_hold`, release at the end of the body, finish after a
    /// disconnect, abort when the lock is lost. The body of a request with a key is always read
    /// first, because it is a part of the fingerprint.
    ///
    /// The settings are those of the lock of the key. Locks that the handler acquires have the
    /// settings of the outer layers.
    pub fn policy(self, policy: LockPolicy) -> Self {
        self.with(|config| config.route.policy = policy.or(config.route.policy))
    }

    /// Sets the function that creates the responses to rejected requests. See
    /// [`LockLayer::on_reject`](crate::LockLayer::on_reject).
    pub fn on_reject<R, B>(self, respond: R) -> Self
    where
        R: Fn(&Rejection) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        self.with(|config| config.route.on_reject = OnReject::new(respond))
    }

    /// Sets the name of the route in spans and metrics. Default: `none`.
    ///
    /// The matched path of an Axum router has precedence.
    pub fn route_name(self, name: &'static str) -> Self {
        self.with(|config| config.route.name = Some(name))
    }

    #[track_caller]
    fn checked(self) -> Self {
        let ReplayConfig { equal_requests, find_answer, .. } = &*self.config;
        assert!(
            equal_requests.is_none() || find_answer.is_none(),
            "`find_answer` cannot be set with `equal_requests`: an answer in a database does not end with the window"
        );
        self
    }

    fn with(self, change: impl FnOnce(&mut ReplayConfig<K>)) -> Self {
        let mut config = ReplayConfig::clone(&self.config);
        change(&mut config);
        Self { config: Arc::new(config), values: self.values }
    }

    fn with_answers(self, change: impl FnOnce(&mut AnswerSettings)) -> Self {
        self.with(|config| change(Arc::make_mut(&mut config.answers)))
    }
}

// Its service needs `Clone`: here, the compiler names the bound and the type.
impl<S: Clone, K, V: Clone> Layer<S> for ReplayLayer<K, V> {
    type Service = ReplayService<S, K, V>;

    fn layer(&self, inner: S) -> Self::Service {
        self.config.route.note_policy();
        ReplayService { inner, config: Arc::clone(&self.config), values: self.values.clone() }
    }
}

impl<K, V: Clone> Clone for ReplayLayer<K, V> {
    fn clone(&self) -> Self {
        Self { config: Arc::clone(&self.config), values: self.values.clone() }
    }
}

#[diagnostic::do_not_recommend]
impl KeySource for WholeRequest {
    type Keys = LockKey;

    async fn extract_key(&self, _: &mut Parts, _: &mut BodyReader<'_>) -> Result<Option<LockKey>, KeyRejection> {
        Ok(None)
    }
}

impl<K, V> fmt::Debug for ReplayLayer<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReplayConfig { route, key_field, is_required, methods, answers, find_answer, .. } = &*self.config;
        f.debug_struct("ReplayLayer")
            .field("locks", &route.locks)
            .field("key", key_field)
            .field("required", is_required)
            .field("methods", methods)
            .field("policy", &route.policy)
            .field("answers", answers)
            .field("finds_answers", &find_answer.is_some())
            .finish_non_exhaustive()
    }
}
