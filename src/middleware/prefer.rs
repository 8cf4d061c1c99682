//! The preference `Prefer: wait=10`: how long a client is willing to wait (RFC 7240).

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};

const PREFER: HeaderName = HeaderName::from_static("prefer");
const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// The wait that the client chose, at most `max`. `None` without a valid preference.
///
/// Hand-written: the header is no structured field (RFC 9651), because names are case-insensitive
/// and values may be quoted.
pub(super) fn requested_wait(headers: &HeaderMap, max: Duration) -> Option<Duration> {
    let lines = headers.get_all(PREFER);
    let preferences = lines.iter().filter_map(|line| line.to_str().ok()).flat_map(preferences);
    for preference in preferences {
        // Parameters of a preference follow a `;`.
        let (name, value) = preference.split(';').next()?.split_once('=').unwrap_or((preference, ""));
        if name.trim().eq_ignore_ascii_case("wait") {
            // The first preference counts.
            let value = value.trim();
            let seconds = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
            let is_number = !seconds.is_empty() && seconds.bytes().all(|byte| byte.is_ascii_digit());
            return is_number.then(|| seconds.parse().map_or(max, Duration::from_secs).min(max));
        }
    }
    None
}

/// Splits at commas outside of quotes.
fn preferences(line: &str) -> impl Iterator<Item = &str> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    line.split(move |c| {
        let is_end = c == ',' && !is_quoted;
        is_quoted ^= c == '"' && !is_escaped;
        is_escaped = is_quoted && c == '\\' && !is_escaped;
        is_end
    })
}

/// Sets `Preference-Applied`, in whole seconds, rounded down.
pub(super) fn set_applied(headers: &mut HeaderMap, wait: Duration) {
    let value = HeaderValue::try_from(format!("wait={}", wait.as_secs())).expect("a number is a valid header value");
    // Replaces the header of an inner layer.
    headers.insert(PREFERENCE_APPLIED, value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefer_header_is_parsed_as_in_rfc_7240() {
        const S: Duration = Duration::from_secs(1);
        for (lines, wait_s) in [
            (&["wait=3"][..], Some(3)),
            (&["respond-async, wait=3"], Some(3)),
            (&["respond-async; x=\"y\"", "WAIT = \"3\" ; z"], Some(3)),
            (&["wait=4, wait=5"], Some(4)),
            (&["wait=4", "wait=5"], Some(4)),
            (&["x=\"a, wait=5\", wait=3"], Some(3)),
            (&["x=\"a\\\", wait=5\", wait=3"], Some(3)),
            (&["x=\"a,wait=9,b\""], None),
            (&["wait=60"], Some(10)),
            (&["wait=99999999999999999999999"], Some(10)),
            (&["wait=0"], Some(0)),
            (&["wait"], None),
            (&["wait="], None),
            (&["wait=-1"], None),
            (&["wait=+1"], None),
            (&["wait=1.5"], None),
            (&["waiting=3"], None),
            (&["return=minimal"], None),
            (&[""], None),
            (&[], None),
        ] {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(PREFER, HeaderValue::from_static(line));
            }
            assert_eq!(requested_wait(&headers, 10 * S), wait_s.map(|s| s * S), "{lines:?}");
        }
    }
}
