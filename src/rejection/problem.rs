//! Problem details (RFC 9457): the built-in response to a rejected request.

use std::{borrow::Cow, time::Duration};

use http::{Extensions, HeaderMap, HeaderValue, Response, header};

use super::{Rejection, body::RejectionBody};

/// The address of the page that has a section for each type: below the `documentation` of the
/// manifest. The source of the page is `docs/problem-types.md`.
pub(super) const TYPE_BASE: &str = "https://docs.rs/tower-lock/latest/tower_lock/problem/#";

impl Rejection {
    /// The built-in response, with three members for clients of this crate: `outcome`,
    /// `retry_after_ms` and `original_status`. It is made in these headers and extensions.
    pub(super) fn response_with(&self, mut headers: HeaderMap, extensions: Extensions) -> Response<RejectionBody> {
        headers.reserve(3);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(after) = self.retry_after() {
            headers.insert(header::RETRY_AFTER, whole_seconds(after));
        }
        if let Self::AnswerNotKept { location, etag, .. } = self {
            headers.extend(location.clone().map(|value| (header::LOCATION, value)));
            headers.extend(etag.clone().map(|value| (header::ETAG, value)));
        }
        let mut response = Response::new(RejectionBody::full(self.to_json()));
        *response.status_mut() = self.status();
        *response.headers_mut() = headers;
        *response.extensions_mut() = extensions;
        response
    }

    /// The members in JSON, in one allocation. Hand-written: a client that is rejected often should
    /// cost little.
    fn to_json(&self) -> String {
        let (cause, status) = (self.cause(), self.status());
        let escaped;
        let cause = match &cause {
            // The built-in texts have no character to escape.
            Cow::Borrowed(text) => *text,
            Cow::Owned(text) => {
                escaped = serde_json::to_string(text).expect("a text can be serialized");
                &escaped[1..escaped.len() - 1]
            }
        };
        let mut ms = itoa::Buffer::new();
        let [retry_name, retry_after_ms] = match self.retry_after() {
            Some(after) => [r#","retry_after_ms":"#, ms.format(u64::try_from(after.as_millis()).unwrap_or(u64::MAX))],
            None => [""; 2],
        };
        let [original_name, original] = match self {
            Self::AnswerNotKept { original_status, .. } => [r#","original_status":"#, original_status.as_str()],
            _ => [""; 2],
        };
        [
            r#"{"type":""#,
            TYPE_BASE,
            self.code(),
            r#"","title":""#,
            self.title(),
            r#"","status":"#,
            status.as_str(),
            r#","detail":""#,
            cause,
            " ",
            self.advice(),
            r#"","outcome":""#,
            self.outcome(),
            "\"",
            retry_name,
            retry_after_ms,
            original_name,
            original,
            "}",
        ]
        .concat()
    }
}

/// The value of `Retry-After`, without an allocation.
fn whole_seconds(after: Duration) -> HeaderValue {
    HeaderValue::from_static(match after.as_secs() + u64::from(after.subsec_nanos() > 0) {
        0 | 1 => "1",
        2 => "2",
        3 => "3",
        4 => "4",
        _ => "5",
    })
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;
    use crate::{
        limits::{RETRY_AFTER_MAX, RETRY_AFTER_MIN},
        rejection::field_error::{FieldError, FieldLocation, FieldProblem},
    };

    #[test]
    fn members_are_valid_json() {
        let field = FieldError {
            location: FieldLocation::Query,
            name: "a \"text\" of \\ and \n\"",
            problem: FieldProblem::Missing,
        };
        let (original_status, location, etag) = (StatusCode::CREATED, None, None);
        for rejection in [
            Rejection::Busy { retry_after: Duration::from_millis(1500) },
            Rejection::AnswerNotKept { original_status, location, etag },
            Rejection::IdempotencyKeyInvalid { field },
        ] {
            let json: serde_json::Value = serde_json::from_str(&rejection.to_json()).expect("JSON");
            let mut expected = serde_json::json!({
                "type": format!("{TYPE_BASE}{}", rejection.code()),
                "title": rejection.title(),
                "status": rejection.status().as_u16(),
                "detail": format!("{} {}", rejection.cause(), rejection.advice()),
                "outcome": rejection.outcome(),
            });
            if rejection.retry_after().is_some() {
                expected["retry_after_ms"] = 1500.into();
            }
            if matches!(rejection, Rejection::AnswerNotKept { .. }) {
                expected["original_status"] = 201.into();
            }
            assert_eq!(json, expected);
        }
    }

    /// They are not escaped.
    #[test]
    fn built_in_texts_are_valid_in_json() {
        let source = include_str!("mod.rs").split("fn title(&self)").nth(1).expect("the texts");
        let source = source.split("impl fmt::Display").next().expect("their end");
        assert!(!source.contains('\\'), "a text with an escape");
    }

    /// As in `limits.rs`.
    #[test]
    fn retry_after_is_one_to_five_whole_seconds() {
        for (ms, seconds) in [(0, 1), (1, 1), (999, 1), (1000, 1), (1001, 2), (4001, 5), (5000, 5), (60_000, 5)] {
            assert_eq!(whole_seconds(Duration::from_millis(ms)), seconds.to_string(), "{ms} ms");
        }
        assert_eq!((RETRY_AFTER_MIN, RETRY_AFTER_MAX), (Duration::from_secs(1), Duration::from_secs(5)));
    }
}
