//! The answer of a request, in the transaction of its handler.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::Response;
use http_body::Body;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tower::BoxError;

use super::{answer::Answer, fingerprint::Fingerprint, keep::Keep, recorder::AnswerSettings};
use crate::{fencing::FencingToken, lock::HeldLock, lock_key::LockKey};

/// The idempotency key of a request that runs for the first time, for a handler that stores its
/// answer in its own transaction.
///
/// The layer leaves a record when the response has ended. If the process is killed after the commit
/// of the handler and before that, a retry runs the handler again. A handler that writes its answer
/// in the transaction of its work, and a [`ReplayLayer::find_answer`] that reads it, close this
/// window.
///
/// The value is in the extensions of the request. Axum handlers extract it.
///
/// ```
/// # use axum::{http::StatusCode, response::{IntoResponse, Response}};
/// # use tower_lock::{AnswerError, Once};
/// # struct Transaction;
/// # impl Transaction {
/// #     async fn store(&mut self, key: &str, fence: i64, answer: &[u8]) {}
/// #     async fn commit(self) {}
/// # }
/// # async fn begin() -> Transaction { Transaction }
/// async fn claim(once: Once) -> Result<Response, AnswerError> {
///     let mut transaction = begin().await;
///     // .. write, after a check of the fencing token
///     let answer = once.answer((StatusCode::CREATED, "claimed").into_response()).await?;
///     let fence = once.fencing_token().as_i64();
///     transaction.store(once.key().as_str(), fence, answer.as_bytes()).await;
///     transaction.commit().await;
///     Ok(answer.into_response())
/// }
/// ```
///
/// [`ReplayLayer::find_answer`]: crate::ReplayLayer::find_answer
#[derive(Clone, Debug)]
pub struct Once {
    pub(super) lock: HeldLock,
    pub(super) fingerprint: Fingerprint,
    pub(super) settings: Arc<AnswerSettings>,
}

/// Answer of a handler to all attempts of one request: bytes for its database, and the response.
#[derive(Clone)]
pub struct OnceAnswer {
    bytes: Bytes,
    keep_for: Duration,
    response: Response<Bytes>,
}

/// Error of [`Once::answer`]: the response cannot be kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnswerError {
    /// The body is longer than [`ReplayLayer::keep_up_to`](crate::ReplayLayer::keep_up_to), or the
    /// headers that are kept have more than 16 KiB.
    #[error(
        "the answer is too large to be kept: at most {keep_up_to} bytes of body and 16 KiB of headers; raise \
         `ReplayLayer::keep_up_to`, or respond with a `Location`"
    )]
    TooLarge {
        /// The maximum length of the body, in bytes.
        keep_up_to: usize,
    },
    /// The body failed.
    #[error("the body of the answer failed")]
    Body(#[source] BoxError),
}

/// Why a request passed its replay layer without a record. It is in the extensions of the request,
/// for the error of [`Once`] as an extractor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unrecorded {
    /// Its method has no keys at this layer.
    Method,
    /// It has no key, and the layer does not require one.
    NoKey,
    /// The scope of the layer returned `None`.
    NoScope,
}

impl Once {
    /// Whether this is the request with this key, and its lock is held.
    pub(super) fn is_running(&self, key: &LockKey) -> bool {
        self.key() == key && self.lock.loss().is_none()
    }

    /// Returns the key of the record: a hash of the scope and the idempotency key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.lock.key()
    }

    /// Returns the fencing token of this run. Check it in the transaction, so that a run whose lock
    /// was lost writes nothing.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.lock.fencing_token()
    }

    /// Returns the lock of the idempotency key.
    #[must_use]
    pub fn held_lock(&self) -> &HeldLock {
        &self.lock
    }

    /// Reads the body of the response, and makes the bytes that
    /// [`find_answer`](crate::ReplayLayer::find_answer) must return.
    ///
    /// # Errors
    ///
    /// Fails if the answer is too large, or if its body fails.
    pub async fn answer<B>(&self, response: Response<B>) -> Result<OnceAnswer, AnswerError>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>>,
    {
        let (head, body) = response.into_parts();
        let keep_up_to = self.settings.keep_up_to;
        let body = Limited::new(body, keep_up_to).collect().await.map_err(|error| {
            if error.is::<LengthLimitError>() { AnswerError::TooLarge { keep_up_to } } else { AnswerError::Body(error) }
        })?;
        let body = body.to_bytes();
        let answer = Answer::new(head.status, self.settings.headers.apply(&head.headers), body.clone());
        let bytes = answer.into_bytes(&self.fingerprint).ok_or(AnswerError::TooLarge { keep_up_to })?;
        let mut response = Response::from_parts(head, body);
        // The work is done, also if the status is that of an error.
        response.extensions_mut().insert(Keep::Yes);
        Ok(OnceAnswer { bytes, keep_for: self.settings.keep_for, response })
    }
}

impl OnceAnswer {
    /// Returns the bytes to store. Their format is that of this crate, and has a version.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns how long to keep them, in milliseconds: [`ReplayLayer::keep_for`], for a signed
    /// 64-bit parameter of a statement.
    ///
    /// [`ReplayLayer::keep_for`]: crate::ReplayLayer::keep_for
    #[must_use]
    pub fn keep_for_ms(&self) -> i64 {
        i64::try_from(self.keep_for.as_millis()).unwrap_or(i64::MAX)
    }

    /// Returns the response.
    #[must_use]
    pub fn to_response(&self) -> Response<Bytes> {
        self.response.clone()
    }
}

impl fmt::Debug for OnceAnswer {
    /// Without the contents, which are for one client.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnceAnswer").field("status", &self.response.status()).field("bytes", &self.bytes.len()).finish()
    }
}
