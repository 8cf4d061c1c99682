//! The one place where a failure becomes a status.

mod problem;
mod body;
pub(crate) mod field_error;
pub(crate) mod retry_after;

use std::{borrow::Cow, error::Error, fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::Body;
use tower::BoxError;

pub use self::body::RejectionBody;
use self::{
    field_error::FieldError,
    problem::Problem,
    retry_after::{UsualHold, retry_after},
};
use crate::{
    error::{LockError, QueueBound},
    limits::RETRY_AFTER_MIN,
    policy::TimeoutStatus,
    store::{StoreError, StoreErrorKind},
};

/// Why a request was turned away. But for `Lost` and `MaxHold`, its handler was not started.
///
/// The built-in answer is `application/problem+json` (RFC 9457); [`LockLayer::on_reject`](crate::LockLayer::on_reject)
/// puts another one in its place. Either way this value is in the extensions of the response, for layers outside.
///
/// | variant | status | `type` |
/// |---|---|---|
/// | `Busy` | 409 | `urn:tower-lock:held` |
/// | `TimedOut` | 409, or as [`wait_timeout_status`](crate::LockLayer::wait_timeout_status) says | `urn:tower-lock:timed-out` |
/// | `QueueFull` | 503 | `urn:tower-lock:line-full` |
/// | `StoreUnavailable` | 503 | `urn:tower-lock:store-unavailable` |
/// | `ShuttingDown` | 503 | `urn:tower-lock:shutting-down` |
/// | `BodyTimeout` | 408 | `urn:tower-lock:body-timeout` |
/// | `BodyTooLarge` | 413 | `urn:tower-lock:body-too-large` |
/// | `BodyBufferFull` | 503 | `urn:tower-lock:bodies-full` |
/// | `InvalidKey` | 400 or 422, or the extractor's own | `urn:tower-lock:bad-key` |
/// | `Disconnected` | 408 | `urn:tower-lock:disconnected` |
/// | `Lost` | 503 | `urn:tower-lock:lost` |
/// | `MaxHold` | 503 | `urn:tower-lock:max-hold` |
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// Somebody else has the key, and this route does not wait.
    Busy {
        /// When it may be worth another try.
        retry_after: Duration,
    },
    /// The wait is over, and it never was this request's turn.
    TimedOut {
        /// How long it took.
        waited: Duration,
        /// When it may be worth another try.
        retry_after: Duration,
        /// The status that the route gives to this.
        status: TimeoutStatus,
    },
    /// So many wait that one more would only wait in vain.
    QueueFull {
        /// Which bound was reached.
        bound: QueueBound,
        /// When it may be worth another try.
        retry_after: Duration,
    },
    /// The store could not say whether the key is free.
    StoreUnavailable {
        /// When it may be worth another try.
        retry_after: Duration,
        /// What the store said.
        source: Arc<StoreError>,
    },
    /// This instance takes no lock any more: it is being shut down.
    ShuttingDown {
        /// When it may be worth another try, at another instance.
        retry_after: Duration,
    },
    /// The body did not come in time: no byte for [`body_idle_timeout`](crate::LockLayer::body_idle_timeout), fewer than
    /// [`min_body_rate`](crate::LockLayer::min_body_rate), or the bodies of others needed its
    /// room, and of those larger than the average it had been idle for longest.
    BodyTimeout,
    /// The body is longer than is read before a lock is taken: the route's `DefaultBodyLimit` (2 MB if nothing is set), at most 64 MiB.
    BodyTooLarge,
    /// The complete bodies of other requests that wait take up the room that there is for them: 64
    /// MiB for one [`LockManager`](crate::LockManager) and its clones. Or those that wait for the same key take
    /// up the part of it that one key has: an eighth of what is left.
    BodyBufferFull {
        /// When it may be worth another try.
        retry_after: Duration,
    },
    /// No key could be made of the request. Where an extractor or the key function said so, its own answer was sent as it is.
    InvalidKey {
        /// The status that was sent.
        status: StatusCode,
        /// What [`from_fields`](crate::key::from_fields) found wrong. `None`: the body broke off, or somebody else said no.
        field: Option<FieldError>,
        /// The extractor of the key function that rejected the request, by the name of its type without its modules: `Json<Claim>`. `None`: none did.
        extractor: Option<String>,
    },
    /// Its client had closed the connection when the lock was granted, as a [`ClientConnection`](crate::middleware::ClientConnection) says. Nobody hears of it.
    Disconnected,
    /// The lock was lost while the handler ran; the handler was dropped where it stood. What it did is not known.
    Lost,
    /// The handler ran for longer than the lock may be held, and was dropped where it stood. What it did is not known.
    MaxHoldExceeded,
}

/// Makes the answer: what the user said, or the built-in one.
#[derive(Clone, Default)]
pub(crate) struct OnReject(Option<Arc<MakeAnswer>>);

type MakeAnswer = dyn Fn(&Rejection) -> Response<RejectionBody> + Send + Sync;

// === impl Rejection ===

impl Rejection {
    pub(crate) fn of(error: LockError, usual_hold: &UsualHold, status: TimeoutStatus) -> Self {
        let retry_after = |lease_left, ahead| retry_after(lease_left, usual_hold.get(), ahead, fastrand::f64());
        match error {
            LockError::Busy { lease_left, ahead } => Self::Busy { retry_after: retry_after(lease_left, ahead) },
            // A request always has an owner, so that no layer sees this.
            LockError::WouldDeadlock => Self::Busy { retry_after: retry_after(Duration::MAX, 1) },
            LockError::TimedOut { waited, lease_left, ahead } => {
                Self::TimedOut { waited, retry_after: retry_after(lease_left, ahead), status }
            }
            LockError::QueueFull { ahead, bound } => {
                let retry_after = retry_after(Duration::MAX, ahead);
                // How long this route holds its locks says nothing of when the waiters of others have gone.
                let least = if bound == QueueBound::Key { Duration::ZERO } else { RETRY_AFTER_MIN };
                Self::QueueFull { bound, retry_after: retry_after.max(least) }
            }
            LockError::ShuttingDown => Self::ShuttingDown { retry_after: retry_after(Duration::MAX, 1) },
            // A raw name that this store does not take: repeated as it is, it would be refused again.
            LockError::Store(source) if source.kind() == StoreErrorKind::InvalidKey => {
                Self::InvalidKey { status: StatusCode::BAD_REQUEST, field: None, extractor: None }
            }
            LockError::Store(source) => {
                // How long a route holds its locks says nothing of when a store is back.
                let retry_after = retry_after(Duration::MAX, 1).max(RETRY_AFTER_MIN);
                Self::StoreUnavailable { retry_after, source: Arc::new(source) }
            }
        }
    }

    /// How long a route holds its locks says little of when the bodies of others have gone.
    pub(crate) fn bodies_full() -> Self {
        let retry_after =
            retry_after(Duration::MAX, UsualHold::default().get(), 1, fastrand::f64()).max(RETRY_AFTER_MIN);
        Self::BodyBufferFull { retry_after }
    }

    /// The status of the answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Busy { .. } => StatusCode::CONFLICT,
            Self::TimedOut { status, .. } => (*status).into(),
            Self::QueueFull { .. }
            | Self::StoreUnavailable { .. }
            | Self::ShuttingDown { .. }
            | Self::BodyBufferFull { .. }
            | Self::Lost
            | Self::MaxHoldExceeded => StatusCode::SERVICE_UNAVAILABLE,
            Self::BodyTimeout | Self::Disconnected => StatusCode::REQUEST_TIMEOUT,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::InvalidKey { status, .. } => *status,
        }
    }

    /// The last word of the problem's `type`: `held`, `timed-out`, `line-full`, `store-unavailable`, `shutting-down`, `disconnected`, `body-timeout`,
    /// `body-too-large`, `bodies-full`, `bad-key`, `lost`, `max-hold`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Busy { .. } => "held",
            Self::TimedOut { .. } => "timed-out",
            Self::QueueFull { .. } => "line-full",
            Self::StoreUnavailable { .. } => "store-unavailable",
            Self::ShuttingDown { .. } => "shutting-down",
            Self::Disconnected => "disconnected",
            Self::BodyTimeout => "body-timeout",
            Self::BodyTooLarge => "body-too-large",
            Self::BodyBufferFull { .. } => "bodies-full",
            Self::InvalidKey { .. } => "bad-key",
            Self::Lost => "lost",
            Self::MaxHoldExceeded => "max-hold",
        }
    }

    /// What became of the handler: `not-started`, and the request can be repeated (as it is where there is a [`retry_after`](Self::retry_after), else changed); or, where the lock was lost,
    /// `unknown`, and it should not be before somebody has looked.
    #[must_use]
    pub fn outcome(&self) -> &'static str {
        if matches!(self, Self::Lost | Self::MaxHoldExceeded) { "unknown" } else { "not-started" }
    }

    /// When another try may be worth it: the smaller of the holder's lease and this route's usual hold for each one
    /// ahead, spread a little, at most five seconds. `None`: never, as the request is.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after }
            | Self::TimedOut { retry_after, .. }
            | Self::QueueFull { retry_after, .. }
            | Self::StoreUnavailable { retry_after, .. }
            | Self::ShuttingDown { retry_after }
            | Self::BodyBufferFull { retry_after } => Some(*retry_after),
            Self::Disconnected
            | Self::BodyTimeout
            | Self::BodyTooLarge
            | Self::InvalidKey { .. }
            | Self::Lost
            | Self::MaxHoldExceeded => None,
        }
    }

    /// The built-in answer.
    ///
    /// With `Cache-Control: no-store`, and with `Retry-After` in whole seconds, from 1 to 5, where another try may be
    /// worth it; `retry_after_ms` in the body is finer.
    #[must_use]
    pub fn to_response(&self) -> Response<RejectionBody> {
        Problem {
            r#type: format!("urn:tower-lock:{}", self.code()),
            title: self.title(),
            status: self.status(),
            detail: self.detail(),
            outcome: self.outcome(),
            retry_after: self.retry_after(),
        }
        .into_response()
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Busy { .. } => "Somebody else is changing this",
            Self::TimedOut { .. } => "Waited in vain for somebody else to finish",
            Self::QueueFull { bound: QueueBound::Key, .. } => "Too many requests wait for this subject",
            Self::QueueFull { bound: QueueBound::Process, .. } => "Too many requests wait in this instance",
            Self::QueueFull { bound: QueueBound::Store, .. } => "Too many instances wait for this subject",
            Self::StoreUnavailable { .. } => "Locks cannot be taken now",
            Self::ShuttingDown { .. } => "This instance is being shut down",
            Self::Disconnected => "The client has gone",
            Self::BodyTimeout => "The body came too slowly",
            Self::BodyTooLarge => "The body is too large",
            Self::BodyBufferFull { .. } => "Too many bodies are kept for requests that wait",
            Self::InvalidKey { .. } => "The request cannot be read",
            Self::Lost => "The work was broken off",
            Self::MaxHoldExceeded => "The work took too long and was broken off",
        }
    }

    fn detail(&self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            Self::InvalidKey { status, .. } if *status == StatusCode::NOT_FOUND => {
                "No route matches this URL, so no key could be derived for its lock. Nothing was done."
            }
            Self::InvalidKey { field: Some(error), .. } => {
                return Cow::Owned(format!(
                    "No key could be derived for the lock of this request: {error}. Nothing was done."
                ));
            }
            Self::Busy { .. } => {
                "Another request works on the same subject. Nothing was done for this one; it can be repeated."
            }
            Self::TimedOut { .. } => {
                "Other requests worked on the same subject all the time. Nothing was done for this one; it can be repeated."
            }
            Self::QueueFull { bound: QueueBound::Key, .. } => {
                "The queue of requests for the same subject is full. Nothing was done; the request can be repeated."
            }
            Self::QueueFull { bound: QueueBound::Process, .. } => {
                "The queue of this instance, for all subjects, is full. Nothing was done; the request can be repeated."
            }
            Self::QueueFull { bound: QueueBound::Store, .. } => {
                "The queue of instances for the same subject is full. Nothing was done; the request can be repeated."
            }
            Self::StoreUnavailable { .. } => {
                "The place where locks are kept gave no answer. Nothing was done; the request can be repeated."
            }
            Self::ShuttingDown { .. } => {
                "No work is begun here any more. Nothing was done; the request can be repeated, and will reach another instance."
            }
            Self::Disconnected => "The connection was closed when the request had its turn. Nothing was done.",
            Self::BodyTimeout => {
                "The body did not arrive in time. Nothing was done; the request can be repeated, with its whole body at once."
            }
            Self::BodyTooLarge => "The body is longer than is read here. Nothing was done.",
            Self::BodyBufferFull { .. } => {
                "No room is left for the body while the request would wait. Nothing was done; the request can be repeated."
            }
            Self::InvalidKey { .. } => {
                "No key could be derived for the lock of this request: its body could not be read to its end. Nothing was done."
            }
            Self::Lost => {
                "The right to work on this alone was lost while the request ran. A part of its work may be done: look before it is repeated."
            }
            Self::MaxHoldExceeded => {
                "The request ran for longer than anybody may work on this alone. A part of its work may be done: look before it is repeated."
            }
        })
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title())
    }
}

impl Error for Rejection {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::StoreUnavailable { source, .. } => Some(source),
            Self::InvalidKey { field: Some(error), .. } => Some(error),
            _ => None,
        }
    }
}

#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl axum::response::IntoResponse for Rejection {
    /// The built-in answer, with the typed rejection in its extensions.
    fn into_response(self) -> axum::response::Response {
        OnReject::default().answer(self).map(axum::body::Body::new)
    }
}

impl From<TimeoutStatus> for StatusCode {
    fn from(status: TimeoutStatus) -> Self {
        match status {
            TimeoutStatus::Conflict => Self::CONFLICT,
            TimeoutStatus::Locked => Self::LOCKED,
            TimeoutStatus::TooManyRequests => Self::TOO_MANY_REQUESTS,
            TimeoutStatus::ServiceUnavailable => Self::SERVICE_UNAVAILABLE,
        }
    }
}

// === impl OnReject ===

impl OnReject {
    pub(crate) fn new<F, B>(answer: F) -> Self
    where
        F: Fn(&Rejection) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self(Some(Arc::new(move |rejection| answer(rejection).map(RejectionBody::new))))
    }

    /// This, or what was said further out.
    pub(crate) fn or<'a>(&'a self, outer: Option<&'a Self>) -> &'a Self {
        match (&self.0, outer) {
            (None, Some(outer)) => outer,
            _ => self,
        }
    }

    /// The answer, with the typed rejection in its extensions.
    pub(crate) fn answer(&self, rejection: Rejection) -> Response<RejectionBody> {
        let mut response = match &self.0 {
            Some(answer) => answer(&rejection),
            None => rejection.to_response(),
        };
        response.extensions_mut().insert(rejection);
        response
    }
}

impl fmt::Debug for OnReject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "OnReject(own)" } else { "OnReject(problem details)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_process_does_not_use_the_hold_estimate_of_a_route() {
        let usual = UsualHold::default();
        usual.add(Duration::from_millis(10));
        for (bound, least) in [(QueueBound::Key, 0), (QueueBound::Process, 1_000), (QueueBound::Store, 1_000)] {
            let error = LockError::QueueFull { ahead: 1, bound };
            let rejection = Rejection::of(error, &usual, TimeoutStatus::default());
            let after = rejection.retry_after().expect("it can be repeated");
            assert!(after >= Duration::from_millis(least), "{bound:?}: {after:?}");
            assert!(matches!(rejection, Rejection::QueueFull { bound: said, .. } if said == bound));
            let same = rejection.detail().contains("same subject");
            assert_eq!(same, bound != QueueBound::Process, "{}", rejection.detail());
        }
    }

    #[test]
    fn store_error_keeps_its_source() {
        use crate::store::StoreErrorKind;

        let broken = StoreError::new("shelf", "acquire", StoreErrorKind::Unavailable)
            .with_source(std::io::Error::other("no shelf"));
        let rejection = Rejection::of(LockError::Store(broken), &UsualHold::default(), TimeoutStatus::default());
        let texts: Vec<_> =
            std::iter::successors(Some(&rejection as &dyn Error), |&e| e.source()).map(ToString::to_string).collect();
        assert_eq!(texts.last().map(String::as_str), Some("no shelf"), "{texts:?}");
    }
}
