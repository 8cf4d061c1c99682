//! The record that the lock of a request leaves.

use std::{fmt, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, response::Parts};
use http_body::Frame;

use super::{
    answer::Answer,
    fingerprint::Fingerprint,
    headers::HeaderFilter,
    keep::{Ending, KeepIf, is_wanted, keeps_body},
};
use crate::store::{NewRecord, Record};

/// What is kept of an answer.
#[derive(Clone)]
pub(crate) struct AnswerSettings {
    pub(crate) keep_for: Duration,
    pub(crate) keep_up_to: usize,
    pub(crate) headers: HeaderFilter,
    pub(crate) keep_if: Option<Arc<KeepIf>>,
}

/// Decides which record the lock of a replay layer leaves.
#[derive(Debug)]
pub(crate) struct Recorder {
    settings: Arc<AnswerSettings>,
    fingerprint: Fingerprint,
    /// The response head, if the response is kept.
    head: Option<(StatusCode, HeaderMap)>,
}

impl AnswerSettings {
    /// The record of an answer to the request with this fingerprint.
    fn record(&self, answer: Answer, fingerprint: &Fingerprint) -> NewRecord {
        NewRecord { record: answer.into_record(fingerprint), keep_for: self.keep_for }
    }
}

impl Recorder {
    pub(crate) fn new(settings: Arc<AnswerSettings>, fingerprint: Fingerprint) -> Self {
        Self { settings, fingerprint, head: None }
    }

    /// Called with the response head of the handler.
    pub(crate) fn see_head(&mut self, head: &Parts) {
        if is_wanted(head, self.settings.keep_if.as_deref()) {
            self.head = Some((head.status, self.settings.headers.apply(&head.headers)));
        }
    }

    /// The number of body bytes that are kept.
    pub(crate) fn keep_up_to(&self) -> usize {
        if self.head.is_some() { self.settings.keep_up_to } else { 0 }
    }

    /// The record of a response that is complete in memory.
    pub(crate) fn complete(self, frames: &[Frame<Bytes>]) -> Option<NewRecord> {
        let data = || frames.iter().filter_map(Frame::data_ref);
        let bytes = data().map(Bytes::len).sum();
        let has_trailers = frames.iter().any(Frame::is_trailers);
        // Copied: a frame may be a small part of a large buffer, which it would keep for as long.
        let body = || data().fold(BytesMut::with_capacity(bytes), extended).freeze();
        self.record(Ending::Complete { bytes, has_trailers }, body)
    }

    /// The record of a response whose body was not kept.
    pub(crate) fn without_body(self, ending: Ending) -> Option<NewRecord> {
        self.record(ending, Bytes::new)
    }

    /// The record of an answer that the application has found.
    pub(crate) fn found(self, record: Record) -> NewRecord {
        NewRecord { record, keep_for: self.settings.keep_for }
    }

    fn record(self, ending: Ending, body: impl FnOnce() -> Bytes) -> Option<NewRecord> {
        let Self { settings, fingerprint, head } = self;
        let (status, headers) = head?;
        let answer = if keeps_body(ending, settings.keep_up_to) {
            Answer::new(status, headers, body())
        } else {
            Answer::tombstone(status, &headers)
        };
        Some(settings.record(answer, &fingerprint))
    }
}

fn extended(mut body: BytesMut, frame: &Bytes) -> BytesMut {
    body.extend_from_slice(frame);
    body
}

impl fmt::Debug for AnswerSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keep_for, keep_up_to, headers, keep_if } = self;
        f.debug_struct("AnswerSettings")
            .field("keep_for", keep_for)
            .field("keep_up_to", keep_up_to)
            .field("headers", headers)
            .field("keep_if", &keep_if.is_some())
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
        };
        let mut recorder = Recorder::new(Arc::new(settings), Fingerprint::from_bytes([7; 32]));
        recorder.see_head(&Response::new(()).into_parts().0);
        let buffer = Bytes::from(vec![1; 1 << 20]);
        let frame = buffer.slice(..8);
        let new = recorder.complete(&[Frame::data(frame.clone())]).expect("a record");
        let body = new.record.body.expect("a body");
        assert!(body == frame && body.as_ptr() != frame.as_ptr(), "a copy");
    }
}
