//! The key of a lock.

pub(crate) mod part;
pub(crate) mod several;
pub(crate) mod shards;
pub(crate) mod writer;

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState},
    sync::{Arc, LazyLock},
};

use serde::{Serializer, ser::SerializeStruct};
use smallvec::{SmallVec, smallvec};

pub(crate) use self::writer::hex;
use self::{
    part::{FromTuple, KeyPart, KeyTuple},
    writer::KeyWriter,
};
use crate::limits::{MAX_KEY_BYTES, MAX_RAW_KEY_BYTES};

/// Key of a lock: a namespace and parts.
///
/// A key is created from a tuple. Its first element is the namespace. The others are the parts,
/// which identify the object:
///
/// ```
/// # use tower_lock::LockKey;
/// let key = LockKey::from(("reward", 42, "first login"));
/// assert_eq!(key.as_str(), "reward:42:first%20login");
/// ```
///
/// - **Injective**: two different lists of parts never have the same text. The input of one client
///   therefore cannot name the lock of another client. A part is its text: `1u8` and `"1"` are the
///   same part.
/// - **Readable**: letters and digits of common scripts are unchanged: Latin, Greek, Cyrillic,
///   Armenian, Georgian, Hebrew, Arabic, Devanagari, Thai, and those of China, Japan and Korea. So
///   is ASCII punctuation, except for `:`, which separates the parts, and `%`, `~`, `+`, braces,
///   brackets, quotes, `*`, `?` and `\`. All other characters are escaped as `%XX`. The table is
///   that of this crate: it does not depend on the compiler.
/// - **Bounded**: the text has at most 256 bytes. A longer text ends in `~` and 128 bits of its
///   SHA-256.
#[derive(Clone, Eq, PartialOrd, Ord)]
pub struct LockKey {
    text: Arc<str>,
    kind: KeyKind,
    /// Of the hash of text and kind, with random keys: a key is hashed once and looked up several
    /// times. Half of it, because each held key has three copies of this.
    hash: u32,
}

/// Several keys that are locked together: all of them, or none. Created by
/// [`key::all`](crate::key::all).
///
/// The keys are sorted by their texts, and each one is there once. So all callers acquire them in
/// one order.
#[derive(Clone, Debug)]
pub struct AllKeys(Result<SortedKeys, KeyCountError>);

/// At least one key, in order, each one once.
pub(crate) type SortedKeys = SmallVec<[LockKey; 1]>;

/// Error of several keys: there is none, or there are too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyCountError {
    /// The list is empty. If no lock is needed, do not lock; a key function returns `None`.
    #[error("no key to lock: the list of keys is empty")]
    Empty,
    /// More than 64 different keys, or more than the
    /// [`max_keys`](crate::LockLayer::max_keys) of a layer.
    #[error("more than {max} different keys cannot be locked together here")]
    TooMany {
        /// The most keys.
        max: usize,
    },
}

/// A map that uses the hash in the key.
pub(crate) type KeyMap<V> = HashMap<LockKey, V, BuildHasherDefault<PrehashedHasher>>;

/// Hasher that returns the hash of a [`LockKey`].
#[derive(Debug, Default)]
pub(crate) struct PrehashedHasher(u64);

/// The kind of a key. A raw key and a composed key are different, even with the same text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum KeyKind {
    Composed,
    Raw,
}

/// Error of [`LockKey::raw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RawKeyError {
    /// The name is empty.
    #[error("raw lock key is empty")]
    Empty,
    /// The name has more than 1,024 bytes.
    #[error("raw lock key has more than 1024 bytes")]
    TooLong,
    /// The braces do not enclose a hash tag, so that lock and queue would be in different hash
    /// slots.
    #[error("braces in a raw lock key do not enclose a hash tag: use `{{tag}}` or no braces")]
    Braces,
}

// === impl LockKey ===

impl AllKeys {
    /// The keys in order.
    pub(crate) fn into_sorted(self) -> Result<SortedKeys, KeyCountError> {
        self.0
    }
}

impl From<LockKey> for AllKeys {
    fn from(key: LockKey) -> Self {
        Self(Ok(smallvec![key]))
    }
}

impl LockKey {
    /// Creates a key from a namespace and any number of parts.
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
        Self::composed(&mut key)
    }

    /// Creates a key whose parts are hashed, for confidential parts.
    ///
    /// The hash has no salt, so an e-mail address that is guessed can be verified. A secret as the
    /// first part prevents that: `LockKey::hashed(("account", secret, email))` is the same key in
    /// all instances with that secret.
    ///
    /// ```
    /// # use tower_lock::LockKey;
    /// let key = LockKey::hashed(("account", "ann@example.org"));
    /// assert_eq!(key.as_str(), "account:~8347cf7b44abc7d14fc45016aecb00ac");
    /// ```
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "same signature as `LockKey::from`")]
    pub fn hashed(tuple: impl KeyTuple) -> Self {
        let mut key = KeyWriter::empty();
        tuple.write(&mut key);
        Self::new(key.finish_hashed(), KeyKind::Composed)
    }

    /// Creates a key with exactly this name, for a lock that is shared with another program. The
    /// name is not shortened, escaped or prefixed.
    ///
    /// A `RedisStore` rejects a raw key that begins with its prefix and a colon, or with
    /// `tower-lock:`.
    ///
    /// # Errors
    ///
    /// Fails if the name is empty, has more than 1,024 bytes, or has braces that do not enclose a
    /// hash tag (`a}b`, `a{b`, `x{}y`).
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

    /// Returns the text of the key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The namespace. That of work which runs once includes the namespace of its key. All raw keys
    /// have one.
    pub(crate) fn namespace(&self) -> &str {
        let end = |text: &str| text.find(':').unwrap_or(text.len());
        match self.kind {
            KeyKind::Raw => "",
            KeyKind::Composed if self.text.starts_with('+') => {
                let first = end(&self.text);
                let rest = self.text.get(first + 1..).unwrap_or_default();
                &self.text[..(first + 1 + end(rest)).min(self.text.len())]
            }
            KeyKind::Composed => &self.text[..end(&self.text)],
        }
    }

    /// The text for logs without the parts: the namespace, and a keyed hash of the text. The key is
    /// random and belongs to this process: without it, account numbers could be found by trial.
    pub(crate) fn redacted(&self) -> String {
        use sha2::{Digest, Sha256};

        let namespace = match self.kind {
            KeyKind::Composed => self.text.split(':').next().unwrap_or_default(),
            KeyKind::Raw => "",
        };
        // The only source of random bits in the standard library.
        static KEY: LazyLock<[[u8; 8]; 2]> = LazyLock::new(|| {
            let random = RandomState::new();
            [0, 1].map(|half| random.hash_one(half).to_le_bytes())
        });
        format!("{namespace}:~{}", hex(Sha256::new_with_prefix(KEY.as_flattened()).chain_update(&*self.text)))
    }
}

impl LockKey {
    /// The composed key with this text, which a client has sent. `None`: no key has it.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let fits = (1..=MAX_KEY_BYTES).contains(&text.len());
        (fits && text.chars().all(writer::is_of_text)).then(|| Self::new(text.into(), KeyKind::Composed))
    }
}

#[cfg(any(feature = "memory", feature = "console", feature = "__remote"))]
impl LockKey {
    /// A composed key with this text, read from a store.
    pub(crate) fn from_composed(text: &str) -> Self {
        Self::new(text.into(), KeyKind::Composed)
    }

    /// A raw key with this name, read from a store.
    #[cfg(any(feature = "memory", feature = "__remote"))]
    pub(crate) fn from_raw_name(name: &str) -> Self {
        Self::new(name.into(), KeyKind::Raw)
    }
}

#[cfg(feature = "console")]
impl LockKey {
    /// The key as the query of a URL: `name=order%3A7`, and `&raw=1` for a raw key.
    pub(crate) fn as_query(&self) -> String {
        let name: String = form_urlencoded::byte_serialize(self.text.as_bytes()).collect();
        format!("name={name}{}", if self.is_raw() { "&raw=1" } else { "" })
    }
}

impl LockKey {
    pub(crate) fn is_raw(&self) -> bool {
        self.kind == KeyKind::Raw
    }

    /// As the fields `key` and `raw` of an object, which name one key.
    pub(crate) fn serialize_fields<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("LockKey", 2)?;
        fields.serialize_field("key", self.as_str())?;
        fields.serialize_field("raw", &self.is_raw())?;
        fields.end()
    }

    /// The key of a tuple whose type is not known here.
    pub(crate) fn from_tuple(tuple: &impl KeyTuple) -> Self {
        let mut key = KeyWriter::empty();
        tuple.write(&mut key);
        Self::composed(&mut key)
    }

    /// The key of work that runs once for this key.
    pub(crate) fn once(&self) -> Self {
        let mut key = KeyWriter::empty();
        match self.kind {
            // The text is escaped already, and an operator reads it.
            KeyKind::Composed => {
                key.reserved("once");
                key.push(":");
                key.push(&self.text);
            }
            KeyKind::Raw => {
                key.reserved("once-raw");
                key.part(&self.text);
            }
        }
        Self::composed(&mut key)
    }

    /// The key of the requests with this idempotency key. It is a hash: both may be personal data.
    pub(crate) fn replay(scope: &Self, idempotency_key: &str) -> Self {
        let mut key = KeyWriter::empty();
        key.reserved("replay");
        // Two scopes never share a key.
        key.part(&scope.is_raw());
        key.part(&scope.text);
        key.part(&idempotency_key);
        Self::new(key.finish_hashed(), KeyKind::Composed)
    }

    /// The key that was written.
    pub(crate) fn composed(writer: &mut KeyWriter) -> Self {
        Self::new(writer.finish(), KeyKind::Composed)
    }

    fn new(text: Arc<str>, kind: KeyKind) -> Self {
        static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        let [a, b, c, d, ..] = KEYS.hash_one((&*text, kind)).to_le_bytes();
        Self { text, kind, hash: u32::from_le_bytes([a, b, c, d]) }
    }
}

/// Nearly all keys that are compared are clones of one key.
impl PartialEq for LockKey {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind && (Arc::ptr_eq(&self.text, &other.text) || self.text == other.text)
    }
}

impl Hash for LockKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // A map looks at the first and at the last bits.
        state.write_u64(u64::from(self.hash).wrapping_mul(0x9e37_79b9_7f4a_7c15));
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

impl<T> From<T> for LockKey
where
    KeyWriter: FromTuple<T>,
{
    fn from(tuple: T) -> Self {
        let mut key = KeyWriter::from_tuple(&tuple);
        Self::composed(&mut key)
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
            assert!(LockKey::from(("n", unseen)).as_str().is_ascii(), "{unseen:?} would be invisible in a log");
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

    /// Guarantee: G14.
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
        for valid in ["reward lock 7", "a{b}c", "{a}", "a}b{c}", "a%3A:~+"] {
            assert_eq!(LockKey::raw(valid).expect(valid).as_str(), valid);
        }
        for braces in ["a}b", "a{b", "x{}y", "{}", "{", "}"] {
            assert_eq!(LockKey::raw(braces), Err(RawKeyError::Braces), "{braces}");
        }
        assert_eq!(LockKey::raw(""), Err(RawKeyError::Empty));
        assert_eq!(LockKey::raw("x".repeat(MAX_RAW_KEY_BYTES + 1)), Err(RawKeyError::TooLong));
        assert_ne!(LockKey::raw("n:1").expect("valid"), LockKey::from(("n", 1)), "raw and composed keys differ");
    }

    #[test]
    fn keys_of_work_that_runs_once_are_no_other_keys() {
        let key = LockKey::from(("nightly", "a b", 7));
        assert_eq!(key.once().as_str(), "+once:nightly:a%20b:7");
        let raw = LockKey::raw("nightly:{7}").expect("valid");
        assert_eq!(raw.once().as_str(), "+once-raw:nightly%3A%7B7%7D");
        assert_eq!(LockKey::from(("+once", "nightly")).as_str(), "%2Bonce:nightly", "a caller cannot write it");
        let long = |c: &str| LockKey::from(("n", c.repeat(300))).once();
        assert!(long("x").as_str().starts_with("+once:n:xx") && long("x").as_str().len() <= MAX_KEY_BYTES);
        assert_ne!(long("x"), long("y"));
        assert_ne!(LockKey::from(("n", "x".repeat(254))).once(), LockKey::from(("n", "x".repeat(253))).once());
    }

    #[test]
    fn redacted_key_shows_only_its_namespace() {
        let key = LockKey::from(("account", "ann"));
        assert!(key.redacted().starts_with("account:~"));
        assert!(!key.redacted().contains("ann"));
        assert_ne!(key.redacted(), LockKey::from(("account", "bob")).redacted());
        assert_eq!(key.redacted(), LockKey::from(("account", "ann")).redacted(), "equal keys have equal texts");
        let guess = hex(Sha256::new_with_prefix("account:ann"));
        assert!(!key.redacted().contains(&guess), "a guess cannot be checked");
        assert!(LockKey::raw("ann").expect("valid").redacted().starts_with(":~"), "a raw name has no namespace");
        assert!(LockKey::from(("nightly",)).redacted().starts_with("nightly:~"));
    }

    #[cfg(feature = "uuid")]
    #[test]
    fn uuid_has_its_hyphenated_text() {
        let id = uuid::Uuid::from_u128(0x67e5_5044_10b1_426f_9247_bb68_0e5f_e0c8);
        assert_eq!(LockKey::from(("order", id)).as_str(), "order:67e55044-10b1-426f-9247-bb680e5fe0c8");
    }
}
