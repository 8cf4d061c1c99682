//! The canonical form of the text of a field: one text for each value.

use std::borrow::Cow;

use crate::rejection::field_error::FieldProblem;

/// Converts the text to its canonical form, or rejects it.
pub(super) fn canonicalize(text: Cow<'_, str>) -> Result<Cow<'_, str>, FieldProblem> {
    if text.is_empty() {
        return Err(FieldProblem::Empty);
    }
    // A handler that trims would see another text.
    let is_trimmed = |c: char| c.is_whitespace() || c.is_control();
    if text.starts_with(is_trimmed) || text.ends_with(is_trimmed) {
        return Err(FieldProblem::SurroundingWhitespace);
    }
    // Before the check for UUIDs: 32 digits with leading zeros are a small number to a handler that
    // parses numbers.
    if parses_as_number(&text) && !is_canonical_integer(&text) {
        return Err(FieldProblem::NonCanonicalNumber);
    }
    Ok(hyphenated_uuid(&text).map_or(text, Cow::Owned))
}

/// Whether Rust parses the text as an integer or a float. `inf` and `nan` are excluded, because
/// they are names, too.
fn parses_as_number(text: &str) -> bool {
    text.bytes().any(|byte| byte.is_ascii_digit()) && text.parse::<f64>().is_ok()
}

/// Whether `Display` would write an integer like this.
fn is_canonical_integer(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    text == "0" || (digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0') && !digits.is_empty())
}

/// The hyphenated, lower-case form of a UUID. Hand-written: the crate `uuid` is optional, and each
/// form that it parses must be recognized.
fn hyphenated_uuid(text: &str) -> Option<String> {
    const URN: &str = "urn:uuid:";
    let digits = match text.get(..URN.len()) {
        Some(prefix) if prefix.eq_ignore_ascii_case(URN) => &text[URN.len()..],
        _ => text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).unwrap_or(text),
    };
    let mut uuid = String::with_capacity(36);
    match digits.len() {
        32 => {
            for (at, digit) in digits.char_indices() {
                if matches!(at, 8 | 12 | 16 | 20) {
                    uuid.push('-');
                }
                uuid.push(digit);
            }
        }
        36 => uuid.push_str(digits),
        _ => return None,
    }
    uuid.make_ascii_lowercase();
    let is_valid = uuid.char_indices().all(|(at, c)| match at {
        8 | 13 | 18 | 23 => c == '-',
        _ => c.is_ascii_hexdigit(),
    });
    is_valid.then_some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(text: &str) -> Result<String, FieldProblem> {
        canonicalize(text.into()).map(Cow::into_owned)
    }

    #[test]
    fn plain_text_is_unchanged() {
        for text in [
            "0",
            "1",
            "-1",
            "42",
            "18446744073709551617",
            "gold",
            "Gold",
            "a b",
            "é",
            "a\tb",
            "true",
            "inf",
            "nan",
            "NaN",
            "-",
            "1.2.3",
            "10.0.0.1",
            "1_000",
            "1,5",
            "0x10",
            "2024-01-02",
            "１",
            "e1",
            "1e",
            "00-11",
            "٧",
            "a\u{200b}",
        ] {
            assert_eq!(canonical(text).as_deref(), Ok(text));
        }
    }

    #[test]
    fn blank_padded_and_empty_values_are_rejected() {
        assert_eq!(canonical(""), Err(FieldProblem::Empty));
        for text in [" ", " 1", "1 ", "a\n", "\ta", "a\0", "\u{a0}a", "a\u{2003}", "a\u{7f}", "\u{85}a", "\u{3000}"] {
            assert_eq!(canonical(text), Err(FieldProblem::SurroundingWhitespace), "{text:?}");
        }
    }

    #[test]
    fn numbers_have_one_canonical_form() {
        for text in [
            "01",
            "00",
            "+1",
            "+0",
            "-0",
            "-01",
            "1.0",
            "1.",
            ".5",
            "1.5",
            "1e0",
            "1E3",
            "1e400",
            "-1.0",
            "+.5",
            "1e-2",
            "00000000000000000000000000000001",
            "1e000000000000000000000000000003",
        ] {
            assert_eq!(canonical(text), Err(FieldProblem::NonCanonicalNumber), "{text:?}");
        }
    }

    #[test]
    fn uuid_has_its_hyphenated_text() {
        let usual = "67e55044-10b1-426f-9247-bb680e5fe0c8";
        for text in [
            usual,
            "67E55044-10B1-426F-9247-BB680E5FE0C8",
            "67e5504410b1426f9247bb680e5fe0c8",
            "{67e55044-10b1-426f-9247-bb680e5fe0c8}",
            "{67e5504410b1426f9247bb680e5fe0c8}",
            "urn:uuid:67e55044-10b1-426f-9247-bb680e5fe0c8",
            "URN:UUID:67E5504410b1426f9247bb680e5fe0c8",
        ] {
            assert_eq!(canonical(text).as_deref(), Ok(usual), "{text}");
        }
        // All digits: the number and the UUID are one key.
        let digits = "12345678901234567890123456789012";
        assert_eq!(canonical(digits).as_deref(), Ok("12345678-9012-3456-7890-123456789012"));
        for text in [
            "67e55044-10b1-426f-9247-bb680e5fe0c",
            "67e5504410b1-426f-9247-bb680e5fe0c80",
            "é7e55044-10b1-426f-9247-bb680e5fe0c8",
            "{67e55044-10b1-426f-9247-bb680e5fe0c8",
            "x7e5504410b1426f9247bb680e5fe0c8",
            "urn:uuid:",
            "urn:uuidé",
            "{}",
        ] {
            assert_eq!(canonical(text).as_deref(), Ok(text), "no UUID");
        }
    }

    /// Two texts that a handler parses as one value have one canonical form, or are rejected.
    #[test]
    fn equal_values_have_one_canonical_text() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..5_000 {
            let (number, big, small) = (rng.i64(..), rng.u128(..), rng.u16(..));
            assert_eq!(canonical(&number.to_string()), Ok(number.to_string()));
            assert!(canonical(&big.to_string()).is_ok(), "{big}");
            let mut random = |alphabet: &[u8], len| -> String {
                std::iter::repeat_with(|| char::from(*rng.choice(alphabet).expect("not empty"))).take(len).collect()
            };
            let (sign, blank) = (random(b" +-", 1), random(b" ", 1));
            let (digits, hex) = (random(b"0123456789.eE", small as usize % 13), random(b"0123456789abcdefABCDEF", 32));
            let width = small as usize % 48;
            let (padded, simple_uuid) = (format!("{small:0width$}"), format!("{small:032}"));
            for text in [&digits, &(sign + &digits), &hex, &(blank + &hex), &padded, &simple_uuid] {
                if let (Ok(n), Ok(key)) = (text.parse::<u128>(), canonical(text)) {
                    assert_eq!(canonical(&n.to_string()), Ok(key), "{text:?}");
                }
                if let Ok(n) = text.parse::<f64>() {
                    let is_simple_uuid = text.len() == 32;
                    let is_exact = n.to_string() == *text || n.abs() >= 1e15;
                    assert!(canonical(text).is_err() || is_simple_uuid || is_exact, "{text:?}");
                }
            }
        }
    }
}
