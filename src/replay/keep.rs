//! Which answers are kept.

use bytes::Bytes;
use http::response::Parts;
use http_body::Frame;

use crate::{middleware::record::Ending, rejection::Rejection};

/// Whether the response of a handler is kept for retries. It goes into the extensions of the
/// response.
///
/// Without it, a response is kept if its status is below 400. A handler that has done its work and
/// responds with an error inserts `Keep::Yes`: a payment that was captured must not be captured
/// again because its receipt could not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// A retry gets this response.
    Yes,
    /// A retry runs the handler.
    No,
}

/// The decision of the application for responses without a [`Keep`].
pub(crate) type KeepIf = dyn Fn(&Parts) -> bool + Send + Sync;

/// Whether a response with this head is kept, if it ends well.
pub(crate) fn is_wanted(head: &Parts, keep_if: Option<&KeepIf>) -> bool {
    // A rejection says that the handler did not run, or that its end is unknown.
    if head.extensions.get::<Rejection>().is_some() {
        return false;
    }
    match (head.extensions.get::<Keep>(), keep_if) {
        (Some(keep), _) => *keep == Keep::Yes,
        (None, Some(keep_if)) => keep_if(head),
        (None, None) => head.status.as_u16() < 400,
    }
}

/// The frames of the body that is kept with an answer that ended like this. Without a body, a retry
/// is rejected and does not run the handler.
pub(crate) fn kept_frames(ending: Ending<'_>, keep_up_to: usize) -> Option<&[Frame<Bytes>]> {
    let Ending::Complete(frames) = ending else { return None };
    let bytes: usize = frames.iter().filter_map(Frame::data_ref).map(Bytes::len).sum();
    // An answer without its trailers would be another one.
    (bytes <= keep_up_to && !frames.iter().any(Frame::is_trailers)).then_some(frames)
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, Response};

    use super::*;

    fn head(status: u16) -> Parts {
        Response::builder().status(status).body(()).expect("a response").into_parts().0
    }

    fn with<T: Clone + Send + Sync + 'static>(status: u16, extension: T) -> Parts {
        let mut head = head(status);
        head.extensions.insert(extension);
        head
    }

    #[test]
    fn complete_answer_below_400_is_kept() {
        for status in [200, 201, 204, 303, 304, 399] {
            assert!(is_wanted(&head(status), None), "{status}");
        }
        let frames = [Frame::data(Bytes::from_static(&[1; 60])), Frame::data(Bytes::from_static(&[2; 40]))];
        assert!(kept_frames(Ending::Complete(&frames), 100).is_some(), "just fits");
    }

    #[test]
    fn large_and_streamed_answers_leave_a_tombstone() {
        let large = [Frame::data(Bytes::from_static(&[1; 101]))];
        let trailers = [Frame::data(Bytes::from_static(b"1")), Frame::trailers(HeaderMap::new())];
        let endings = [Ending::Complete(&large), Ending::Complete(&trailers), Ending::Streamed, Ending::ReleasedAtHead];
        for ending in endings {
            assert!(kept_frames(ending, 100).is_none(), "{ending:?}");
        }
    }

    #[test]
    fn answer_of_400_and_above_is_not_kept() {
        for status in [400, 404, 409, 500, 503, 599] {
            assert!(!is_wanted(&head(status), None), "{status}");
        }
    }

    #[test]
    fn rejection_is_never_kept() {
        assert!(!is_wanted(&with(200, Rejection::Lost), Some(&|_| true)));
        let mut both = with(200, Rejection::Lost);
        both.extensions.insert(Keep::Yes);
        assert!(!is_wanted(&both, None));
    }

    #[test]
    fn handler_decides_before_the_layer_and_the_status() {
        assert!(is_wanted(&with(502, Keep::Yes), None));
        assert!(!is_wanted(&with(200, Keep::No), None));
        assert!(is_wanted(&with(502, Keep::Yes), Some(&|_| false)));
        assert!(!is_wanted(&with(200, Keep::No), Some(&|_| true)));
        assert!(is_wanted(&head(404), Some(&|head| head.status == 404)));
        assert!(!is_wanted(&head(200), Some(&|head| head.status == 404)));
    }
}
