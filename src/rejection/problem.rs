//! Problem details (RFC 9457): the built-in response to a rejected request.

use std::{borrow::Cow, time::Duration};

use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Serialize;

use super::body::RejectionBody;
use crate::limits::{RETRY_AFTER_MAX, RETRY_AFTER_MIN};

/// The problem of one response, with three members for clients of this crate: `outcome`,
/// `retry_after_ms` and `original_status`.
pub(super) struct Problem {
    pub(super) r#type: String,
    pub(super) title: &'static str,
    pub(super) status: StatusCode,
    pub(super) detail: Cow<'static, str>,
    pub(super) outcome: &'static str,
    pub(super) retry_after: Option<Duration>,
    pub(super) original_status: Option<StatusCode>,
}

/// The members in JSON. Hand-written: the crates for problem details keep `type` as an `http::Uri`,
/// which cannot hold a URN of this form.
#[derive(Serialize)]
struct Members<'a> {
    r#type: &'a str,
    title: &'static str,
    status: u16,
    detail: &'a str,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_status: Option<u16>,
}

impl Problem {
    pub(super) fn into_response(self) -> Response<RejectionBody> {
        let Self { r#type, title, status, detail, outcome, retry_after, original_status } = self;
        let members = Members {
            r#type: &r#type,
            title,
            status: status.as_u16(),
            detail: &detail,
            outcome,
            retry_after_ms: retry_after.map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX)),
            original_status: original_status.map(|status| status.as_u16()),
        };
        let json = serde_json::to_vec(&members).expect("texts and numbers can always be serialized");
        let mut response = Response::new(RejectionBody::new(Full::from(json)));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(after) = retry_after {
            headers.insert(header::RETRY_AFTER, whole_seconds(after).into());
        }
        response
    }
}

fn whole_seconds(after: Duration) -> u64 {
    let rounded_up = after.as_secs() + u64::from(after.subsec_nanos() > 0);
    rounded_up.clamp(RETRY_AFTER_MIN.as_secs(), RETRY_AFTER_MAX.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_one_to_five_whole_seconds() {
        for (ms, seconds) in [(0, 1), (1, 1), (999, 1), (1000, 1), (1001, 2), (4001, 5), (5000, 5), (60_000, 5)] {
            assert_eq!(whole_seconds(Duration::from_millis(ms)), seconds, "{ms} ms");
        }
    }
}
