//! Text in a page. Each text that another program may have chosen is written by one of these types.

use std::{
    fmt::{self, Write},
    time::Duration,
};

use crate::{limits::MAX_SHOWN_KEY_BYTES, lock_key::LockKey};

/// A text in HTML, in an element or in an attribute with quotes.
pub(super) struct Text<T>(pub(super) T);

/// The text of a key in HTML, cut if it is long. Its direction ends with it.
pub(super) struct KeyText<'a>(pub(super) &'a LockKey);

/// A time in the unit that a reader needs.
pub(super) struct Short(pub(super) Duration);

/// A number of things.
pub(super) struct Count(pub(super) usize, pub(super) &'static str, pub(super) &'static str);

/// Escapes what is written to it.
struct Escaped<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Escaped<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|c| match c {
            '&' => self.0.write_str("&amp;"),
            '<' => self.0.write_str("&lt;"),
            '>' => self.0.write_str("&gt;"),
            '"' => self.0.write_str("&quot;"),
            '\'' => self.0.write_str("&#39;"),
            c if c.is_control() || is_of_direction(c) => write!(self.0, "{}", c.escape_unicode()),
            c => self.0.write_char(c),
        })
    }
}

/// Whether the character changes the direction of others, and could fake another key.
fn is_of_direction(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

impl<T: fmt::Display> fmt::Display for Text<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaped(f), "{}", self.0)
    }
}

impl fmt::Display for KeyText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.as_str();
        // `str::floor_char_boundary` is newer than the lowest version of Rust.
        let end = (0..=MAX_SHOWN_KEY_BYTES.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
        let shown = &text[..end.unwrap_or(0)];
        let rest = if shown.len() < text.len() { "…" } else { "" };
        write!(f, "<bdi>{}{rest}</bdi>", Text(shown))
    }
}

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs() {
            0 => write!(f, "{} ms", self.0.as_millis()),
            s @ ..10 => write!(f, "{s}.{} s", self.0.subsec_millis() / 100),
            s @ ..120 => write!(f, "{s} s"),
            s @ ..7_200 => write!(f, "{} min", s / 60),
            s @ ..172_800 => write!(f, "{} h", s / 3_600),
            s => write!(f, "{} days", s / 86_400),
        }
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(count, one, several) = self;
        write!(f, "{count} {}", if *count == 1 { one } else { several })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_client_is_neither_markup_nor_hidden() {
        let text = "<script>&\"'\n\u{7f}\u{202e}\u{2066}\u{2069}\u{200e}\u{200f}\u{61c}é";
        assert_eq!(
            Text(text).to_string(),
            "&lt;script&gt;&amp;&quot;&#39;\\u{a}\\u{7f}\\u{202e}\\u{2066}\\u{2069}\\u{200e}\\u{200f}\\u{61c}é"
        );
    }

    #[test]
    fn long_key_is_cut_between_two_characters() {
        let cut = |name: &str| KeyText(&LockKey::raw(name).expect("valid")).to_string();
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
            assert_eq!(Short(Duration::from_millis(ms)).to_string(), text);
        }
    }
}
