//! What things are called in Redis. Pure.

use std::fmt;

use crate::{lock_key::LockKey, store::StoreEvent};

/// The names of one application.
#[derive(Clone, Debug)]
pub struct Keyspace {
    prefix: Box<str>,
}

/// A prefix that cannot be one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidPrefix;

/// A raw key whose name is not free for it. Says nothing of the name itself: a client may have chosen it, and this is logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidName {
    /// It reads like one that this application makes: nobody could tell from the name which of the two it is.
    Ambiguous {
        /// What the names of this application begin with.
        prefix: Box<str>,
    },
    /// Queues, inboxes and fences are named so.
    Reserved,
}

impl Keyspace {
    const MAX_PREFIX_BYTES: usize = 64;

    /// Made keys begin with this prefix: 1 to 64 of `[A-Za-z0-9._-]`. No colon: then no two prefixes and keys make one name.
    pub fn new(prefix: &str) -> Result<Self, InvalidPrefix> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let is_one = (1..=Self::MAX_PREFIX_BYTES).contains(&prefix.len()) && prefix.chars().all(plain);
        // Queues, inboxes and fences are named so.
        if is_one && prefix != "tower-lock" { Ok(Self { prefix: prefix.into() }) } else { Err(InvalidPrefix) }
    }

    /// The name of a lock.
    pub fn lock(&self, key: &LockKey) -> Result<String, InvalidName> {
        let text = key.as_str();
        if !key.is_raw() {
            return Ok(format!("{}:{text}", self.prefix));
        }
        if text.starts_with("tower-lock:") {
            Err(InvalidName::Reserved)
        } else if self.strip_prefix(text).is_some() {
            Err(InvalidName::Ambiguous { prefix: self.prefix.clone() })
        } else {
            Ok(text.to_owned())
        }
    }

    /// Where the last fence of this prefix stands. The scripts derive the names of inboxes from it.
    pub fn fence(&self) -> String {
        format!("tower-lock:{}:f", self.prefix)
    }

    /// The channel of one process, by what its owner ids have in common. Of this prefix alone, so that a right to the inboxes of another
    /// application is none to this one.
    pub fn inbox(&self, process: &str) -> String {
        format!("tower-lock:{}:in:{process}", self.prefix)
    }

    /// Where those wait who want the lock of this name. In the same hash slot.
    pub fn queue(&self, lock: &str) -> String {
        let prefix = &self.prefix;
        // A tag of its own decides the slot of a name that has one. Under another word: `x` and `{x}` are two locks.
        if lock.contains('{') {
            format!("tower-lock:{prefix}:t:{lock}")
        } else {
            format!("tower-lock:{prefix}:q:{{{lock}}}")
        }
    }

    /// The key that has this name.
    pub fn parse_lock(&self, lock: &str) -> LockKey {
        self.strip_prefix(lock).map_or_else(|| LockKey::from_raw_name(lock), LockKey::from_composed)
    }

    fn strip_prefix<'a>(&self, lock: &'a str) -> Option<&'a str> {
        lock.strip_prefix(&*self.prefix)?.strip_prefix(':')
    }

    /// What a message in an inbox says. What this version does not know is a hint all the same: to ask again (I7).
    pub fn parse_event(&self, message: &[u8]) -> StoreEvent {
        let known = || {
            // The name of the lock comes last: it may have blanks.
            let mut words = std::str::from_utf8(message).ok()?.splitn(5, ' ');
            let (format, what, _fence) = (words.next()?, words.next()?, words.next()?);
            let owner = crate::acquisition::AcquisitionId::from_text(words.next()?);
            let key = self.parse_lock(words.next()?);
            match (format, what) {
                ("1", "offered") => Some(StoreEvent::Offered { key, id: owner }),
                ("1", "taken") => Some(StoreEvent::Revoked { key, id: owner }),
                _ => None,
            }
        };
        known().unwrap_or(StoreEvent::Lagged)
    }
}

impl fmt::Display for InvalidPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a prefix is 1 to 64 of [A-Za-z0-9._-], and not `tower-lock`")
    }
}

impl std::error::Error for InvalidPrefix {}

impl fmt::Display for InvalidName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ambiguous { prefix } => write!(
                f,
                "a raw key begins with `{prefix}:`, as the keys that this application makes of tuples do: use another prefix for the store, \
                 or a tuple for the key"
            ),
            Self::Reserved => {
                f.write_str("a raw key begins with `tower-lock:`, which names queues, inboxes and fences")
            }
        }
    }
}

impl std::error::Error for InvalidName {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acquisition::AcquisitionId;

    fn keyspace() -> Keyspace {
        Keyspace::new("lock").expect("a prefix")
    }

    #[test]
    fn composed_keys_have_the_prefix_and_raw_keys_are_exact() {
        let (made, raw) = (LockKey::from(("reward", 7, "a b")), LockKey::raw("myLock").expect("a name"));
        assert_eq!(keyspace().lock(&made).as_deref(), Ok("lock:reward:7:a%20b"));
        assert_eq!(keyspace().lock(&raw).as_deref(), Ok("myLock"));
        for key in [made, raw] {
            assert_eq!(keyspace().parse_lock(&keyspace().lock(&key).expect("a name")), key, "and back");
        }
        let both = LockKey::raw("lock:reward:7").expect("a name");
        let error = keyspace().lock(&both).expect_err("whose is it?");
        assert!(error.to_string().contains("begins with `lock:`"), "{error}");
        assert!(!error.to_string().contains("reward"), "a client may have chosen it: {error}");
        let ours = LockKey::raw("tower-lock:lock:f").expect("a name");
        assert_eq!(keyspace().lock(&ours), Err(InvalidName::Reserved));
    }

    #[test]
    fn queue_shares_the_hash_slot_of_its_lock() {
        assert_eq!(keyspace().queue("lock:reward:7"), "tower-lock:lock:q:{lock:reward:7}");
        assert_eq!(keyspace().queue("shop{7}:x"), "tower-lock:lock:t:shop{7}:x");
        assert_ne!(keyspace().queue("x"), keyspace().queue("{x}"), "two locks, two lines");
    }

    #[test]
    fn prefixes_are_unambiguous() {
        for prefix in ["", "a:b", "a{b", "a b", "tower-lock", &"a".repeat(65)] {
            assert!(Keyspace::new(prefix).is_err(), "{prefix}");
        }
        assert!(Keyspace::new("shop-2.eu_west").is_ok());
    }

    #[test]
    fn unknown_message_is_a_hint() {
        let (key, owner) = (LockKey::from(("n", 1)), AcquisitionId::from_text("api:0a:7"));
        let offered = keyspace().parse_event(b"1 offered 1700000000000000 api:0a:7 lock:n:1");
        assert_eq!(offered, StoreEvent::Offered { key: key.clone(), id: owner.clone() });
        assert_eq!(
            keyspace().parse_event(b"1 taken 0 api:0a:7 lock:n:1"),
            StoreEvent::Revoked { key, id: owner.clone() }
        );
        let blanks = LockKey::raw("my own lock").expect("a name");
        assert_eq!(
            keyspace().parse_event(b"1 offered 7 api:0a:7 my own lock"),
            StoreEvent::Offered { key: blanks, id: owner }
        );
        for unknown in ["", "1", "2 offered 7 api:0a:7 lock:n:1", "1 sold 7 api:0a:7 lock:n:1", "1 offered 7"] {
            assert_eq!(keyspace().parse_event(unknown.as_bytes()), StoreEvent::Lagged, "{unknown}");
        }
        assert_eq!(keyspace().parse_event(&[0xff, 0xfe]), StoreEvent::Lagged);
    }
}
