//! When the locks of a request are released: at the response head, at the end of the body, or on
//! failure.

use bytes::Bytes;
use http::{HeaderMap, Method, Response, StatusCode, header};
use http_body::Body;
use tower::BoxError;

use super::{request_locks::RequestLocks, response_body::ResponseBody};
use crate::{error::LockLost, rejection::Rejection, replay::keep::Ending};

/// Turns the result of the handler into the response, and releases the locks or moves them to its
/// body.
pub(super) async fn finish_response<B, E>(
    mut locks: RequestLocks,
    method: &Method,
    done: Result<Result<Response<B>, E>, LockLost>,
) -> Result<Response<ResponseBody<B>>, E>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    locks.close();
    let response = match done {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => {
            locks.set_failed();
            locks.release_all().await;
            return Err(error);
        }
        Err(why) => return Ok(aborted(locks, why)),
    };
    if locks.is_empty() {
        return Ok(response.map(ResponseBody::pass_through));
    }

    let (head, body) = response.into_parts();
    if head.status.is_client_error() || head.status.is_server_error() {
        locks.set_failed();
    }
    if let Some(recorder) = locks.recorder() {
        recorder.see_head(&head);
    }
    if locks.context().policy().releases_at_head() || starts_tunnel(method, head.status) {
        locks.set_record(|recorder| recorder.without_body(Ending::ReleasedAtHead));
        locks.release_all().await;
        return Ok(Response::from_parts(head, ResponseBody::pass_through(body)));
    }
    if !has_content(method, head.status) {
        return Ok(Response::from_parts(head, ResponseBody::without_content(body, locks).await));
    }
    let announced = content_length(&head.headers).or_else(|| body.size_hint().exact());
    Ok(match ResponseBody::from_handler(locks, body, announced).await {
        Ok(body) => Response::from_parts(head, body),
        Err((locks, why)) => aborted(locks, why),
    })
}

/// The response to a request whose lock was lost before anything was sent.
pub(super) fn aborted<B>(locks: RequestLocks, why: LockLost) -> Response<ResponseBody<B>> {
    let rejection = if why == LockLost::HoldLimitReached { Rejection::HoldLimitReached } else { Rejection::Lost };
    let response = locks.context().on_reject().respond(rejection).map(ResponseBody::rejected);
    locks.lost(why);
    response
}

/// Whether another protocol follows the head, without an end.
fn starts_tunnel(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (method == Method::CONNECT && status.is_success())
}

/// Whether the response has content (RFC 9110, section 6.4).
fn has_content(method: &Method, status: StatusCode) -> bool {
    method != Method::HEAD && !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
