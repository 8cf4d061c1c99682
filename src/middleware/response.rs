//! When the locks of a request end: with its answer, at its head or at its end.

use bytes::Bytes;
use http::{HeaderMap, Method, Response, StatusCode, header};
use http_body::Body;
use tower::BoxError;

use super::{request_locks::Duty, response_body::ResponseBody};
use crate::{error::LockLost, rejection::Rejection};

/// What the handler has answered, or why it has not.
pub(super) async fn answer<B, E>(
    mut duty: Duty,
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
            duty.has_failed();
            duty.end().await;
            return Err(error);
        }
        Err(why) => return Ok(broken_off(duty, why)),
    };
    if duty.is_empty() {
        return Ok(response.map(ResponseBody::passing));
    }

    let (head, body) = response.into_parts();
    if head.status.is_client_error() || head.status.is_server_error() {
        duty.has_failed();
    }
    if duty.slot().policy().holds_to_head() || becomes_a_tunnel(method, head.status) {
        duty.end().await;
        return Ok(Response::from_parts(head, ResponseBody::passing(body)));
    }
    if !has_content(method, head.status) {
        return Ok(Response::from_parts(head, ResponseBody::without_content(body, duty).await));
    }
    let announced = content_length(&head.headers).or_else(|| body.size_hint().exact());
    Ok(match ResponseBody::under(duty, body, announced).await {
        Ok(body) => Response::from_parts(head, body),
        Err((duty, why)) => broken_off(duty, why),
    })
}

/// A lock was lost before anything was sent: what was done under it is not known.
fn broken_off<B>(duty: Duty, why: LockLost) -> Response<ResponseBody<B>> {
    let rejection = if why == LockLost::HoldLimitReached { Rejection::MaxHoldExceeded } else { Rejection::Lost };
    let response = duty.slot().on_reject().answer(rejection).map(ResponseBody::rejected);
    duty.lost(why);
    response
}

/// What follows the head is no answer but another protocol, for as long as both sides like.
fn becomes_a_tunnel(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (method == Method::CONNECT && status.is_success())
}

/// Whether anybody will ask for the body (RFC 9110, section 6.4).
fn has_content(method: &Method, status: StatusCode) -> bool {
    method != Method::HEAD && !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
