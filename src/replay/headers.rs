//! Which headers of an answer are kept.

use http::{
    HeaderMap, HeaderName,
    header::{AGE, CONNECTION, CONTENT_LENGTH, DATE, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE},
};

/// Headers of one connection or of the framing of one message, besides `proxy-*` and the names in
/// `connection`.
const OF_THE_MESSAGE: [HeaderName; 7] =
    [CONNECTION, CONTENT_LENGTH, HeaderName::from_static("keep-alive"), TE, TRAILER, TRANSFER_ENCODING, UPGRADE];

/// Headers that are about the first attempt, or for its client alone.
const OF_THE_FIRST_ATTEMPT: [HeaderName; 7] = [
    AGE,
    HeaderName::from_static("authentication-info"),
    DATE,
    HeaderName::from_static("preference-applied"),
    HeaderName::from_static("server-timing"),
    SET_COOKIE,
    HeaderName::from_static("traceparent"),
];

/// Selects the headers of an answer that a retry gets.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeaderFilter {
    /// The headers of the application, and whether each is kept. The last one of a name wins.
    rules: Vec<(HeaderName, bool)>,
}

impl HeaderFilter {
    /// The names for [`keep`](Self::keep).
    ///
    /// # Panics
    ///
    /// Panics if one of them belongs to a connection or to the framing of a message.
    #[track_caller]
    pub(crate) fn check(names: impl IntoIterator<Item = HeaderName>) -> Vec<HeaderName> {
        let names: Vec<_> = names.into_iter().collect();
        if let Some(name) = names.iter().find(|name| is_of_the_message(name)) {
            panic!("`keep_headers`: `{name}` belongs to one message and cannot be kept");
        }
        names
    }

    /// Keeps these headers, too.
    pub(crate) fn keep(&mut self, names: impl IntoIterator<Item = HeaderName>) {
        self.rules.extend(names.into_iter().map(|name| (name, true)));
    }

    /// Does not keep these headers.
    pub(crate) fn drop(&mut self, names: impl IntoIterator<Item = HeaderName>) {
        self.rules.extend(names.into_iter().map(|name| (name, false)));
    }

    /// The headers that are kept, in their order and with repeated ones.
    pub(crate) fn apply(&self, headers: &HeaderMap) -> HeaderMap {
        let of_the_connection: Vec<_> = connection_names(headers).collect();
        let is_kept = |name: &HeaderName| {
            let is_listed =
                of_the_connection.iter().any(|listed| listed.eq_ignore_ascii_case(name.as_str().as_bytes()));
            !is_listed && self.keeps(name)
        };
        let mut kept = HeaderMap::new();
        for (name, value) in headers.iter().filter(|(name, _)| is_kept(name)) {
            kept.append(name, value.clone());
        }
        kept
    }

    fn keeps(&self, name: &HeaderName) -> bool {
        if is_of_the_message(name) {
            return false;
        }
        let rule = self.rules.iter().rev().find(|(ruled, _)| ruled == name);
        rule.map_or_else(|| !OF_THE_FIRST_ATTEMPT.contains(name), |(_, is_kept)| *is_kept)
    }
}

/// Whether a header belongs to one message, and not to the answer in it.
pub(crate) fn is_of_the_message(name: &HeaderName) -> bool {
    OF_THE_MESSAGE.contains(name) || name.as_str().starts_with("proxy-")
}

/// The names that `connection` lists.
fn connection_names(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let values = headers.get_all(CONNECTION).into_iter();
    values.flat_map(|value| value.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn map(headers: &[(&'static str, &[u8])]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_bytes(value).expect("a value"));
        }
        map
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        headers.keys().map(HeaderName::as_str).collect()
    }

    #[test]
    fn headers_of_the_connection_and_the_first_attempt_are_dropped() {
        let headers = map(&[
            ("content-type", b"text/plain"),
            ("connection", b"close, X-Hop"),
            ("connection", b"x-second"),
            ("x-hop", b"1"),
            ("x-second", b"1"),
            ("keep-alive", b"timeout=5"),
            ("te", b"trailers"),
            ("trailer", b"x-sum"),
            ("transfer-encoding", b"chunked"),
            ("upgrade", b"h2c"),
            ("proxy-authenticate", b"Basic"),
            ("proxy-connection", b"close"),
            ("content-length", b"3"),
            ("date", b"Sun, 06 Nov 1994 08:49:37 GMT"),
            ("set-cookie", b"a=1"),
            ("server-timing", b"db;dur=53"),
            ("traceparent", b"00-0-0-00"),
            ("location", b"/rewards/7"),
            ("etag", b"\"7\""),
        ]);
        assert_eq!(names(&HeaderFilter::default().apply(&headers)), ["content-type", "location", "etag"]);
    }

    #[test]
    fn order_repetitions_and_bytes_survive() {
        let headers = map(&[
            ("x-last", b"z"),
            ("link", b"</a>; rel=\"next\""),
            ("x-bytes", b"caf\xe9 \xff"),
            ("link", b"</b>; rel=\"prev\""),
            ("a-first", b""),
        ]);
        let kept = HeaderFilter::default().apply(&headers);
        assert!(kept.iter().eq(headers.iter()), "{kept:?}");
        assert_eq!(kept.get_all("link").iter().count(), 2);
    }

    #[test]
    fn application_adds_and_removes_headers() {
        let headers =
            map(&[("set-cookie", b"a=1"), ("set-cookie", b"b=2"), ("x-request-id", b"7"), ("etag", b"\"7\"")]);
        let mut filter = HeaderFilter::default();
        filter.keep([SET_COOKIE]);
        filter.drop([HeaderName::from_static("x-request-id"), http::header::ETAG]);
        let kept = filter.apply(&headers);
        assert_eq!(names(&kept), ["set-cookie"]);
        assert_eq!(kept.get_all(SET_COOKIE).iter().count(), 2);
        filter.keep([http::header::ETAG]);
        assert_eq!(names(&filter.apply(&headers)), ["set-cookie", "etag"], "the last call wins");
    }

    #[test]
    fn kept_header_that_connection_lists_is_dropped() {
        let mut filter = HeaderFilter::default();
        filter.keep([SET_COOKIE]);
        let headers = map(&[("connection", b"set-cookie"), ("set-cookie", b"a=1")]);
        assert!(filter.apply(&headers).is_empty());
    }

    #[test]
    #[should_panic(expected = "`transfer-encoding` belongs to one message")]
    fn framing_cannot_be_kept() {
        let _ = HeaderFilter::check([TRANSFER_ENCODING]);
    }
}
