//! The text of a key: escaped, bounded, and hashed if it is too long.

use std::{fmt, ops::RangeInclusive, sync::Arc};

use sha2::{Digest, Sha256};

use crate::limits::MAX_KEY_BYTES;

/// Writer for the text of a key, in a buffer on the stack.
#[doc(hidden)]
pub struct KeyWriter {
    text: [u8; MAX_KEY_BYTES],
    len: usize,
    /// The length of the namespace.
    namespace_len: usize,
    /// Hashes the whole text, once it exceeds the buffer.
    hasher: Option<Sha256>,
}

/// `~` and 128 bits in hex.
const HASH_BYTES: usize = 1 + 32;

impl KeyWriter {
    pub(super) fn empty() -> Self {
        Self { text: [0; MAX_KEY_BYTES], len: 0, namespace_len: 0, hasher: None }
    }

    pub(crate) fn new(namespace: &'static str) -> Self {
        let mut key = Self::empty();
        key.namespace(namespace);
        key
    }

    pub(super) fn namespace(&mut self, namespace: &str) {
        self.push_escaped(namespace);
        self.namespace_len = self.len;
    }

    /// A namespace of this crate. `+` is escaped in every other one.
    pub(crate) fn reserved(&mut self, namespace: &'static str) {
        self.push("+");
        self.push(namespace);
        self.namespace_len = self.len;
    }

    pub(super) fn push(&mut self, text: &str) {
        let text = text.as_bytes();
        let fits = text.len().min(MAX_KEY_BYTES - self.len);
        if fits < text.len() && self.hasher.is_none() {
            self.hasher = Some(Sha256::new_with_prefix(&self.text[..self.len]));
        }
        if let Some(long) = &mut self.hasher {
            long.update(text);
        }
        self.text[self.len..self.len + fits].copy_from_slice(&text[..fits]);
        self.len += fits;
    }

    pub(super) fn push_escaped(&mut self, text: &str) {
        let mut plain_from = 0;
        for (at, c) in text.char_indices() {
            if is_plain(c) {
                continue;
            }
            self.push(&text[plain_from..at]);
            plain_from = at + c.len_utf8();
            for byte in text[at..plain_from].bytes() {
                self.push(escape(byte, &mut [0; 3]));
            }
        }
        self.push(&text[plain_from..]);
    }

    pub(super) fn finish(&mut self) -> Arc<str> {
        match self.hasher.take() {
            None => compose(&self.text[..self.len], None),
            Some(long) => compose(&self.text[..MAX_KEY_BYTES - HASH_BYTES], Some(long)),
        }
    }

    pub(super) fn finish_hashed(mut self) -> Arc<str> {
        let hash = self.hasher.take().unwrap_or_else(|| Sha256::new_with_prefix(&self.text[..self.len]));
        self.len = self.namespace_len.min(MAX_KEY_BYTES - HASH_BYTES - 1);
        self.push(":");
        compose(&self.text[..self.len], Some(hash))
    }
}

impl fmt::Debug for KeyWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyWriter").field("len", &self.len).finish_non_exhaustive()
    }
}

/// `text` may end within a character, because a long text is cut; that character is dropped.
fn compose(text: &[u8], hash: Option<Sha256>) -> Arc<str> {
    let text = text.utf8_chunks().next().map_or("", |chunk| chunk.valid());
    match hash {
        None => Arc::from(text),
        Some(hash) => Arc::from(format!("{text}~{}", hex(hash))),
    }
}

/// The first 128 bits in hex.
pub(crate) fn hex(hash: Sha256) -> String {
    use fmt::Write;

    hash.finalize()[..16].iter().fold(String::with_capacity(32), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Whether a character is not escaped. `:` separates, `%` escapes, `~` marks a hash, `+` a
/// namespace of this crate; braces are hash tags in Redis, brackets are patterns.
fn is_plain(c: char) -> bool {
    match c {
        ':' | '%' | '~' | '+' | '{' | '}' | '[' | ']' | '*' | '?' | '\\' | '"' | '\'' => false,
        '!'..='~' => true,
        _ => LETTERS.iter().any(|letters| letters.contains(&c)),
    }
}

/// Whether a composed key may have this character: plain, or a mark of its own.
pub(super) fn is_of_text(c: char) -> bool {
    matches!(c, ':' | '%' | '~' | '+') || is_plain(c)
}

/// Letters and digits of the scripts that most languages use. All others are escaped: invisible and
/// bidirectional characters could fake a key in a log. Not those of the standard library, which
/// each release of Rust may extend: two builds of one service would lock different keys.
const LETTERS: [RangeInclusive<char>; 23] = [
    // Latin
    'À'..='Ö',
    'Ø'..='ö',
    'ø'..='ɏ',
    'Ḁ'..='ỿ',
    // Greek, Cyrillic, Armenian, Georgian
    'Ύ'..='Ρ',
    'Σ'..='ώ',
    'Ѐ'..='ҁ',
    'Ҋ'..='ԧ',
    'Ա'..='Ֆ',
    'ა'..='ჺ',
    // Hebrew, Arabic
    '\u{5d0}'..='\u{5ea}',
    '\u{620}'..='\u{64a}',
    '\u{660}'..='\u{669}',
    '\u{671}'..='\u{6d3}',
    // Devanagari, Thai
    '\u{904}'..='\u{93b}',
    '\u{93d}'..='\u{94c}',
    '\u{e01}'..='\u{e3a}',
    '\u{e40}'..='\u{e46}',
    // Hiragana, Katakana, Hangul, and those of China
    'ぁ'..='ゖ',
    'ァ'..='ヺ',
    '가'..='힣',
    '㐀'..='䶵',
    '一'..='龥',
];

fn escape(byte: u8, out: &mut [u8; 3]) -> &str {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    *out = [b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]];
    std::str::from_utf8(out).expect("three ASCII characters")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another table would let an old and a new instance lock different keys.
    #[test]
    fn letters_are_those_of_one_table() {
        let plain: Vec<_> = ('\u{80}'..=char::MAX).filter(|c| is_plain(*c)).collect();
        assert!(plain.iter().all(|c| c.is_alphanumeric()));
        let text: String = plain.iter().collect();
        assert_eq!(
            (plain.len(), hex(Sha256::new_with_prefix(text)).as_str()),
            (40_235, "f9e7b7dc7f6b72b4c592398edc7571d0")
        );
    }
}
