//! A response body that was complete before its head was sent.

use std::collections::VecDeque;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tower::BoxError;

/// What is left of a body that is not needed any more.
pub(super) struct Complete {
    pub(super) frames: VecDeque<Frame<Bytes>>,
    /// What comes after the frames.
    pub(super) error: Option<BoxError>,
    /// What the body announced, less what has been sent of it. Where it broke its word (an error, too few bytes), so do we:
    /// the client must not take a part for the whole.
    pub(super) announced: Option<u64>,
    /// Where nobody asks for content (`HEAD`): whether the body said that it had none.
    pub(super) had_none: Option<bool>,
}

impl Complete {
    pub(super) fn next(&mut self) -> Option<Result<Frame<Bytes>, BoxError>> {
        let frame = self.frames.pop_front();
        if let (Some(announced), Some(data)) = (&mut self.announced, frame.as_ref().and_then(Frame::data_ref)) {
            *announced = announced.saturating_sub(data.len() as u64);
        }
        frame.map(Ok).or_else(|| self.error.take().map(Err))
    }

    pub(super) fn is_end_stream(&self) -> bool {
        let nothing_left = self.frames.is_empty() && self.error.is_none() && self.announced.unwrap_or(0) == 0;
        self.had_none.unwrap_or(nothing_left)
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        // Not made exact where it was not: hyper would send a `Content-Length`, and then no trailers.
        self.announced.map_or_else(
            || {
                let mut at_least = SizeHint::new();
                at_least.set_lower(data_len(&self.frames));
                at_least
            },
            SizeHint::with_exact,
        )
    }
}

pub(super) fn data_len<'a>(frames: impl IntoIterator<Item = &'a Frame<Bytes>>) -> u64 {
    frames.into_iter().filter_map(Frame::data_ref).map(|data| data.len() as u64).sum()
}
