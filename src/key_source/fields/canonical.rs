//! One value, one text: what is spelled in another way is brought to it, or refused.

use std::borrow::Cow;

use crate::rejection::field_error::FieldProblem;

/// The text that stands in the key for this one, as the client wrote it.
pub(super) fn normal(text: Cow<'_, str>) -> Result<Cow<'_, str>, FieldProblem> {
    if text.is_empty() {
        return Err(FieldProblem::Empty);
    }
    // A handler that trims would see another text.
    let is_trimmed = |c: char| c.is_whitespace() || c.is_control();
    if text.starts_with(is_trimmed) || text.ends_with(is_trimmed) {
        return Err(FieldProblem::SurroundingWhitespace);
    }
    // Before it may be a UUID: 32 digits with zeros in front are a small number to whoever parses one.
    if reads_as_number(&text) && !is_plain_integer(&text) {
        return Err(FieldProblem::NonCanonicalNumber);
    }
    Ok(hyphenated_uuid(&text).map_or(text, Cow::Owned))
}

/// Whether Rust parses it as an integer or a float. Not `inf` and `nan`: they are names as well.
fn reads_as_number(text: &str) -> bool {
    text.bytes().any(|byte| byte.is_ascii_digit()) && text.parse::<f64>().is_ok()
}

/// Spelled as `Display` spells an integer.
fn is_plain_integer(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    text == "0" || (digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0') && !digits.is_empty())
}

/// A UUID in any spelling that is parsed as one, in the usual one.
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
    let has_its_form = uuid.char_indices().all(|(at, c)| match at {
        8 | 13 | 18 | 23 => c == '-',
        _ => c.is_ascii_hexdigit(),
    });
    has_its_form.then_some(uuid)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spelled(text: &str) -> Result<String, FieldProblem> {
        normal(text.into()).map(Cow::into_owned)
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
            assert_eq!(spelled(text).as_deref(), Ok(text));
        }
    }

    #[test]
    fn blank_padded_and_empty_values_are_rejected() {
        assert_eq!(spelled(""), Err(FieldProblem::Empty));
        for text in [" ", " 1", "1 ", "a\n", "\ta", "a\0", "\u{a0}a", "a\u{2003}", "a\u{7f}", "\u{85}a", "\u{3000}"] {
            assert_eq!(spelled(text), Err(FieldProblem::SurroundingWhitespace), "{text:?}");
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
            assert_eq!(spelled(text), Err(FieldProblem::NonCanonicalNumber), "{text:?}");
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
            assert_eq!(spelled(text).as_deref(), Ok(usual), "{text}");
        }
        // All digits: the number and the UUID are one key.
        let digits = "12345678901234567890123456789012";
        assert_eq!(spelled(digits).as_deref(), Ok("12345678-9012-3456-7890-123456789012"));
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
            assert_eq!(spelled(text).as_deref(), Ok(text), "no UUID");
        }
    }

    proptest! {
        /// Two texts that a handler would parse as one value are one key, or refused.
        #[test]
        fn equal_values_have_one_canonical_text(
            a in any::<i64>(),
            small in any::<u16>(),
            u in any::<u128>(),
            width in 0..48_usize,
            text in "[ +-]?[0-9.eE]{0,12}| ?[0-9a-fA-F]{32}",
        ) {
            prop_assert_eq!(spelled(&a.to_string()), Ok(a.to_string()));
            prop_assert!(spelled(&u.to_string()).is_ok());
            for text in [&text, &format!("{small:0width$}"), &format!("{small:032}")] {
                if let (Ok(n), Ok(key)) = (text.parse::<u128>(), spelled(text)) {
                    prop_assert_eq!(spelled(&n.to_string()), Ok(key));
                }
            }
            if let Ok(n) = text.parse::<f64>() {
                let is_simple_uuid = text.len() == 32;
                prop_assert!(spelled(&text).is_err() || is_simple_uuid || n.to_string() == text || n.abs() >= 1e15);
            }
        }
    }
}
