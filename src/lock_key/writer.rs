//! The text of a key: escaped, bounded, and hashed if it is too long.

use std::{fmt, sync::Arc};

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
pub(super) fn hex(hash: Sha256) -> String {
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
        // Letters without a visible glyph.
        '\u{115f}' | '\u{1160}' | '\u{3164}' | '\u{ffa0}' => false,
        // Of other scripts, only letters and digits: invisible and bidirectional characters could
        // fake a key in a log.
        _ => c.is_alphanumeric(),
    }
}

fn escape(byte: u8, out: &mut [u8; 3]) -> &str {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    *out = [b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]];
    std::str::from_utf8(out).expect("three ASCII characters")
}
