//! A response body that was complete before its head was sent.

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use smallvec::SmallVec;
use tower::BoxError;

/// The frames that were read before the head was sent: mostly one, without allocation.
pub(super) type Frames = SmallVec<[Frame<Bytes>; 1]>;

/// The frames of a complete body.
pub(super) struct CompleteBody {
    pub(super) frames: <Frames as IntoIterator>::IntoIter,
    /// Follows the frames.
    pub(super) error: Option<BoxError>,
    /// The length that the body announced, less the bytes that were sent. A body that is shorter
    /// than announced, or that failed, must not look complete to the client.
    pub(super) announced: Option<u64>,
    /// For a response without content (`HEAD`): whether the inner body was empty.
    pub(super) was_empty: Option<bool>,
}

impl CompleteBody {
    pub(super) fn next_frame(&mut self) -> Option<Result<Frame<Bytes>, BoxError>> {
        let frame = self.frames.next();
        if let (Some(announced), Some(data)) = (&mut self.announced, frame.as_ref().and_then(Frame::data_ref)) {
            *announced = announced.saturating_sub(data.len() as u64);
        }
        frame.map(Ok).or_else(|| self.error.take().map(Err))
    }

    pub(super) fn is_end_stream(&self) -> bool {
        let nothing_left =
            self.frames.as_slice().is_empty() && self.error.is_none() && self.announced.unwrap_or(0) == 0;
        self.was_empty.unwrap_or(nothing_left)
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        // Not exact if it was not before: hyper would send a `Content-Length`, and then no
        // trailers.
        self.announced.map_or_else(
            || {
                let mut at_least = SizeHint::new();
                at_least.set_lower(data_len(self.frames.as_slice()));
                at_least
            },
            SizeHint::with_exact,
        )
    }
}

pub(super) fn data_len<'a>(frames: impl IntoIterator<Item = &'a Frame<Bytes>>) -> u64 {
    frames.into_iter().filter_map(Frame::data_ref).map(|data| data.len() as u64).sum()
}
