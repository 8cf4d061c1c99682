//! When the locks of a request are released: at the response head, at the end of the body, or on
//! failure.

mod body;
mod eager;
mod streaming;
mod shared;

use std::future::{Future, poll_fn};

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode, header};
use http_body::Body;
use tokio::time::timeout;
use tower::BoxError;

pub use self::body::ResponseBody;
use self::{
    eager::{EagerBody, ReadAhead, data_len, read_ready},
    streaming::StreamingBody,
};
use super::{record::Ending, request_locks::RequestLocks};
use crate::{error::LockLost, rejection::Rejection};

/// The response to a request, or the error of the inner service.
pub(crate) type ResponseResult<B, E> = Result<Response<ResponseBody<B>>, E>;

/// The result of a handler under its locks.
pub(crate) type HandlerResult<B, E> = Result<Result<Response<B>, E>, LockLost>;

/// The locks that the handler ran under, and its result.
pub(crate) type HandlerEnd<B, E> = (RequestLocks, HandlerResult<B, E>);

/// Turns the result of the handler into the response, and releases the locks or moves them to its
/// body.
#[expect(clippy::manual_async_fn, reason = "the future of an `async fn` contains its arguments twice")]
pub(crate) fn finish_response<B, E>((mut locks, done): HandlerEnd<B, E>) -> impl Future<Output = ResponseResult<B, E>>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    async move {
        if locks.recorder().is_some() {
            // A disconnect before the record is left must not prevent it.
            locks.context().set_running(true);
        }
        locks.close();
        let response = match done {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                locks.set_failed();
                let _ = locks.release_all().await;
                return Err(error);
            }
            Err(why) => return Ok(aborted(locks, why)),
        };
        if locks.is_empty() {
            return Ok(response.map(ResponseBody::pass_through));
        }

        let (mut head, body) = response.into_parts();
        if head.status.is_client_error() || head.status.is_server_error() {
            locks.set_failed();
        }
        locks.add_ticket(&mut head.headers);
        if let Some(recorder) = locks.recorder() {
            recorder.see_head(&head);
            // It may have called the application.
            if let Some(why) = locks.abort_reason() {
                return Ok(aborted(locks, why));
            }
        }
        let body = if locks.context().policy().releases_at_head() || starts_tunnel(locks.is_connect, head.status) {
            locks.set_ending(Ending::ReleasedAtHead);
            ResponseBody::pass_through(body)
        } else if !has_content(locks.is_head, head.status) || body.is_end_stream() {
            let empty = ResponseBody::without_content(&body);
            drop(body);
            locks.set_ending(Ending::Complete(&[]));
            empty
        } else {
            let hint = body.size_hint();
            let length = content_length(&head.headers).or_else(|| hint.exact());
            match read_ready(&mut locks, EagerBody::new(body), length).await {
                Ok(ReadAhead::Complete { frames, error }) => {
                    if error.is_some() {
                        locks.set_failed();
                    } else if length.is_none_or(|length| length == data_len(&frames)) {
                        locks.set_ending(Ending::Complete(&frames));
                    } else {
                        // A body of another length than its head announces is not what its client
                        // gets.
                        locks.set_ending(Ending::Streamed);
                    }
                    ResponseBody::complete(frames, error, hint)
                }
                Ok(ReadAhead::Incomplete { inner, frames }) => {
                    let is_unread = locks.recorder().is_some() && locks.context().is_detached();
                    let idle = locks.context().policy().idle_timeout();
                    let kept = locks.recorder().map_or(0, |recorder| recorder.keep_up_to()) as u64;
                    let mut left = kept.checked_sub(data_len(&frames));
                    let mut stream = Box::new(StreamingBody::new(inner, frames.into_iter(), hint, length, locks));
                    if is_unread {
                        // The client has disconnected, and its retry asks for the record. The end
                        // of the stream leaves it, or else the drop: a stream of any length costs
                        // no more than an answer that is kept.
                        let read = async {
                            while let (Some(bytes), Some(Ok(frame))) = (left, poll_fn(|cx| stream.poll_frame(cx)).await)
                            {
                                left = bytes.checked_sub(data_len([&frame]));
                            }
                        };
                        let _ = timeout(idle, read).await;
                    }
                    return Ok(Response::from_parts(head, ResponseBody::streaming(stream)));
                }
                Err(why) => return Ok(aborted(locks, why)),
            }
        };
        Ok(match locks.release_all().await {
            Ok(()) => Response::from_parts(head, body),
            Err(why) => rejected(&locks, why),
        })
    }
}

/// The response to a request whose lock was lost before anything was sent.
pub(crate) fn aborted<B>(locks: RequestLocks, why: LockLost) -> Response<ResponseBody<B>> {
    let rejection = match why {
        LockLost::HoldLimitReached => Rejection::HoldLimitReached,
        LockLost::Superseded => Rejection::Superseded { has_started: locks.context().handler_started() },
        _ => Rejection::Lost,
    };
    let response = rejected(&locks, rejection);
    locks.lost(why);
    response
}

/// The response in place of that of the handler.
fn rejected<B>(locks: &RequestLocks, rejection: Rejection) -> Response<ResponseBody<B>> {
    locks.context().on_reject().respond(rejection).map(ResponseBody::rejected)
}

/// Whether another protocol follows the head, without an end.
fn starts_tunnel(is_connect: bool, status: StatusCode) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (is_connect && status.is_success())
}

/// Whether the response has content (RFC 9110, section 6.4).
fn has_content(is_head: bool, status: StatusCode) -> bool {
    !is_head && !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
