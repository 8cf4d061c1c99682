//! The fingerprint of a request: whether a retry is the same request.

use std::fmt;

#[cfg(feature = "axum")]
use axum::extract::OriginalUri;
use http::{
    HeaderMap, HeaderValue, Uri,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
    request::Parts,
};
use sha2::{Digest, Sha256};

use crate::lock_key::LockKey;

/// A SHA-256 of the parts of a request that its retries have in common.
///
/// Headers are not a part of it, except for those that say how to read the body: signatures and
/// timestamps differ per attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint(pub(super) [u8; Self::LEN]);

/// Hashes fields with their lengths: no two lists of fields have the same input.
struct FieldHasher(Sha256);

impl Fingerprint {
    pub(crate) const LEN: usize = 32;

    /// The fingerprint of method, path, query, media type, content encoding and body.
    pub(crate) fn of_request(head: &Parts, body: &[u8]) -> Self {
        let mut fields = FieldHasher::of_target(b'r', head);
        fields.add_optional(uri(head).query().map(str::as_bytes));
        fields.add_optional(media_type(&head.headers).as_deref());
        fields.add(&content_encodings(&head.headers));
        fields.add(body);
        fields.finish()
    }

    /// The fingerprint of method, path and the values of a key function. They replace the query,
    /// the media type and the body.
    pub(crate) fn of_values(head: &Parts, values: &LockKey) -> Self {
        let mut fields = FieldHasher::of_target(b'v', head);
        fields.add(&[u8::from(values.is_raw())]);
        fields.add(values.as_str().as_bytes());
        fields.finish()
    }
}

impl fmt::Debug for Fingerprint {
    /// The first bytes: enough to compare two of them in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "Fingerprint({a:02x}{b:02x}{c:02x}{d:02x}..)")
    }
}

impl FieldHasher {
    /// Method and path. The kinds of fingerprints differ in their first byte.
    fn of_target(kind: u8, head: &Parts) -> Self {
        let mut fields = Self(Sha256::new_with_prefix([kind]));
        fields.add(head.method.as_str().as_bytes());
        fields.add(uri(head).path().as_bytes());
        fields
    }

    fn add(&mut self, field: &[u8]) {
        self.0.update((field.len() as u64).to_be_bytes());
        self.0.update(field);
    }

    /// A missing field and an empty one are different.
    fn add_optional(&mut self, field: Option<&[u8]>) {
        self.0.update([u8::from(field.is_some())]);
        self.add(field.unwrap_or_default());
    }

    fn finish(self) -> Fingerprint {
        Fingerprint(self.0.finalize().into())
    }
}

/// The URI that the client sent. A nested router removes its prefix from that of the request, and
/// two routes could have the same path.
fn uri(head: &Parts) -> &Uri {
    #[cfg(feature = "axum")]
    if let Some(OriginalUri(uri)) = head.extensions.get() {
        return uri;
    }
    &head.uri
}

/// The media type without parameters, in lower case.
fn media_type(headers: &HeaderMap) -> Option<Vec<u8>> {
    let value = headers.get(CONTENT_TYPE)?.as_bytes();
    let essence = value.split(|&byte| byte == b';').next().unwrap_or_default();
    Some(essence.trim_ascii().to_ascii_lowercase())
}

/// The list of encodings, without spaces and in lower case. One line or several are the same list.
fn content_encodings(headers: &HeaderMap) -> Vec<u8> {
    let lines: Vec<_> = headers.get_all(CONTENT_ENCODING).iter().map(HeaderValue::as_bytes).collect();
    lines.join(&b',').into_iter().filter(|byte| !b" \t".contains(byte)).map(|byte| byte.to_ascii_lowercase()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use http::Request;

    use super::*;

    fn head(method: &str, uri: &str, media_type: Option<&str>) -> Parts {
        let mut request = Request::builder().method(method).uri(uri);
        if let Some(value) = media_type {
            request = request.header(CONTENT_TYPE, value);
        }
        request.body(()).expect("a request").into_parts().0
    }

    fn of(method: &str, uri: &str, media_type: Option<&str>, body: &str) -> [u8; 32] {
        Fingerprint::of_request(&head(method, uri, media_type), body.as_bytes()).0
    }

    #[test]
    fn each_part_of_a_request_changes_its_fingerprint() {
        let json = Some("application/json");
        let base = of("POST", "/claim?a=1", json, "{}");
        assert_eq!(base, of("POST", "/claim?a=1", json, "{}"));
        for (what, other) in [
            ("method", of("PUT", "/claim?a=1", json, "{}")),
            ("path", of("POST", "/claims?a=1", json, "{}")),
            ("query", of("POST", "/claim?a=2", json, "{}")),
            ("no query", of("POST", "/claim", json, "{}")),
            ("media type", of("POST", "/claim?a=1", Some("text/json"), "{}")),
            ("no media type", of("POST", "/claim?a=1", None, "{}")),
            ("body", of("POST", "/claim?a=1", json, "{} ")),
        ] {
            assert_ne!(base, other, "{what}");
        }
    }

    #[test]
    fn spelling_of_the_media_type_and_other_headers_do_not_matter() {
        let base = of("POST", "/", Some("application/json"), "");
        for value in
            ["application/JSON", "Application/Json; charset=utf-8", "application/json ;q=1", "application/json;"]
        {
            assert_eq!(of("POST", "/", Some(value), ""), base, "{value}");
        }
        let mut signed = head("POST", "/", Some("application/json"));
        signed.headers.insert("signature", http::HeaderValue::from_static("sig1=:abc=:"));
        assert_eq!(Fingerprint::of_request(&signed, b"").0, base);
    }

    #[test]
    fn missing_and_empty_fields_are_different() {
        let all = [
            of("POST", "/", None, ""),
            of("POST", "/?", None, ""),
            of("POST", "/", Some(""), ""),
            of("POST", "/?", Some(""), ""),
        ];
        for (n, a) in all.iter().enumerate() {
            assert!(all[..n].iter().all(|b| a != b), "number {n} equals one before it");
        }
    }

    /// Random requests over an alphabet so small that their fields often join to the same text.
    #[test]
    fn different_requests_have_different_fingerprints() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut seen = HashMap::new();
        for _ in 0..20_000 {
            let mut text = |least: usize| -> String {
                (0..rng.usize(least..4)).map(|_| char::from(*rng.choice(b"ab").expect("not empty"))).collect()
            };
            let (method, path, query, media, body) = (text(1), text(0), text(0), text(0), text(0));
            let has_query = rng.bool();
            let uri = if has_query { format!("/{path}?{query}") } else { format!("/{path}") };
            let media = rng.bool().then_some(media);
            let fingerprint = of(&method, &uri, media.as_deref(), &body);
            let request = (method, uri, media, body);
            let earlier = seen.entry(fingerprint).or_insert_with(|| request.clone());
            assert_eq!(*earlier, request);
        }
        assert!(seen.len() > 10_000, "{} different requests", seen.len());
    }

    #[test]
    fn values_replace_query_media_type_and_body() {
        let of = |method, uri, key: LockKey| Fingerprint::of_values(&head(method, uri, None), &key).0;
        let base = of("POST", "/claim?a=1", LockKey::from(("claim", 7)));
        assert_eq!(base, of("POST", "/claim?a=2", LockKey::from(("claim", "7"))));
        assert_ne!(base, of("POST", "/claim?a=1", LockKey::from(("claim", 8))), "values");
        assert_ne!(base, of("PATCH", "/claim?a=1", LockKey::from(("claim", 7))), "method");
        assert_ne!(base, of("POST", "/other?a=1", LockKey::from(("claim", 7))), "path");
        assert_ne!(base, of("POST", "/claim?a=1", LockKey::raw("claim:7").expect("a name")), "raw key");
    }

    #[cfg(feature = "axum")]
    #[test]
    fn nested_routes_have_their_whole_path() {
        let nested = |original: &'static str| {
            let mut head = head("POST", "/claim", None);
            head.extensions.insert(OriginalUri(Uri::from_static(original)));
            Fingerprint::of_request(&head, b"").0
        };
        assert_ne!(nested("/a/claim"), nested("/b/claim"));
        assert_eq!(nested("/claim"), of("POST", "/claim", None, ""));
    }
}
