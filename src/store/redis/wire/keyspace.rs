//! Names of keys and channels in Redis. Pure.

use std::fmt::{self, Write};

use super::slots::{slot_of, slot_of_parts, tag_of};
use crate::{lock_key::LockKey, store::StoreEvent};

/// The start of the channels of Redisson's plain locks.
pub const REDISSON_CHANNEL: &str = "redisson_lock__channel:";

/// The names of one application, by its prefix.
#[derive(Clone, Debug)]
pub struct Keyspace {
    prefix: Box<str>,
    /// The id of the node of a Cluster that executes the calls. Channels are those of one node: a
    /// message reaches the subscribers at all nodes, and counts those at its own one. `None`: all
    /// keys live on one server.
    node: Option<Box<str>>,
}

/// The name of a lock in Redis.
#[derive(Clone, Copy, Debug)]
pub struct LockName<'a> {
    /// `None`: the name is that of a raw key.
    prefix: Option<&'a str>,
    text: &'a str,
}

/// The names beside a raw lock that wake its waiters, in Redisson and here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawNames {
    /// The channel on which Redisson announces that the lock is free.
    pub channel: String,
    /// A channel that every process subscribes together with the other one: its subscribers are
    /// those of the other one that use this prefix.
    pub own_channel: String,
    /// While it exists, the free lock is reserved for other programs.
    pub reservation: String,
}

/// A channel of a raw lock, with the channel of Redisson for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RawChannel<'a> {
    /// The lock may be free.
    Freed(&'a str),
    /// The next message that it is free is not for this process.
    Reserved(String),
}

/// A name in the hash slot of a lock.
#[derive(Clone, Copy, Debug)]
pub struct NameBeside<'a> {
    prefix: &'a str,
    infix: char,
    is_tagged: bool,
    lock: LockName<'a>,
}

/// Error of a raw key with a name that is reserved. Its text does not contain the name: a client
/// may have chosen it, and the text is logged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    /// The name could be that of a composed key of this application.
    #[error(
        "a raw key begins with `{prefix}:`, as the composed keys of this application do: use another prefix for the store, or a tuple \
             for the key"
    )]
    Ambiguous {
        /// The prefix of this application.
        prefix: Box<str>,
    },
    /// The name has the form of those of queues, channels and fences.
    #[error("a raw key begins with `tower-lock:`, which is reserved for queues, channels and fences")]
    Reserved,
}

impl Keyspace {
    const MAX_PREFIX_BYTES: usize = 64;

    /// Creates the names with this prefix: 1 to 64 of `[A-Za-z0-9._-]`, and not `tower-lock`.
    /// Without a colon, two pairs of prefix and key never have the same name.
    pub fn new(prefix: &str) -> Option<Self> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let is_valid = (1..=Self::MAX_PREFIX_BYTES).contains(&prefix.len()) && prefix.chars().all(plain);
        // Queues, channels and fences have this prefix.
        (is_valid && prefix != "tower-lock").then(|| Self { prefix: prefix.into(), node: None })
    }

    /// The names for calls to the node of a Cluster with this id.
    #[must_use]
    pub fn at_node(&self, id: &str) -> Self {
        Self { prefix: self.prefix.clone(), node: Some(id.into()) }
    }

    /// The id of the node of a Cluster.
    pub fn node_id(&self) -> Option<&str> {
        self.node.as_deref()
    }

    /// The name of a lock.
    pub fn lock<'a>(&'a self, key: &'a LockKey) -> Result<LockName<'a>, InvalidName> {
        let text = key.as_str();
        if !key.is_raw() {
            return Ok(LockName { prefix: Some(&self.prefix), text });
        }
        if text.starts_with("tower-lock:") {
            Err(InvalidName::Reserved)
        } else if self.strip_prefix(text).is_some() {
            Err(InvalidName::Ambiguous { prefix: self.prefix.clone() })
        } else {
            Ok(LockName { prefix: None, text })
        }
    }

    /// The key of the last fence of this prefix, and on a Cluster of the slot of this lock.
    pub fn fence(&self, lock: LockName<'_>) -> String {
        match self.node {
            None => format!("tower-lock:{}:f", self.prefix),
            Some(_) => format!("tower-lock:{}:f:{{{}}}", self.prefix, tag_of(lock.slot())),
        }
    }

    /// The names of all fences of this prefix, for a message to an operator.
    pub fn fences(&self) -> String {
        format!("tower-lock:{}:f{}", self.prefix, if self.node.is_some() { ":*" } else { "" })
    }

    /// A key that nobody makes, for health checks. On a Cluster it has this slot.
    pub fn health(&self, slot: u16) -> String {
        match self.node {
            None => format!("tower-lock:{}:h", self.prefix),
            Some(_) => format!("tower-lock:{}:h:{{{}}}", self.prefix, tag_of(slot)),
        }
    }

    /// The name of a lock for the self-test with this id. On a Cluster it has this slot.
    pub fn test_lock(&self, id: &str, slot: u16) -> String {
        match self.node {
            None => format!("{}:self-test:{id}", self.prefix),
            Some(_) => format!("{}:self-test:{id}:{{{}}}", self.prefix, tag_of(slot)),
        }
    }

    /// The channel of one process, by the manager of its acquisition ids. It contains the prefix,
    /// so that an ACL for another application does not cover it.
    pub fn inbox(&self, manager: &str) -> String {
        match &self.node {
            None => format!("tower-lock:{}:in:{manager}", self.prefix),
            Some(node) => format!("tower-lock:{}:in:{node}:{manager}", self.prefix),
        }
    }

    /// The keys and channels that an ACL allows to a user of this prefix.
    pub fn acl_patterns(&self) -> String {
        let prefix = &self.prefix;
        format!("~{prefix}:* ~tower-lock:{prefix}:* &tower-lock:{prefix}:in:*")
    }

    /// The queue of a lock, in the same hash slot.
    pub fn queue<'a>(&'a self, lock: LockName<'a>) -> NameBeside<'a> {
        self.beside(lock, 'q', 't')
    }

    /// The pattern of the names of composed locks. No character of a prefix has a meaning in it.
    pub fn lock_pattern(&self) -> String {
        format!("{}:*", self.prefix)
    }

    /// The pattern of the names of queues.
    pub fn queue_pattern(&self) -> String {
        format!("tower-lock:{}:[qt]:*", self.prefix)
    }

    /// The name of the lock of a queue. `None`: it is not a queue of this application.
    pub fn lock_of_queue<'a>(&self, queue: &'a str) -> Option<&'a str> {
        let name = queue.strip_prefix("tower-lock:")?.strip_prefix(&*self.prefix)?;
        match name.strip_prefix(":q:{") {
            Some(name) => name.strip_suffix('}').filter(|lock| !lock.contains('{')),
            None => name.strip_prefix(":t:").filter(|lock| lock.contains('{')),
        }
    }

    /// The record of a lock, in the same hash slot.
    pub fn record<'a>(&'a self, lock: LockName<'a>) -> NameBeside<'a> {
        self.beside(lock, 'r', 's')
    }

    /// The names beside a raw lock. `None`: it is composed.
    pub fn raw_names(&self, lock: LockName<'_>) -> Option<RawNames> {
        if lock.prefix.is_some() {
            return None;
        }
        // Redisson tests for this character, too.
        let tagged = if lock.text.contains('{') { lock.text.to_owned() } else { format!("{{{lock}}}") };
        Some(RawNames {
            channel: format!("{REDISSON_CHANNEL}{tagged}"),
            // An ACL for the channels of processes covers it.
            own_channel: format!("tower-lock:{}:in:raw:{tagged}", self.prefix),
            reservation: self.beside(lock, 'v', 'w').to_string(),
        })
    }

    /// The raw lock of a channel.
    pub fn raw_channel<'a>(&self, channel: &'a str) -> Option<RawChannel<'a>> {
        if channel.starts_with(REDISSON_CHANNEL) {
            return Some(RawChannel::Freed(channel));
        }
        let lock = channel.strip_prefix("tower-lock:")?.strip_prefix(&*self.prefix)?.strip_prefix(":in:raw:")?;
        // An instance may have the name `raw`. Its channel has no brace.
        lock.contains('{').then(|| RawChannel::Reserved(format!("{REDISSON_CHANNEL}{lock}")))
    }

    /// A name in the hash slot of a lock. A hash tag in the name of the lock decides the slot, and
    /// has another infix, because `x` and `{x}` are two locks.
    fn beside<'a>(&'a self, lock: LockName<'a>, infix: char, tagged: char) -> NameBeside<'a> {
        let is_tagged = lock.text.contains('{');
        NameBeside { prefix: &self.prefix, infix: if is_tagged { tagged } else { infix }, is_tagged, lock }
    }

    /// The key of a lock with this name.
    pub fn parse_lock(&self, lock: &str) -> LockKey {
        self.strip_prefix(lock).map_or_else(|| LockKey::from_raw_name(lock), LockKey::from_composed)
    }

    fn strip_prefix<'a>(&self, lock: &'a str) -> Option<&'a str> {
        lock.strip_prefix(&*self.prefix)?.strip_prefix(':')
    }

    /// The event of a message. An unknown message is a hint to poll (I7).
    pub fn parse_event(&self, message: &[u8]) -> StoreEvent {
        let known = || {
            // The name of the lock is last, because it may contain blanks.
            let mut fields = std::str::from_utf8(message).ok()?.splitn(5, ' ');
            let (version, kind, _fence) = (fields.next()?, fields.next()?, fields.next()?);
            let id = crate::acquisition::AcquisitionId::from_text(fields.next()?);
            let key = self.parse_lock(fields.next()?);
            match (version, kind) {
                ("1", "offered") => Some(StoreEvent::Offered { key, id }),
                ("1", "revoked") => Some(StoreEvent::Revoked { key, id }),
                _ => None,
            }
        };
        known().unwrap_or(StoreEvent::Lagged)
    }
}

impl LockName<'_> {
    /// Its hash slot on a Cluster.
    pub fn slot(self) -> u16 {
        // No character of a prefix is a brace.
        self.prefix.map_or_else(|| slot_of(self.text), |prefix| slot_of_parts([prefix, ":", self.text]))
    }
}

impl<'a> From<&'a str> for LockName<'a> {
    fn from(text: &'a str) -> Self {
        Self { prefix: None, text }
    }
}

impl fmt::Display for LockName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(prefix) = self.prefix {
            f.write_str(prefix)?;
            f.write_char(':')?;
        }
        f.write_str(self.text)
    }
}

impl fmt::Display for NameBeside<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prefix, infix, is_tagged, lock } = self;
        if *is_tagged {
            write!(f, "tower-lock:{prefix}:{infix}:{lock}")
        } else {
            write!(f, "tower-lock:{prefix}:{infix}:{{{lock}}}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acquisition::AcquisitionId;

    fn keyspace() -> Keyspace {
        Keyspace::new("lock").expect("a prefix")
    }

    #[test]
    fn composed_keys_have_the_prefix_and_raw_keys_are_exact() {
        let (composed, raw) = (LockKey::from(("reward", 7, "a b")), LockKey::raw("myLock").expect("a name"));
        assert_eq!(keyspace().lock(&composed).map(|name| name.to_string()).as_deref(), Ok("lock:reward:7:a%20b"));
        assert_eq!(keyspace().lock(&raw).map(|name| name.to_string()).as_deref(), Ok("myLock"));
        for key in [composed, raw] {
            assert_eq!(keyspace().parse_lock(&keyspace().lock(&key).expect("a name").to_string()), key, "and back");
        }
        let ambiguous = LockKey::raw("lock:reward:7").expect("a name");
        let error = keyspace().lock(&ambiguous).expect_err("ambiguous");
        assert!(error.to_string().contains("begins with `lock:`"), "{error}");
        assert!(!error.to_string().contains("reward"), "a client may have chosen it: {error}");
        let reserved = LockKey::raw("tower-lock:lock:f").expect("a name");
        assert_eq!(keyspace().lock(&reserved).err(), Some(InvalidName::Reserved));
    }

    /// A node may have one slot of all, and a search for a name in it would take long.
    #[test]
    fn name_for_a_self_test_has_the_slot_of_its_node() {
        let keyspace = keyspace().at_node("0a1b");
        for slot in [0, 1_207, 16_383] {
            let lock = keyspace.test_lock("7f", slot);
            assert_eq!(slot_of(&lock), slot, "{lock}");
            assert_eq!(slot_of(&keyspace.queue(lock.as_str().into()).to_string()), slot, "{lock}");
        }
    }

    #[test]
    fn slot_of_a_lock_is_that_of_its_name() {
        for text in ["reward:7", "{reward}:7", "a{}b", "x}{y"] {
            let composed = LockName { prefix: Some("lock"), text };
            assert_eq!(composed.slot(), slot_of(&composed.to_string()), "{text}");
            assert_eq!(LockName::from(text).slot(), slot_of(text), "{text}");
        }
    }

    #[test]
    fn queue_and_record_share_the_hash_slot_of_their_lock() {
        assert_eq!(keyspace().queue("lock:reward:7".into()).to_string(), "tower-lock:lock:q:{lock:reward:7}");
        assert_eq!(keyspace().queue("shop{7}:x".into()).to_string(), "tower-lock:lock:t:shop{7}:x");
        assert_ne!(
            keyspace().queue("x".into()).to_string(),
            keyspace().queue("{x}".into()).to_string(),
            "two locks, two queues"
        );
        assert_eq!(keyspace().record("lock:reward:7".into()).to_string(), "tower-lock:lock:r:{lock:reward:7}");
        assert_eq!(keyspace().record("shop{7}:x".into()).to_string(), "tower-lock:lock:s:shop{7}:x");
        assert_ne!(
            keyspace().record("x".into()).to_string(),
            keyspace().record("{x}".into()).to_string(),
            "two locks, two records"
        );
    }

    #[test]
    fn lock_of_a_queue_is_found_by_its_name() {
        for lock in ["lock:reward:7", "shop{7}:x", "my lock", "{x}"] {
            assert_eq!(keyspace().lock_of_queue(&keyspace().queue(lock.into()).to_string()), Some(lock));
        }
        for other in ["lock:f", "lock:r:{x}", "lock2:q:{x}", "lock:q:x", "lock:q:{x", "lock:q:{{x}", "lock:t:x"] {
            assert_eq!(keyspace().lock_of_queue(&format!("tower-lock:{other}")), None, "{other}");
        }
    }

    #[test]
    fn channels_of_a_raw_lock_are_those_of_redisson() {
        let key = |name| LockKey::raw(name).expect("a name");
        for (name, channel, own, reservation) in
            [("myLock", "{myLock}", "{myLock}", "v:{myLock}"), ("shop{7}:x", "shop{7}:x", "shop{7}:x", "w:shop{7}:x")]
        {
            let key = key(name);
            let names = keyspace().raw_names(keyspace().lock(&key).expect("a name")).expect("it is raw");
            assert_eq!(names.channel, format!("redisson_lock__channel:{channel}"));
            assert_eq!(names.own_channel, format!("tower-lock:lock:in:raw:{own}"));
            assert_eq!(names.reservation, format!("tower-lock:lock:{reservation}"));
            assert_eq!(keyspace().raw_channel(&names.channel), Some(RawChannel::Freed(&names.channel)));
            assert_eq!(keyspace().raw_channel(&names.own_channel), Some(RawChannel::Reserved(names.channel.clone())));
        }
        let composed = LockKey::from(("n", 1));
        assert_eq!(keyspace().raw_names(keyspace().lock(&composed).expect("a name")), None);
        for inbox in ["tower-lock:lock:in:api-1:9c1e44d07b2a51f0", "tower-lock:lock:in:raw:9c1e44d07b2a51f0"] {
            assert_eq!(keyspace().raw_channel(inbox), None);
        }
    }

    #[test]
    fn prefixes_are_unambiguous() {
        for prefix in ["", "a:b", "a{b", "a b", "tower-lock", &"a".repeat(65)] {
            assert!(Keyspace::new(prefix).is_none(), "{prefix}");
        }
        assert!(Keyspace::new("shop-2.eu_west").is_some());
    }

    #[test]
    fn unknown_message_is_a_hint() {
        let (key, id) = (LockKey::from(("n", 1)), AcquisitionId::from_text("api:0a:7"));
        let offered = keyspace().parse_event(b"1 offered 1700000000000000 api:0a:7 lock:n:1");
        assert_eq!(offered, StoreEvent::Offered { key: key.clone(), id: id.clone() });
        assert_eq!(
            keyspace().parse_event(b"1 revoked 0 api:0a:7 lock:n:1"),
            StoreEvent::Revoked { key, id: id.clone() }
        );
        let blanks = LockKey::raw("my own lock").expect("a name");
        assert_eq!(
            keyspace().parse_event(b"1 offered 7 api:0a:7 my own lock"),
            StoreEvent::Offered { key: blanks, id }
        );
        for unknown in ["", "1", "2 offered 7 api:0a:7 lock:n:1", "1 sold 7 api:0a:7 lock:n:1", "1 offered 7"] {
            assert_eq!(keyspace().parse_event(unknown.as_bytes()), StoreEvent::Lagged, "{unknown}");
        }
        assert_eq!(keyspace().parse_event(&[0xff, 0xfe]), StoreEvent::Lagged);
    }
}
