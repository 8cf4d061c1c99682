//! Requests that no page of another site can send.

use http::HeaderMap;

/// Whether a page of this origin has sent the request, or a program that says so. A browser sets
/// `Sec-Fetch-Site` itself, over HTTPS and on localhost, and sends the other header to another
/// origin only if that permits it.
pub(crate) fn is_same_origin(headers: &HeaderMap) -> bool {
    let has = |name: &str, expected: &str| headers.get(name).is_some_and(|value| value == expected);
    has("sec-fetch-site", "same-origin") || has("x-tower-lock", "1")
}
