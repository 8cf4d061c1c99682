//! The record that the lock of a request leaves with its release, for a layer that keeps answers.

use bytes::Bytes;
use http::response::Parts;
use http_body::Frame;

use crate::store::NewRecord;

/// Decides which record the lock of a layer leaves.
pub(crate) trait Recorder: Send + Sync {
    /// Called with the response head of the handler.
    fn see_head(&mut self, head: &Parts);

    /// The number of body bytes that are kept.
    fn keep_up_to(&self) -> usize;

    /// The record of a response that has ended well.
    fn record(self: Box<Self>, ending: Ending<'_>) -> Option<NewRecord>;
}

/// How a response has ended well. Any other response leaves no record: its lock was lost, its
/// handler failed, or its stream broke off.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ending<'a> {
    /// The body is complete in memory.
    Complete(&'a [Frame<Bytes>]),
    /// A body that was sent while it was produced has reached its end.
    Streamed,
    /// The lock was released before the body: a tunnel, or `ReleaseAt::ResponseHead`.
    ReleasedAtHead,
}
