//! What is locked.

pub(crate) mod part;
pub(crate) mod writer;

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState},
    sync::{Arc, LazyLock},
};

use self::{
    part::{KeyPart, KeyTuple},
    writer::KeyWriter,
};
use crate::limits::MAX_RAW_KEY_BYTES;

/// The name of what is locked: a namespace and parts.
///
/// Made from a tuple whose first element is the namespace. The parts say which one:
///
/// ```
/// # use tower_lock::LockKey;
/// let key = LockKey::from(("reward", 42, "first login"));
/// assert_eq!(key.as_str(), "reward:42:first%20login");
/// ```
///
/// - **Injective**: no two lists of parts give the same text, so no client can spell its way into another one's
///   lock. A part is its text: `1u8` and `"1"` are the same part.
/// - **Readable**: ASCII that is not special, and letters and digits of every script, stay as they are. Escaped, as `%XX`, are
///   the separator `:`, the marks `%`, `~` and `+`, braces, brackets, quotes, `*`, `?`, `\`, blanks and the rest.
/// - **Bounded**: at most 256 bytes. A longer text ends in `~` and 128 bits of the SHA-256 of the whole.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LockKey {
    text: Arc<str>,
    kind: KeyKind,
    /// Of the two, under keys that no client knows: a key is looked up several times, and hashed once.
    hash: u64,
}

/// A map by keys that does not hash them again.
pub(crate) type KeyMap<V> = HashMap<LockKey, V, BuildHasherDefault<PrehashedHasher>>;

/// Takes the hash that a [`LockKey`] has.
#[derive(Debug, Default)]
pub(crate) struct PrehashedHasher(u64);

/// A raw name and a made one are never the same key, whatever their texts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum KeyKind {
    Composed,
    Raw,
}

/// Why a name cannot be a [raw](LockKey::raw) key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RawKeyError {
    /// It has no character.
    Empty,
    /// It has more than 1 024 bytes.
    TooLong,
    /// Its braces name no hash slot, so that what belongs to it would fall into another one.
    Braces,
}

// === impl LockKey ===

impl LockKey {
    /// A namespace and as many parts as there are.
    ///
    /// ```
    /// # use tower_lock::LockKey;
    /// let path = ["eu", "berlin"];
    /// assert_eq!(LockKey::from_parts("shop", path).as_str(), "shop:eu:berlin");
    /// assert_eq!(LockKey::from_parts("shop", path), LockKey::from(("shop", "eu", "berlin")));
    /// ```
    pub fn from_parts<P: KeyPart>(namespace: &'static str, parts: impl IntoIterator<Item = P>) -> Self {
        let mut key = KeyWriter::new(namespace);
        for part in parts {
            key.part(&part);
        }
        key.finish()
    }

    /// The same key with its parts as a hash: for parts that nobody shall read in a dashboard or in the store.
    ///
    /// The hash has no salt: a guess of an e-mail address can be checked. A secret of your instances as the first part prevents that:
    /// `LockKey::hashed(("account", secret, email))` is the same key in each instance, and in all logs.
    ///
    /// ```
    /// # use tower_lock::LockKey;
    /// let key = LockKey::hashed(("account", "ann@example.org"));
    /// assert_eq!(key.as_str(), "account:~8347cf7b44abc7d14fc45016aecb00ac");
    /// ```
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "as `LockKey::from` takes it")]
    pub fn hashed(tuple: impl KeyTuple) -> Self {
        let mut key = KeyWriter::empty();
        tuple.write(&mut key);
        key.finish_hashed()
    }

    /// Exactly this name, such as another service already locks. Never shortened, escaped or prefixed.
    ///
    /// A `RedisStore` refuses such a key if its name begins as those that it makes do, with its prefix and a colon, or with `tower-lock:`.
    ///
    /// # Errors
    ///
    /// No name, a name of more than 1 024 bytes, or one whose braces would let a Redis Cluster keep its line in
    /// another slot than the lock (`a}b`, `a{b`, `x{}y`).
    pub fn raw(name: impl Into<Arc<str>>) -> Result<Self, RawKeyError> {
        let text = name.into();
        if text.is_empty() {
            return Err(RawKeyError::Empty);
        }
        if text.len() > MAX_RAW_KEY_BYTES {
            return Err(RawKeyError::TooLong);
        }
        let tag_is_clear = match text.split_once('{') {
            None => !text.contains('}'),
            Some((_, rest)) => rest.find('}').is_some_and(|tag| tag > 0),
        };
        if !tag_is_clear {
            return Err(RawKeyError::Braces);
        }
        Ok(Self::new(text, KeyKind::Raw))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// What may stand in a log where the parts may not: the namespace, and a hash of the whole, keyed for this process. Without a key,
    /// the parts could be guessed: a processor tries a million account numbers in a second.
    #[cfg(feature = "tracing")]
    pub(crate) fn redacted(&self) -> String {
        use sha2::{Digest, Sha256};

        let namespace = match self.kind {
            KeyKind::Composed => self.text.split(':').next().unwrap_or_default(),
            KeyKind::Raw => "",
        };
        // The one source of random bits in the standard library.
        static KEY: LazyLock<[[u8; 8]; 2]> = LazyLock::new(|| {
            let random = RandomState::new();
            [0, 1].map(|half| random.hash_one(half).to_le_bytes())
        });
        format!("{namespace}:~{}", writer::hex(Sha256::new_with_prefix(KEY.as_flattened()).chain_update(&*self.text)))
    }
}

#[cfg(feature = "redis")]
impl LockKey {
    /// Of this text, as it was read back from a store.
    pub(crate) fn from_composed(text: &str) -> Self {
        Self::new(text.into(), KeyKind::Composed)
    }

    /// Of this raw name, as it was read back from a store.
    pub(crate) fn from_raw_name(name: &str) -> Self {
        Self::new(name.into(), KeyKind::Raw)
    }

    pub(crate) fn is_raw(&self) -> bool {
        self.kind == KeyKind::Raw
    }
}

impl LockKey {
    fn new(text: Arc<str>, spelling: KeyKind) -> Self {
        static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        let hash = KEYS.hash_one((&*text, spelling));
        Self { text, kind: spelling, hash }
    }
}

impl Hash for LockKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl Hasher for PrehashedHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("a key writes its hash");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl<T: KeyTuple> From<T> for LockKey {
    fn from(tuple: T) -> Self {
        let mut key = KeyWriter::empty();
        tuple.write(&mut key);
        key.finish()
    }
}

impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockKey({})", self.text)
    }
}

// === impl RawKeyError ===

impl fmt::Display for RawKeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "the raw name of a lock is empty",
            Self::TooLong => "the raw name of a lock has more than 1024 bytes",
            Self::Braces => "the braces in the raw name of a lock enclose nothing: write `{tag}` or none",
        })
    }
}

impl std::error::Error for RawKeyError {}

#[cfg(test)]
mod tests {
    use std::{borrow::Cow, num::NonZero};

    use sha2::{Digest, Sha256};

    use super::{part::display, writer::hex, *};
    use crate::limits::MAX_KEY_BYTES;

    #[test]
    fn key_text_is_readable() {
        assert_eq!(LockKey::from(("nightly",)).as_str(), "nightly");
        assert_eq!(LockKey::from(("reward", 42, true, 'x', -1_i8)).as_str(), "reward:42:true:x:-1");
        assert_eq!(LockKey::from(("shop", "Käse")).as_str(), "shop:Käse");
        assert_eq!(LockKey::from(("a:b", "c:d {e}")).as_str(), "a%3Ab:c%3Ad%20%7Be%7D");
        assert_eq!(LockKey::from(("shop", "家族", "कुल", "٧")).as_str(), "shop:家族:कुल:٧");
        for unseen in
            "\u{202e}\u{61c}\u{ad}\u{34f}\u{115f}\u{180e}\u{2800}\u{3164}\u{fe0f}\u{fff9}\u{e0041}\u{a0}".chars()
        {
            assert!(LockKey::from(("n", unseen)).as_str().is_ascii(), "{unseen:?} would stand in a log unseen");
        }
        assert_eq!(LockKey::from(("n", u128::MAX, i128::MIN)).as_str().len(), 2 + 39 + 1 + 40);
    }

    #[test]
    fn string_types_and_wrappers_give_the_same_part() {
        let plain = LockKey::from(("n", "7"));
        assert_eq!(plain, LockKey::from(("n", 7_u8)));
        assert_eq!(plain, LockKey::from(("n", NonZero::new(7_i64).expect("not zero"))));
        assert_eq!(plain, LockKey::from(("n", String::from("7"))));
        assert_eq!(plain, LockKey::from(("n", &Arc::<str>::from("7"))));
        assert_eq!(plain, LockKey::from(("n", Box::new(Cow::from("7")))));
        assert_eq!(plain, LockKey::from(("n", display(7))));
        assert_eq!(plain, LockKey::from_parts("n", ["7"]));
    }

    #[test]
    fn long_key_ends_in_a_hash_of_the_whole() {
        for n in [MAX_KEY_BYTES - 2, MAX_KEY_BYTES - 1, MAX_KEY_BYTES, 5000] {
            for c in ["x", "é", "€", " "] {
                let key = LockKey::from(("n", c.repeat(n)));
                assert!(key.as_str().len() <= MAX_KEY_BYTES, "{n} times {c:?} gives {} bytes", key.as_str().len());
                assert_ne!(key, LockKey::from(("n", c.repeat(n + 1))), "one {c:?} more is another key");
            }
        }
        assert!(!LockKey::from(("n", "x".repeat(MAX_KEY_BYTES - 2))).as_str().contains('~'), "just fits");
        assert!(LockKey::from(("n", "x".repeat(MAX_KEY_BYTES - 1))).as_str().contains('~'), "just does not");
        // The hash is the public one, so that an operator can compute it.
        let long = LockKey::from(("n", "x".repeat(300)));
        let whole = hex(Sha256::new_with_prefix(format!("n:{}", "x".repeat(300))));
        assert_eq!(long.as_str(), format!("n:{}~{whole}", "x".repeat(MAX_KEY_BYTES - 33 - 2)));
    }

    #[test]
    fn hashed_key_hides_its_parts_and_stays_bounded() {
        let key = LockKey::hashed(("account", "ann@example.org", 7));
        assert!(key.as_str().starts_with("account:~") && key.as_str().len() == "account:~".len() + 32, "{key}");
        assert_ne!(key, LockKey::hashed(("account", "ann@example.org", 8)));
        assert!(
            LockKey::hashed((Box::leak("n".repeat(400).into_boxed_str()) as &'static str, 1)).as_str().len()
                <= MAX_KEY_BYTES
        );
        let long = LockKey::hashed(("n", "x".repeat(300)));
        assert_ne!(long, LockKey::hashed(("n", "x".repeat(301))));
    }

    #[test]
    fn raw_name_is_exact_or_rejected() {
        for fine in ["reward lock 7", "a{b}c", "{a}", "a}b{c}", "a%3A:~+"] {
            assert_eq!(LockKey::raw(fine).expect(fine).as_str(), fine);
        }
        for braces in ["a}b", "a{b", "x{}y", "{}", "{", "}"] {
            assert_eq!(LockKey::raw(braces), Err(RawKeyError::Braces), "{braces}");
        }
        assert_eq!(LockKey::raw(""), Err(RawKeyError::Empty));
        assert_eq!(LockKey::raw("x".repeat(MAX_RAW_KEY_BYTES + 1)), Err(RawKeyError::TooLong));
        assert_ne!(LockKey::raw("n:1").expect("fine"), LockKey::from(("n", 1)), "a raw name is a name of its own");
    }

    #[cfg(feature = "tracing")]
    #[test]
    fn redacted_key_shows_only_its_namespace() {
        let key = LockKey::from(("account", "ann"));
        assert!(key.redacted().starts_with("account:~"));
        assert!(!key.redacted().contains("ann"));
        assert_ne!(key.redacted(), LockKey::from(("account", "bob")).redacted());
        assert_eq!(key.redacted(), LockKey::from(("account", "ann")).redacted(), "equal keys can be told");
        let guess = hex(Sha256::new_with_prefix("account:ann"));
        assert!(!key.redacted().contains(&guess), "a guess cannot be checked");
        assert!(LockKey::raw("ann").expect("fine").redacted().starts_with(":~"), "a raw name has no namespace");
        assert!(LockKey::from(("nightly",)).redacted().starts_with("nightly:~"));
    }

    #[cfg(feature = "uuid")]
    #[test]
    fn uuid_has_its_hyphenated_text() {
        let id = uuid::Uuid::from_u128(0x67e5_5044_10b1_426f_9247_bb68_0e5f_e0c8);
        assert_eq!(LockKey::from(("order", id)).as_str(), "order:67e55044-10b1-426f-9247-bb680e5fe0c8");
    }
}
