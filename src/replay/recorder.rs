//! The record that the lock of a request leaves.

use std::{fmt, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, response::Parts};
use http_body::Frame;

use super::{
    answer::Answer,
    fingerprint::Fingerprint,
    headers::HeaderFilter,
    keep::{KeepIf, is_wanted, kept_frames},
    scope_usage::{ScopeLimits, ScopeUsage, Used},
};
use crate::{
    clock::BootInstant,
    lock_key::LockKey,
    middleware::record::{Ending, Recorder},
    store::NewRecord,
};

/// What is kept of an answer.
#[derive(Clone)]
pub(crate) struct AnswerSettings {
    pub(crate) keep_for: Duration,
    pub(crate) keep_up_to: usize,
    pub(crate) headers: HeaderFilter,
    pub(crate) keep_if: Option<Arc<KeepIf>>,
    pub(crate) is_record_required: bool,
}

/// Keeps the answer of the handler.
pub(super) struct AnswerRecorder {
    pub(super) settings: Arc<AnswerSettings>,
    pub(super) fingerprint: Fingerprint,
    pub(super) scope: Scope,
    /// The response head, if the response is kept.
    pub(super) head: Option<(StatusCode, HeaderMap)>,
}

/// The scope of a request, and what it keeps.
pub(super) struct Scope {
    pub(super) key: LockKey,
    pub(super) limits: ScopeLimits,
    pub(super) usage: Arc<ScopeUsage>,
    /// When the request came.
    pub(super) now: BootInstant,
}

impl Scope {
    fn used(&self, keep_for: Duration) -> Used {
        self.usage.of(&self.key, keep_for, self.now)
    }

    /// Whether a request with a new key is rejected.
    pub(super) fn is_full(&self, keep_for: Duration) -> bool {
        self.used(keep_for).answers >= self.limits.answers as f64
    }
}

impl Recorder for AnswerRecorder {
    fn see_head(&mut self, head: &Parts) {
        if is_wanted(head, self.settings.keep_if.as_deref()) {
            self.head = Some((head.status, self.settings.headers.apply(&head.headers)));
        }
    }

    fn keep_up_to(&self) -> usize {
        if self.head.is_some() { self.settings.keep_up_to } else { 0 }
    }

    fn record(self: Box<Self>, ending: Ending<'_>) -> Option<NewRecord> {
        let Self { settings, fingerprint, scope, head } = *self;
        let (status, headers) = head?;
        let left = scope.limits.bytes as f64 - scope.used(settings.keep_for).bytes;
        let fits = |answer: &Answer| answer.bytes() as f64 <= left;
        let mut answer = match kept_frames(ending, settings.keep_up_to) {
            Some(frames) => Answer::new(status, headers, copied(frames)),
            None => Answer::tombstone(status, &headers),
        };
        if !fits(&answer) {
            answer = answer.into_tombstone();
        }
        if !fits(&answer) {
            answer = Answer::tombstone(status, &HeaderMap::new());
        }
        scope.usage.add(&scope.key, answer.bytes(), settings.keep_for, scope.now);
        Some(NewRecord { record: answer.into_record(&fingerprint), keep_for: settings.keep_for })
    }
}

/// The bytes of these frames. Copied: a frame may be a small part of a large buffer, which it would
/// keep for as long.
fn copied(frames: &[Frame<Bytes>]) -> Bytes {
    let data = frames.iter().filter_map(Frame::data_ref);
    let mut body = BytesMut::with_capacity(data.clone().map(Bytes::len).sum());
    data.for_each(|frame| body.extend_from_slice(frame));
    body.freeze()
}

impl fmt::Debug for AnswerSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keep_for, keep_up_to, headers, keep_if, is_record_required } = self;
        f.debug_struct("AnswerSettings")
            .field("keep_for", keep_for)
            .field("keep_up_to", keep_up_to)
            .field("headers", headers)
            .field("keep_if", &keep_if.is_some())
            .field("is_record_required", is_record_required)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use http::Response;

    use super::*;

    #[test]
    fn record_does_not_keep_the_buffer_of_a_frame() {
        let settings = AnswerSettings {
            keep_for: Duration::MAX,
            keep_up_to: 100,
            headers: HeaderFilter::default(),
            keep_if: None,
            is_record_required: false,
        };
        let scope = Scope {
            key: LockKey::from(("user", 7)),
            limits: ScopeLimits::default(),
            usage: Arc::default(),
            now: BootInstant::default(),
        };
        let fingerprint = Fingerprint([7; 32]);
        let mut recorder = Box::new(AnswerRecorder { settings: Arc::new(settings), fingerprint, scope, head: None });
        recorder.see_head(&Response::new(()).into_parts().0);
        let buffer = Bytes::from(vec![1; 1 << 20]);
        let frame = buffer.slice(..8);
        let new = recorder.record(Ending::Complete(&[Frame::data(frame.clone())])).expect("a record");
        let body = new.record.body.expect("a body");
        assert!(body == frame && body.as_ptr() != frame.as_ptr(), "a copy");
    }
}
