//! Text in a page. Each text that another program may have chosen passes one of these functions.

use std::{fmt::Display, time::Duration};

use crate::{limits::MAX_SHOWN_KEY_BYTES, lock_key::LockKey};

/// A text in HTML, in an element or in an attribute with quotes.
pub(super) fn text(text: impl Display) -> String {
    let mut escaped = String::new();
    for c in text.to_string().chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c if c.is_control() => escaped.extend(c.escape_unicode()),
            // They change the direction of other characters, and could fake another key.
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                escaped.extend(c.escape_unicode());
            }
            c => escaped.push(c),
        }
    }
    escaped
}

/// The text of a key in HTML, cut if it is long. Its direction ends with it.
pub(super) fn key_text(key: &LockKey) -> String {
    let name = key.as_str();
    // `str::floor_char_boundary` is newer than the lowest version of Rust.
    let end = (0..=MAX_SHOWN_KEY_BYTES.min(name.len())).rev().find(|at| name.is_char_boundary(*at)).unwrap_or(0);
    format!("<bdi>{}{}</bdi>", text(&name[..end]), if end < name.len() { "…" } else { "" })
}

/// A time in the unit that a reader needs.
pub(super) fn short(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        s @ ..10 => format!("{s}.{} s", time.subsec_millis() / 100),
        s @ ..120 => format!("{s} s"),
        s @ ..7_200 => format!("{} min", s / 60),
        s @ ..172_800 => format!("{} h", s / 3_600),
        s => format!("{} days", s / 86_400),
    }
}

/// A number of things.
pub(super) fn count(count: usize, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_client_is_neither_markup_nor_hidden() {
        let text = "<script>&\"'\n\u{7f}\u{202e}\u{2066}\u{2069}\u{200e}\u{200f}\u{61c}é";
        assert_eq!(
            super::text(text),
            "&lt;script&gt;&amp;&quot;&#39;\\u{a}\\u{7f}\\u{202e}\\u{2066}\\u{2069}\\u{200e}\\u{200f}\\u{61c}é"
        );
    }

    #[test]
    fn long_key_is_cut_between_two_characters() {
        let cut = |name: &str| key_text(&LockKey::raw(name).expect("valid"));
        assert_eq!(cut(&"x".repeat(256)), format!("<bdi>{}</bdi>", "x".repeat(256)));
        assert_eq!(cut(&"x".repeat(257)), format!("<bdi>{}…</bdi>", "x".repeat(256)));
        assert_eq!(cut(&format!("x{}", "é".repeat(200))), format!("<bdi>x{}…</bdi>", "é".repeat(127)));
    }

    #[test]
    fn times_have_the_unit_that_a_reader_needs() {
        let times = [
            (999, "999 ms"),
            (1_999, "1.9 s"),
            (10_900, "10 s"),
            (120_000, "2 min"),
            (7_200_000, "2 h"),
            (172_800_000, "2 days"),
        ];
        for (ms, text) in times {
            assert_eq!(short(Duration::from_millis(ms)), text);
        }
    }
}
