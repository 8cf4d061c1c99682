//! When the locks of a request end: with its answer, at its head or at its end.

use bytes::Bytes;
use http::{HeaderMap, Method, Response, StatusCode, header};
use http_body::Body;
use tower::BoxError;

use super::{request_locks::RequestLocks, response_body::ResponseBody};
use crate::{error::LockLost, rejection::Rejection};

/// What the handler has answered, or why it has not.
pub(super) async fn finish_response<B, E>(
    mut duty: RequestLocks,
    method: &Method,
    done: Result<Result<Response<B>, E>, LockLost>,
) -> Result<Response<ResponseBody<B>>, E>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    duty.close();
    let response = match done {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => {
            duty.set_failed();
            duty.release_all().await;
            return Err(error);
        }
        Err(why) => return Ok(aborted(duty, why)),
    };
    if duty.is_empty() {
        return Ok(response.map(ResponseBody::pass_through));
    }

    let (head, body) = response.into_parts();
    if head.status.is_client_error() || head.status.is_server_error() {
        duty.set_failed();
    }
    if duty.context().policy().releases_at_head() || starts_tunnel(method, head.status) {
        duty.release_all().await;
        return Ok(Response::from_parts(head, ResponseBody::pass_through(body)));
    }
    if !has_content(method, head.status) {
        return Ok(Response::from_parts(head, ResponseBody::without_content(body, duty).await));
    }
    let announced = content_length(&head.headers).or_else(|| body.size_hint().exact());
    Ok(match ResponseBody::from_handler(duty, body, announced).await {
        Ok(body) => Response::from_parts(head, body),
        Err((duty, why)) => aborted(duty, why),
    })
}

/// A lock was lost before anything was sent: what was done under it is not known.
fn aborted<B>(duty: RequestLocks, why: LockLost) -> Response<ResponseBody<B>> {
    let rejection = if why == LockLost::HoldLimitReached { Rejection::MaxHoldExceeded } else { Rejection::Lost };
    let response = duty.context().on_reject().respond(rejection).map(ResponseBody::rejected);
    duty.lost(why);
    response
}

/// What follows the head is no answer but another protocol, for as long as both sides like.
fn starts_tunnel(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (method == Method::CONNECT && status.is_success())
}

/// Whether anybody will ask for the body (RFC 9110, section 6.4).
fn has_content(method: &Method, status: StatusCode) -> bool {
    method != Method::HEAD && !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
