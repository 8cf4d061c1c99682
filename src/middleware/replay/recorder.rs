use std::{collections::VecDeque, sync::Arc};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, response::Parts};
use http_body::Frame;

use super::config::AnswerSettings;
use crate::{
    replay::{
        answer::Answer,
        fingerprint::Fingerprint,
        keep::{Ending, is_wanted, keeps_body},
    },
    store::{NewRecord, Record},
};

/// Decides which record the lock of a replay layer leaves.
#[derive(Debug)]
pub(in crate::middleware) struct Recorder {
    settings: Arc<AnswerSettings>,
    fingerprint: Fingerprint,
    /// The response head, if the response is kept.
    head: Option<(StatusCode, HeaderMap)>,
}

impl Recorder {
    pub(super) fn new(settings: Arc<AnswerSettings>, fingerprint: Fingerprint) -> Self {
        Self { settings, fingerprint, head: None }
    }

    /// Called with the response head of the handler.
    pub(in crate::middleware) fn see_head(&mut self, head: &Parts) {
        if is_wanted(head, self.settings.keep_if.as_deref()) {
            self.head = Some((head.status, self.settings.headers.apply(&head.headers)));
        }
    }

    /// The number of body bytes that are kept.
    pub(in crate::middleware) fn keep_up_to(&self) -> usize {
        if self.head.is_some() { self.settings.keep_up_to } else { 0 }
    }

    /// The record of a response that is complete in memory.
    pub(in crate::middleware) fn complete(self, frames: &VecDeque<Frame<Bytes>>) -> Option<NewRecord> {
        let data = || frames.iter().filter_map(Frame::data_ref);
        let bytes = data().map(Bytes::len).sum();
        let has_trailers = frames.iter().any(Frame::is_trailers);
        let single = data().next().filter(|first| first.len() == bytes).cloned();
        let body = || single.unwrap_or_else(|| data().fold(BytesMut::with_capacity(bytes), extended).freeze());
        self.record(Ending::Complete { bytes, has_trailers }, body)
    }

    /// The record of a response whose body was not kept.
    pub(in crate::middleware) fn without_body(self, ending: Ending) -> Option<NewRecord> {
        self.record(ending, Bytes::new)
    }

    /// The record of an answer that the application has found.
    pub(super) fn found(self, record: Record) -> NewRecord {
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
