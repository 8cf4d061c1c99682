//! Problem details (RFC 9457): the built-in response to a rejected request.

use std::{borrow::Cow, time::Duration};

use http::{Extensions, HeaderMap, HeaderValue, Response, StatusCode, header};

use super::body::RejectionBody;

/// The address of the page that has a section for each type: below the `documentation` of the
/// manifest. The source of the page is `docs/problem-types.md`.
pub(super) const TYPE_BASE: &str = "https://docs.rs/tower-lock/latest/tower_lock/problem/#";

/// The problem of one response, with three members for clients of this crate: `outcome`,
/// `retry_after_ms` and `original_status`.
pub(super) struct Problem {
    /// The fragment of the type.
    pub(super) code: &'static str,
    pub(super) title: &'static str,
    pub(super) status: StatusCode,
    pub(super) detail: Cow<'static, str>,
    pub(super) outcome: &'static str,
    pub(super) retry_after: Option<Duration>,
    pub(super) original_status: Option<StatusCode>,
}

impl Problem {
    pub(super) fn into_response(self, mut headers: HeaderMap, extensions: Extensions) -> Response<RejectionBody> {
        let Self { status, retry_after, .. } = self;
        headers.reserve(3);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(after) = retry_after {
            headers.insert(header::RETRY_AFTER, whole_seconds(after));
        }
        let mut response = Response::new(RejectionBody::full(self.to_json()));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        *response.extensions_mut() = extensions;
        response
    }

    /// The members in JSON, in one allocation. Hand-written: a client that is rejected often should
    /// cost little.
    fn to_json(&self) -> String {
        let Self { code, title, status, detail, outcome, retry_after, original_status } = self;
        let escaped;
        let detail = match detail {
            // The built-in texts have no character to escape.
            Cow::Borrowed(text) => text,
            Cow::Owned(text) => {
                escaped = serde_json::to_string(text).expect("a text can be serialized");
                &escaped[1..escaped.len() - 1]
            }
        };
        let (mut ms, mut original) = (itoa::Buffer::new(), "");
        let mut retry_after_ms = "";
        let (mut retry_name, mut original_name) = ("", "");
        if let Some(after) = retry_after {
            retry_name = r#","retry_after_ms":"#;
            retry_after_ms = ms.format(u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
        }
        if let Some(status) = original_status {
            original_name = r#","original_status":"#;
            original = status.as_str();
        }
        [
            r#"{"type":""#,
            TYPE_BASE,
            code,
            r#"","title":""#,
            title,
            r#"","status":"#,
            status.as_str(),
            r#","detail":""#,
            detail,
            r#"","outcome":""#,
            outcome,
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
    use super::*;
    use crate::limits::{RETRY_AFTER_MAX, RETRY_AFTER_MIN};

    #[test]
    fn members_are_valid_json() {
        let problem = |detail: Cow<'static, str>, retry_after, original_status| Problem {
            code: "locked",
            title: "Resource is locked",
            status: StatusCode::CONFLICT,
            detail,
            outcome: "not-started",
            retry_after,
            original_status,
        };
        let long = Some(Duration::from_millis(1500));
        for problem in [
            problem("Wait.".into(), long, None),
            problem("Wait.".into(), None, Some(StatusCode::CREATED)),
            problem("a \"text\" of \\ and \n\"".to_owned().into(), long, Some(StatusCode::OK)),
        ] {
            let json: serde_json::Value = serde_json::from_str(&problem.to_json()).expect("JSON");
            let mut expected = serde_json::json!({
                "type": format!("{TYPE_BASE}locked"),
                "title": problem.title,
                "status": 409,
                "detail": problem.detail,
                "outcome": problem.outcome,
            });
            if problem.retry_after.is_some() {
                expected["retry_after_ms"] = 1500.into();
            }
            if let Some(status) = problem.original_status {
                expected["original_status"] = status.as_u16().into();
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
