//! Reasons for rejections, and their responses.

mod problem;
mod body;
pub(crate) mod field_error;
pub(crate) mod retry_after;

use std::{borrow::Cow, error::Error, fmt, mem, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderValue, Response, StatusCode, request::Parts};
use http_body::Body;
use tower::BoxError;

pub use self::body::RejectionBody;
use self::{
    field_error::{FieldError, FieldLocation, FieldProblem},
    retry_after::{HoldEstimate, retry_after},
};
use crate::{
    error::{LockError, QueueBound},
    limits::RETRY_AFTER_MIN,
    store::{StoreError, StoreErrorKind},
};

/// Reason why a request was rejected.
///
/// The handler was not started, except for `Lost`, `HoldLimitReached` and `AnswerUnconfirmed`, and
/// for a `Superseded` that says so. For `AnswerNotKept` it ran for an earlier request. The built-in
/// response is `application/problem+json` (RFC 9457).
/// [`LockLayer::on_reject`](crate::LockLayer::on_reject) replaces it. In both cases the extensions
/// of the response contain this value, for outer layers.
///
/// The page [`problem`](crate::problem) has the problem type of each reason, its status, and the
/// advice for clients.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// The key is held, and the request does not wait.
    Busy {
        /// The time after which a retry may succeed.
        retry_after: Duration,
    },
    /// As many requests as may hold the key at a time do so, and the request does not wait. See
    /// [`LockLayer::at_most`](crate::LockLayer::at_most).
    NoPermit {
        /// The time after which a retry may succeed.
        retry_after: Duration,
    },
    /// The request holds the key with others, by an outer layer, and asks for it alone. It would
    /// wait for itself. This is a mistake of the service.
    WouldDeadlock {
        /// The route of the layer that holds the key.
        held_by: String,
        /// The route of the layer that asks for it.
        asked_by: String,
    },
    /// The wait of the request has timed out.
    TimedOut {
        /// The limit of the wait.
        waited: Duration,
        /// The time after which a retry may succeed.
        retry_after: Duration,
        /// The status of the response.
        status: StatusCode,
    },
    /// Too many requests are waiting.
    QueueFull {
        /// The bound that was reached.
        bound: QueueBound,
        /// The time after which a retry may succeed.
        retry_after: Duration,
    },
    /// The store failed or timed out.
    StoreUnavailable {
        /// The time after which a retry may succeed.
        retry_after: Duration,
        /// The error of the store.
        source: Arc<StoreError>,
    },
    /// This instance is shutting down and grants no locks.
    ShuttingDown {
        /// The time after which a retry may succeed at another instance.
        retry_after: Duration,
    },
    /// The request body did not arrive in time.
    ///
    /// The client sent no byte for [`body_idle_timeout`](crate::LockLayer::body_idle_timeout), or
    /// sent more slowly than [`min_body_rate`](crate::LockLayer::min_body_rate).
    BodyTimeout,
    /// The request body exceeds the limit.
    ///
    /// The limit is the `DefaultBodyLimit` of the route (2 MiB if none is set), and at most 64 MiB.
    BodyTooLarge,
    /// The request body does not fit into its part of the memory budget, or into that of its key.
    ///
    /// The budget is 64 MiB for one [`LockManager`](crate::LockManager) and its clones. The part of
    /// one body is half of what the others leave, or all of it if there is no other. The part of
    /// the waiters of one key is an eighth of the rest.
    BodyBufferFull {
        /// The time after which a retry may succeed.
        retry_after: Duration,
    },
    /// No key could be derived from the request.
    ///
    /// If an extractor or the key function returned a response, it was sent unchanged.
    InvalidKey {
        /// The status of the response.
        status: StatusCode,
        /// The error of [`from_fields`](crate::key::from_fields). `None` if the rejection has
        /// another source, for example a body that ended early.
        field: Option<FieldError>,
        /// The extractor of the key function that rejected the request, as a type name without
        /// modules: `Json<Claim>`. `None` if no extractor rejected it.
        extractor: Option<String>,
    },
    /// The client had disconnected before the lock was granted, according to a
    /// [`ClientConnection`](crate::middleware::ClientConnection). The response reaches no client.
    Disconnected,
    /// The [ticket](crate::Ticket) of the request does not hold its key: it has expired, was given
    /// up or revoked, or another request uses it.
    ///
    /// The client begins again without a ticket, unless a request of its own uses it, such as a
    /// renewal or a save: then the client waits for its response.
    TicketNotHeld,
    /// A newer request for the key has replaced this one. See
    /// [`LockLayer::newest_wins`](crate::LockLayer::newest_wins).
    Superseded {
        /// Whether the handler was started, and was dropped: its work may be partially done.
        /// Otherwise the request was waiting.
        has_started: bool,
    },
    /// The lock was lost while the handler ran, and the handler was dropped. Its work may be
    /// partially done.
    Lost,
    /// The handler ran longer than `max_hold` or a fixed lease, and was dropped. Its work may be
    /// partially done.
    HoldLimitReached,
    /// The route requires an idempotency key, and the request has none.
    ///
    /// The client creates a key, and sends it with each attempt of the request.
    IdempotencyKeyMissing {
        /// The field that has the key.
        field: FieldError,
    },
    /// The idempotency key of the request is invalid.
    ///
    /// The client repeats the request with a valid key.
    IdempotencyKeyInvalid {
        /// The field and the reason.
        field: FieldError,
    },
    /// The idempotency key belongs to another request: method, path or content differ.
    ///
    /// The client uses a new key for each new request.
    IdempotencyKeyReused,
    /// An earlier request with the same idempotency key is being processed.
    ///
    /// The client repeats the request with the same key, and then gets the response of the earlier
    /// one.
    InFlight {
        /// The time after which a retry may succeed.
        retry_after: Duration,
    },
    /// An earlier request with the same idempotency key was processed, but its response was not
    /// kept: it was too large or a stream, or the store has dropped it.
    ///
    /// The client does not repeat the request. It reads the result, for example at the `Location`.
    AnswerNotKept {
        /// The status of the response.
        original_status: StatusCode,
        /// The header `Location` of the response. The built-in response has the same.
        location: Option<HeaderValue>,
        /// The header `ETag` of the response. The built-in response has the same.
        etag: Option<HeaderValue>,
    },
    /// The request was processed, and the store has not confirmed the record of its response.
    /// Another attempt may run again. See
    /// [`ReplayLayer::require_record`](crate::ReplayLayer::require_record).
    ///
    /// The client repeats the request with the same key, and gets the response when the record is
    /// left.
    AnswerUnconfirmed {
        /// The time after which a retry may succeed.
        retry_after: Duration,
    },
    /// The scope of the request has as many answers as it may have. See
    /// [`ReplayLayer::scope_limits`](crate::ReplayLayer::scope_limits).
    ///
    /// The client repeats the request when its earlier answers have expired.
    TooManyAnswers,
}

/// Creates responses: with the function of the application, or the built-in ones.
#[derive(Clone, Default)]
pub(crate) struct OnReject(Option<Arc<MakeResponse>>);

type MakeResponse = dyn Fn(&Rejection) -> Response<RejectionBody> + Send + Sync;

// === impl Rejection ===

impl Rejection {
    pub(crate) fn from_lock_error(error: LockError, hold_estimate: &HoldEstimate, status: StatusCode) -> Self {
        let retry_after = |lease_left, ahead| retry_after(lease_left, hold_estimate.get(), ahead, fastrand::f64());
        match error {
            LockError::Busy { lease_left, ahead, .. } => Self::Busy { retry_after: retry_after(lease_left, ahead) },
            // A layer has its own rejection for it. A claim waits for its own section.
            LockError::WouldDeadlock => Self::Busy { retry_after: retry_after(Duration::MAX, 1) },
            LockError::TimedOut { waited, lease_left, ahead, .. } => {
                Self::TimedOut { waited, retry_after: retry_after(lease_left, ahead), status }
            }
            LockError::QueueFull { ahead, bound } => {
                let retry_after = retry_after(Duration::MAX, ahead);
                // The hold time of this route does not predict when the waiters of other keys are
                // served.
                let least = if bound == QueueBound::Key { Duration::ZERO } else { RETRY_AFTER_MIN };
                Self::QueueFull { bound, retry_after: retry_after.max(least) }
            }
            LockError::Superseded => Self::Superseded { has_started: false },
            LockError::ShuttingDown => Self::ShuttingDown { retry_after: retry_after(Duration::MAX, 1) },
            // A raw name that the store does not accept: a retry would fail, too.
            LockError::Store(source) if source.kind() == StoreErrorKind::InvalidKey => {
                Self::invalid_key(StatusCode::BAD_REQUEST)
            }
            LockError::Store(source) => {
                // The hold time of a route does not predict when a store recovers.
                let retry_after = retry_after(Duration::MAX, 1).max(RETRY_AFTER_MIN);
                Self::StoreUnavailable { retry_after, source: Arc::new(source) }
            }
        }
    }

    /// The rejection of a request whose key is held for an earlier request with the same
    /// idempotency key.
    pub(crate) fn into_in_flight(self) -> Self {
        match self {
            Self::Busy { retry_after }
            | Self::TimedOut { retry_after, .. }
            | Self::QueueFull { bound: QueueBound::Key, retry_after } => Self::InFlight { retry_after },
            other => other,
        }
    }

    /// The rejection of a request for one of this number of permits.
    pub(crate) fn into_no_permit(self, permits: u16) -> Self {
        match self {
            // So many holders end in the usual time of one.
            Self::Busy { retry_after } => Self::NoPermit { retry_after: retry_after / u32::from(permits.max(1)) },
            other => other,
        }
    }

    /// The rejection of a request whose earlier answer cannot be looked up. It does not run,
    /// because the earlier one may have run.
    pub(crate) fn answer_unavailable(source: StoreError) -> Self {
        Self::from_lock_error(LockError::Store(source), &HoldEstimate::default(), StatusCode::CONFLICT)
    }

    /// The rejection of a request without a key, of which no field and no extractor is the cause.
    pub(crate) fn invalid_key(status: StatusCode) -> Self {
        Self::InvalidKey { status, field: None, extractor: None }
    }

    /// The rejection of a request with two media types.
    pub(crate) fn duplicate_content_type() -> Self {
        let field =
            FieldError { location: FieldLocation::Header, name: "content-type", problem: FieldProblem::Duplicate };
        Self::InvalidKey { status: StatusCode::BAD_REQUEST, field: Some(field), extractor: None }
    }

    /// The hold time of a route does not predict when the memory of other bodies is free.
    pub(crate) fn body_buffer_full() -> Self {
        let retry_after =
            retry_after(Duration::MAX, HoldEstimate::default().get(), 1, fastrand::f64()).max(RETRY_AFTER_MIN);
        Self::BodyBufferFull { retry_after }
    }

    /// Returns the status of the response.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Busy { .. }
            | Self::WouldDeadlock { .. }
            | Self::TicketNotHeld
            | Self::Superseded { .. }
            | Self::InFlight { .. }
            | Self::AnswerNotKept { .. } => StatusCode::CONFLICT,
            Self::IdempotencyKeyMissing { .. } | Self::IdempotencyKeyInvalid { .. } => StatusCode::BAD_REQUEST,
            Self::IdempotencyKeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::TimedOut { status, .. } | Self::InvalidKey { status, .. } => *status,
            Self::QueueFull { .. }
            | Self::StoreUnavailable { .. }
            | Self::ShuttingDown { .. }
            | Self::BodyBufferFull { .. }
            | Self::Lost
            | Self::HoldLimitReached
            | Self::AnswerUnconfirmed { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::NoPermit { .. } | Self::TooManyAnswers => StatusCode::TOO_MANY_REQUESTS,
            Self::BodyTimeout | Self::Disconnected => StatusCode::REQUEST_TIMEOUT,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        }
    }

    /// Returns the fragment of the [problem type](crate::problem), for example `locked`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Busy { .. } => "locked",
            Self::NoPermit { .. } => "no-permit",
            Self::WouldDeadlock { .. } => "would-deadlock",
            Self::TimedOut { .. } => "timed-out",
            Self::QueueFull { .. } => "queue-full",
            Self::StoreUnavailable { .. } => "store-unavailable",
            Self::ShuttingDown { .. } => "shutting-down",
            Self::Disconnected => "disconnected",
            Self::BodyTimeout => "body-timeout",
            Self::BodyTooLarge => "body-too-large",
            Self::BodyBufferFull { .. } => "body-buffer-full",
            Self::InvalidKey { .. } => "invalid-key",
            Self::TicketNotHeld => "ticket-not-held",
            Self::Superseded { .. } => "superseded",
            Self::Lost => "lost",
            Self::HoldLimitReached => "hold-limit-reached",
            Self::IdempotencyKeyMissing { .. } => "idempotency-key-missing",
            Self::IdempotencyKeyInvalid { .. } => "idempotency-key-invalid",
            Self::IdempotencyKeyReused => "idempotency-key-reused",
            Self::InFlight { .. } => "in-flight",
            Self::AnswerNotKept { .. } => "answer-not-kept",
            Self::AnswerUnconfirmed { .. } => "answer-unconfirmed",
            Self::TooManyAnswers => "too-many-answers",
        }
    }

    /// Returns the outcome of the handler: `not-started`, `unknown` or `done`.
    ///
    /// After `not-started` the request can be repeated, unchanged if it has a
    /// [`retry_after`](Self::retry_after), otherwise corrected. After `unknown`, check its effects
    /// first, or repeat it with the same idempotency key if it has one. After `done`, do not repeat
    /// it: an earlier request with the same idempotency key was processed.
    #[must_use]
    pub fn outcome(&self) -> &'static str {
        match self {
            Self::Lost
            | Self::HoldLimitReached
            | Self::Superseded { has_started: true }
            | Self::AnswerUnconfirmed { .. } => "unknown",
            Self::AnswerNotKept { .. } => "done",
            _ => "not-started",
        }
    }

    /// Returns the time after which a retry may succeed. `None` if an unchanged request should not
    /// be repeated.
    ///
    /// The estimate is the usual hold time of the route for each request ahead. It is at most the
    /// remaining lease of the holder, and at most 5 seconds. A jitter varies it by up to one fifth
    /// in both directions, so that clients do not retry together.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after }
            | Self::NoPermit { retry_after }
            | Self::TimedOut { retry_after, .. }
            | Self::QueueFull { retry_after, .. }
            | Self::StoreUnavailable { retry_after, .. }
            | Self::ShuttingDown { retry_after }
            | Self::BodyBufferFull { retry_after }
            | Self::InFlight { retry_after }
            | Self::AnswerUnconfirmed { retry_after } => Some(*retry_after),
            _ => None,
        }
    }

    /// Creates the built-in response.
    ///
    /// It has `Cache-Control: no-store`. With a [`retry_after`](Self::retry_after) it also has the
    /// header `Retry-After`, in whole seconds from 1 to 5, and the more precise member
    /// `retry_after_ms` in the body. An [`AnswerNotKept`](Self::AnswerNotKept) has the member
    /// `original_status`.
    #[must_use]
    pub fn to_response(&self) -> Response<RejectionBody> {
        self.response_with(HeaderMap::new(), Extensions::new())
    }

    /// Whether the idempotency key of the request is the reason.
    pub(crate) fn is_about_idempotency(&self) -> bool {
        self.replay_result().is_some() || matches!(self, Self::AnswerUnconfirmed { .. })
    }

    /// The result of the request for a layer that keeps answers. `None`: the metrics of locks count
    /// the request, or its handler has run.
    pub(crate) fn replay_result(&self) -> Option<&'static str> {
        match self {
            Self::IdempotencyKeyMissing { .. } => Some("missing"),
            Self::IdempotencyKeyInvalid { .. } => Some("invalid"),
            Self::IdempotencyKeyReused => Some("mismatch"),
            Self::InFlight { .. } => Some("in_flight"),
            Self::AnswerNotKept { .. } => Some("not_kept"),
            Self::TooManyAnswers => Some("too_many"),
            _ => None,
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Busy { .. } => "Resource is locked",
            Self::NoPermit { .. } => "Too many requests use this resource",
            Self::WouldDeadlock { .. } => "Request would wait for itself",
            Self::TimedOut { .. } => "Timed out waiting for the lock",
            Self::QueueFull { bound: QueueBound::Key, .. } => "Too many requests are waiting for this resource",
            Self::QueueFull { bound: QueueBound::Process, .. } => "Too many requests are waiting in this instance",
            Self::QueueFull { bound: QueueBound::Store, .. } => "Too many instances are waiting for this resource",
            Self::StoreUnavailable { .. } => "Lock store is unavailable",
            Self::ShuttingDown { .. } => "Instance is shutting down",
            Self::Disconnected => "Client disconnected",
            Self::BodyTimeout => "Request body timed out",
            Self::BodyTooLarge => "Request body is too large",
            Self::BodyBufferFull { .. } => "Too many request bodies are buffered",
            Self::InvalidKey { .. } => "Invalid lock key",
            Self::TicketNotHeld => "Ticket does not hold the lock",
            Self::Superseded { .. } => "Replaced by a newer request",
            Self::Lost => "Lock was lost",
            Self::HoldLimitReached => "Hold limit reached",
            Self::IdempotencyKeyMissing { .. } => "Idempotency key is missing",
            Self::IdempotencyKeyInvalid { .. } => "Invalid idempotency key",
            Self::IdempotencyKeyReused => "Idempotency key belongs to another request",
            Self::InFlight { .. } => "Request is being processed",
            Self::AnswerNotKept { .. } => "Response was not kept",
            Self::AnswerUnconfirmed { .. } => "Response was not recorded in time",
            Self::TooManyAnswers => "Too many responses are kept",
        }
    }

    /// The first part of the detail: why the request was rejected.
    fn cause(&self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            Self::Busy { .. } => "Another request holds the lock of this resource.",
            Self::NoPermit { .. } => "As many requests as may use this resource at a time are under way.",
            Self::WouldDeadlock { held_by, asked_by } => {
                return Cow::Owned(format!(
                    "The request holds this resource with others at `{held_by}`, and asks for it alone at `{asked_by}`."
                ));
            }
            Self::TimedOut { .. } => "Other requests held the lock of this resource during the whole wait.",
            Self::QueueFull { bound: QueueBound::Key, .. } => "The queue for this resource is full.",
            Self::QueueFull { bound: QueueBound::Process, .. } => "Too many requests are waiting in this instance.",
            Self::QueueFull { bound: QueueBound::Store, .. } => "The queue of instances for this resource is full.",
            Self::StoreUnavailable { .. } => "The lock store is not available.",
            Self::ShuttingDown { .. } => "This instance accepts no more requests.",
            Self::Disconnected => "The connection was closed when the lock was granted.",
            Self::BodyTimeout => "The request body did not arrive in time.",
            Self::BodyTooLarge => "The request body exceeds the limit.",
            Self::BodyBufferFull { .. } => "The memory for request bodies has no space for this one.",
            Self::InvalidKey { status, .. } if *status == StatusCode::NOT_FOUND => {
                "No route matches this URL, so its lock key cannot be derived."
            }
            Self::InvalidKey { field: Some(error), .. } => return Cow::Owned(format!("Invalid lock key: {error}.")),
            Self::InvalidKey { status, extractor: None, .. } if *status == StatusCode::UNPROCESSABLE_ENTITY => {
                "Invalid lock keys: the request names no resource, or more than 64 different ones."
            }
            Self::InvalidKey { status, .. } if *status == StatusCode::INTERNAL_SERVER_ERROR => {
                "The service is not set up for this request."
            }
            Self::InvalidKey { .. } => {
                "Invalid lock key: the request body could not be read to its end, the client of the request is not known, or the store does not accept the key."
            }
            Self::TicketNotHeld => "The ticket has expired, was given up, or is in use by another request.",
            Self::Superseded { .. } => "A newer request for this resource has replaced this one.",
            Self::Lost => "The lock was lost while the request was being processed.",
            Self::HoldLimitReached => "The request was processed for longer than its lock may be held.",
            Self::IdempotencyKeyMissing { field } => {
                return Cow::Owned(format!("An idempotency key is required: {field}."));
            }
            Self::IdempotencyKeyInvalid { field } => return Cow::Owned(format!("Invalid idempotency key: {field}.")),
            Self::IdempotencyKeyReused => {
                "An earlier request with this idempotency key had another method, path or content."
            }
            Self::InFlight { .. } => {
                "An earlier request with this idempotency key is being processed, or was interrupted."
            }
            Self::AnswerNotKept { .. } => {
                "An earlier request with this idempotency key was processed, but its response was not kept."
            }
            Self::AnswerUnconfirmed { .. } => {
                "The request was processed, but the store has not confirmed the record of its response."
            }
            Self::TooManyAnswers => "As many responses as one client may have are kept for its retries.",
        })
    }

    /// The second part of the detail: what the client does.
    fn advice(&self) -> &'static str {
        match self {
            Self::Busy { .. }
            | Self::NoPermit { .. }
            | Self::TimedOut { .. }
            | Self::QueueFull { .. }
            | Self::StoreUnavailable { .. }
            | Self::BodyTimeout
            | Self::BodyBufferFull { .. } => "The request was not processed and can be retried.",
            Self::ShuttingDown { .. } => "The request was not processed and can be retried at another instance.",
            Self::Lost | Self::HoldLimitReached => {
                "It may have been partially processed; check its effects before retrying."
            }
            Self::TicketNotHeld => {
                "The request was not processed; repeat it after a request of your own with the ticket, or begin again without the ticket."
            }
            Self::Superseded { has_started: true } => "It may have been partially processed.",
            Self::IdempotencyKeyReused => "The request was not processed; a new request needs a new key.",
            Self::InFlight { .. } => "This one was not processed and can be retried with the same key.",
            Self::AnswerNotKept { .. } => "This one was not processed; do not repeat it.",
            Self::AnswerUnconfirmed { .. } => "Retry it with the same key.",
            Self::TooManyAnswers => "The request was not processed; repeat it when they have expired.",
            Self::Disconnected
            | Self::Superseded { has_started: false }
            | Self::WouldDeadlock { .. }
            | Self::BodyTooLarge
            | Self::InvalidKey { .. }
            | Self::IdempotencyKeyMissing { .. }
            | Self::IdempotencyKeyInvalid { .. } => "The request was not processed.",
        }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title())
    }
}

// By hand, as for `StoreError`: the source is the error, and not the `Arc` around it.
impl Error for Rejection {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::StoreUnavailable { source, .. } => Some(&**source),
            Self::InvalidKey { field: Some(error), .. } => Some(error),
            Self::IdempotencyKeyMissing { field } | Self::IdempotencyKeyInvalid { field } => Some(field),
            _ => None,
        }
    }
}

#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl axum::response::IntoResponse for Rejection {
    /// The built-in response, with the typed rejection in its extensions.
    fn into_response(self) -> axum::response::Response {
        OnReject::default().respond(self).map(axum::body::Body::new)
    }
}

// === impl OnReject ===

impl OnReject {
    pub(crate) fn new<F, B>(respond: F) -> Self
    where
        F: Fn(&Rejection) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self(Some(Arc::new(move |rejection| respond(rejection).map(RejectionBody::new))))
    }

    /// Returns this one, or the outer one if this has no function.
    pub(crate) fn or<'a>(&'a self, outer: Option<&'a Self>) -> &'a Self {
        match (&self.0, outer) {
            (None, Some(outer)) => outer,
            _ => self,
        }
    }

    /// Creates the response, with the typed rejection in its extensions.
    pub(crate) fn respond(&self, rejection: Rejection) -> Response<RejectionBody> {
        self.respond_with(rejection, HeaderMap::new(), Extensions::new())
    }

    /// The same in the memory of the head of the request: a client that is rejected often should
    /// cost little.
    pub(crate) fn respond_to(&self, head: &mut Parts, rejection: Rejection) -> Response<RejectionBody> {
        let (mut headers, mut extensions) = (mem::take(&mut head.headers), mem::take(&mut head.extensions));
        headers.clear();
        extensions.clear();
        self.respond_with(rejection, headers, extensions)
    }

    fn respond_with(
        &self,
        rejection: Rejection,
        headers: HeaderMap,
        extensions: Extensions,
    ) -> Response<RejectionBody> {
        let mut response = match &self.0 {
            Some(respond) => respond(&rejection),
            None => rejection.response_with(headers, extensions),
        };
        response.extensions_mut().insert(rejection);
        response
    }
}

impl fmt::Debug for OnReject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "OnReject(custom)" } else { "OnReject(problem details)" })
    }
}

#[cfg(test)]
mod tests {
    use super::{problem::TYPE_BASE, *};

    /// One of each variant, in the order of `code`.
    fn all() -> Vec<Rejection> {
        let retry_after = Duration::from_secs(1);
        let status = StatusCode::CONFLICT;
        let source = || Arc::new(StoreError::new("shelf", "acquire", StoreErrorKind::Timeout));
        let field = FieldError { location: FieldLocation::Header, name: "key", problem: FieldProblem::Missing };
        vec![
            Rejection::Busy { retry_after },
            Rejection::NoPermit { retry_after },
            Rejection::WouldDeadlock { held_by: "a".to_owned(), asked_by: "b".to_owned() },
            Rejection::TimedOut { waited: retry_after, retry_after, status },
            Rejection::QueueFull { bound: QueueBound::Key, retry_after },
            Rejection::StoreUnavailable { retry_after, source: source() },
            Rejection::ShuttingDown { retry_after },
            Rejection::Disconnected,
            Rejection::BodyTimeout,
            Rejection::BodyTooLarge,
            Rejection::BodyBufferFull { retry_after },
            Rejection::InvalidKey { status: StatusCode::BAD_REQUEST, field: None, extractor: None },
            Rejection::TicketNotHeld,
            Rejection::Superseded { has_started: true },
            Rejection::Lost,
            Rejection::HoldLimitReached,
            Rejection::IdempotencyKeyMissing { field },
            Rejection::IdempotencyKeyInvalid { field },
            Rejection::IdempotencyKeyReused,
            Rejection::InFlight { retry_after },
            Rejection::AnswerNotKept { original_status: status, location: None, etag: None },
            Rejection::AnswerUnconfirmed { retry_after },
            Rejection::TooManyAnswers,
        ]
    }

    /// The type is the address of the section.
    #[test]
    fn each_problem_type_has_a_section_on_its_page() {
        let manifest = include_str!("../../Cargo.toml");
        let documentation = TYPE_BASE.strip_suffix("/latest/tower_lock/problem/#").expect("the page");
        assert!(manifest.contains(&format!("\ndocumentation = \"{documentation}\"\n")), "{TYPE_BASE}");
        let (_, codes) = include_str!("mod.rs").split_once("fn code(&self)").expect("the codes");
        let (codes, _) = codes.split_once("    }\n\n").expect("their end");
        let codes: Vec<_> = codes.split('"').skip(1).step_by(2).collect();
        let page = include_str!("../../docs/problem-types.md");
        let sections: Vec<_> = page.split("\n## ").skip(1).filter_map(|section| section.split_once("\n\n")).collect();
        assert_eq!(sections.iter().map(|section| section.0).collect::<Vec<_>>(), codes);
        let rejections = all();
        assert_eq!(rejections.iter().map(Rejection::code).collect::<Vec<_>>(), codes);
        for (rejection, (code, text)) in rejections.iter().zip(sections) {
            assert!(text.starts_with(&format!("Status {}", rejection.status().as_str())), "{code}: {text}");
            assert!(text.contains(&format!("outcome `{}`", rejection.outcome())), "{code}: {text}");
            assert_eq!(text.contains("after `Retry-After`"), rejection.retry_after().is_some(), "{code}: {text}");
        }
    }

    #[test]
    fn source_of_an_unavailable_store_is_its_error() {
        let source = Arc::new(StoreError::new("shelf", "acquire", StoreErrorKind::Timeout));
        let rejection = Rejection::StoreUnavailable { retry_after: Duration::ZERO, source };
        let source = rejection.source().and_then(<dyn Error>::downcast_ref::<StoreError>);
        assert!(source.is_some_and(|error| error.kind() == StoreErrorKind::Timeout), "{source:?}");
    }

    async fn problem(rejection: &Rejection) -> (Response<()>, serde_json::Value) {
        use http_body_util::BodyExt;

        let (head, body) = rejection.to_response().into_parts();
        let body = body.collect().await.expect("complete").to_bytes();
        (Response::from_parts(head, ()), serde_json::from_slice(&body).expect("JSON"))
    }

    #[tokio::test]
    async fn rejections_because_of_an_idempotency_key_say_what_to_do() {
        let field = |problem| FieldError { location: FieldLocation::Header, name: "idempotency-key", problem };
        let missing = Rejection::IdempotencyKeyMissing { field: field(FieldProblem::Missing) };
        let invalid = Rejection::IdempotencyKeyInvalid { field: field(FieldProblem::TooLong) };
        let in_flight = Rejection::InFlight { retry_after: Duration::from_millis(1500) };
        for (rejection, status, code, detail) in [
            (missing, 400, "idempotency-key-missing", "header `idempotency-key` is missing."),
            (invalid, 400, "idempotency-key-invalid", "header `idempotency-key` has more than 255 characters."),
            (Rejection::IdempotencyKeyReused, 422, "idempotency-key-reused", "a new request needs a new key."),
            (in_flight, 409, "in-flight", "can be retried with the same key."),
        ] {
            let (response, problem) = problem(&rejection).await;
            assert_eq!((response.status().as_u16(), &problem["status"]), (status, &status.into()), "{code}");
            assert_eq!(problem["type"], format!("{TYPE_BASE}{code}"));
            assert!(problem["detail"].as_str().is_some_and(|text| text.contains(detail)), "{problem}");
            assert_eq!(problem["outcome"], "not-started", "{code}");
            let is_in_flight = code == "in-flight";
            assert_eq!(response.headers().get("retry-after").is_some_and(|value| value == "2"), is_in_flight, "{code}");
            assert_eq!(problem.get("retry_after_ms").is_some_and(|ms| *ms == 1500), is_in_flight, "{code}");
            assert!(problem.get("original_status").is_none(), "{code}");
            assert!(rejection.is_about_idempotency(), "{code}");
        }
    }

    #[tokio::test]
    async fn answer_that_was_not_kept_is_a_409_that_is_done() {
        let rejection = Rejection::AnswerNotKept {
            original_status: StatusCode::CREATED,
            location: Some(HeaderValue::from_static("/rewards/7")),
            etag: Some(HeaderValue::from_static("\"7\"")),
        };
        let (response, problem) = problem(&rejection).await;
        assert_eq!(response.status(), StatusCode::CONFLICT);
        assert_eq!(
            (&problem["type"], &problem["outcome"]),
            (&format!("{TYPE_BASE}answer-not-kept").into(), &"done".into())
        );
        assert_eq!(problem["original_status"], 201);
        assert_eq!(
            (&response.headers()["location"], &response.headers()["etag"]),
            (&"/rewards/7".parse().expect("a value"), &"\"7\"".parse().expect("a value"))
        );
        assert!(rejection.retry_after().is_none() && rejection.is_about_idempotency());
    }

    /// Guarantee: G15.
    #[test]
    fn full_process_does_not_use_the_hold_estimate_of_a_route() {
        let usual = HoldEstimate::default();
        usual.record(Duration::from_millis(10));
        for (bound, least) in [(QueueBound::Key, 0), (QueueBound::Process, 1_000), (QueueBound::Store, 1_000)] {
            let error = LockError::QueueFull { ahead: 1, bound };
            let rejection = Rejection::from_lock_error(error, &usual, StatusCode::CONFLICT);
            let after = rejection.retry_after().expect("it can be repeated");
            assert!(after >= Duration::from_millis(least), "{bound:?}: {after:?}");
            assert!(matches!(rejection, Rejection::QueueFull { bound: said, .. } if said == bound));
            let same = rejection.cause().contains("this resource");
            assert_eq!(same, bound != QueueBound::Process, "{}", rejection.cause());
        }
    }

    #[test]
    fn store_error_keeps_its_source() {
        use crate::store::StoreErrorKind;

        let broken = StoreError::new("shelf", "acquire", StoreErrorKind::Unavailable)
            .with_source(std::io::Error::other("no shelf"));
        let rejection =
            Rejection::from_lock_error(LockError::Store(broken), &HoldEstimate::default(), StatusCode::CONFLICT);
        let texts: Vec<_> =
            std::iter::successors(Some(&rejection as &dyn Error), |&e| e.source()).map(ToString::to_string).collect();
        assert_eq!(texts.last().map(String::as_str), Some("no shelf"), "{texts:?}");
    }
}
