//! Which answers are kept.

use http::response::Parts;

use crate::rejection::Rejection;

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

/// How a response that is kept has ended. One that ended in any other way leaves no record: its
/// lock was lost, its handler failed, or its stream broke off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The body is complete in memory.
    Complete { bytes: usize, has_trailers: bool },
    /// A body that was sent while it was produced has reached its end.
    Streamed,
    /// The lock was released before the body: a tunnel, or `ReleaseAt::ResponseHead`.
    ReleasedAtHead,
}

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

/// Whether the body of a response that ended like this is kept. Otherwise a retry is rejected, and
/// does not run the handler.
pub(crate) fn keeps_body(ending: Ending, keep_up_to: usize) -> bool {
    match ending {
        // An answer without its trailers would be another one.
        Ending::Complete { bytes, has_trailers } => bytes <= keep_up_to && !has_trailers,
        Ending::Streamed | Ending::ReleasedAtHead => false,
    }
}

#[cfg(test)]
mod tests {
    use http::Response;

    use super::*;

    const COMPLETE: Ending = Ending::Complete { bytes: 100, has_trailers: false };

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
        assert!(keeps_body(COMPLETE, 100), "just fits");
    }

    #[test]
    fn large_and_streamed_answers_leave_a_tombstone() {
        assert!(!keeps_body(COMPLETE, 99));
        assert!(!keeps_body(Ending::Streamed, 100));
        assert!(!keeps_body(Ending::ReleasedAtHead, 100));
        assert!(!keeps_body(Ending::Complete { bytes: 1, has_trailers: true }, 100));
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
