//! Ids of acquisitions.

#[cfg(feature = "axum")]
use std::borrow::Cow;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use serde::{Serialize, Serializer};

/// Id of one acquisition of a key. An id is never reused.
///
/// The text of an id is `instance:random:sequence`, or `instance:random:sequence/limit` if several
/// acquisitions may hold the key. The limit of one that a newer one replaces is 1. The first two
/// parts identify a
/// [`LockManager`](crate::LockManager). Because each acquisition has a new id, the operations of a
/// store are safe to repeat: a delayed release finds its own grant or nothing. The id is visible in
/// the store and in logs, but not in responses to clients.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct AcquisitionId {
    manager: Arc<str>,
    /// The sequence, and above it how many others may hold the key, or [`REPLACEABLE`].
    number: u64,
}

/// The bits of the sequence in a number.
const SEQUENCE_BITS: u32 = 48;
pub(crate) const MAX_SEQUENCE: u64 = (1 << SEQUENCE_BITS) - 1;

/// In place of a number of others: none, and a newer acquisition replaces this one.
const REPLACEABLE: u64 = 0xFFFF;

/// Generator of the acquisition ids of one [`LockManager`](crate::LockManager).
///
/// Tests of a [`LockStore`](crate::store::LockStore) use it to create ids.
#[derive(Debug)]
pub struct AcquisitionIds {
    /// Not shared with other generators: each id counts the references of its own.
    manager: Arc<str>,
    sequence: Arc<Sequence>,
}

/// The numbers that all generators of one manager share.
#[derive(Debug)]
struct Sequence {
    next: AtomicU64,
    jitter_seed: AtomicU64,
}

// === impl AcquisitionId ===

impl AcquisitionId {
    /// Parses an id, also one of another program, such as the id and thread of Redisson.
    ///
    /// The number after the last colon is the sequence, with the limit behind it. Without such a
    /// number, or with one that is too large for a sequence, the sequence is zero.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        let (alone, limit) = match text.rsplit_once('/').map(|(alone, limit)| (alone, limit.parse())) {
            Some((alone, Ok(1))) => (alone, REPLACEABLE),
            Some((alone, Ok(limit @ 2..))) => (alone, u64::from(limit - 1_u16)),
            _ => (text, 0),
        };
        match alone.rsplit_once(':').map(|(manager, sequence)| (manager, sequence.parse())) {
            Some((manager, Ok(sequence))) if sequence <= MAX_SEQUENCE => Self::new(manager.into(), sequence, limit),
            _ => Self::new(text.into(), 0, 0),
        }
    }

    fn new(manager: Arc<str>, sequence: u64, others: u64) -> Self {
        Self { manager, number: others << SEQUENCE_BITS | sequence & MAX_SEQUENCE }
    }

    /// The id of a ticket, whose holder is no process. No instance of a manager is followed by `~`.
    pub(crate) fn of_ticket(instance: &str, hash: &str, start_ms: u64) -> Self {
        Self::new(format!("{instance}:~{hash}").into(), start_ms, 0)
    }

    /// Whether a ticket holds the key with this id, and no process.
    pub(crate) fn is_of_ticket(&self) -> bool {
        self.manager.rsplit_once(':').is_some_and(|(_, random)| random.starts_with('~'))
    }

    /// The name in the id of a ticket.
    #[cfg(feature = "axum")]
    pub(crate) fn ticket_label(&self) -> Cow<'_, str> {
        form_urlencoded::parse(self.instance().as_bytes()).next().map(|(label, _)| label).unwrap_or_default()
    }

    /// Returns the id of the manager, `instance:random`, as in
    /// [`EventSink::manager`](crate::store::EventSink::manager).
    #[must_use]
    pub fn manager(&self) -> &str {
        &self.manager
    }

    /// Returns the name of the instance:
    /// [`LockManagerBuilder::instance`](crate::LockManagerBuilder::instance), by default the pod or
    /// the host.
    #[must_use]
    pub fn instance(&self) -> &str {
        self.manager.rsplit_once(':').map_or(&self.manager, |(instance, _)| instance)
    }

    /// Returns the sequence number. Later ids of a manager have larger numbers.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.number & MAX_SEQUENCE
    }

    /// Returns how many acquisitions may hold the key together with this one, itself included. One:
    /// this one holds the key alone.
    #[must_use]
    pub fn max_holders(&self) -> u16 {
        // 16 bits are left.
        let others = self.number >> SEQUENCE_BITS;
        if others == REPLACEABLE { 1 } else { u16::try_from(others + 1).unwrap_or(u16::MAX) }
    }

    /// Returns whether a newer acquisition of this kind replaces this one: see
    /// [`LockLayer::newest_wins`](crate::LockLayer::newest_wins). It holds its key alone.
    #[must_use]
    pub fn is_replaceable(&self) -> bool {
        self.number >> SEQUENCE_BITS == REPLACEABLE
    }
}

impl fmt::Display for AcquisitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.manager, self.sequence())?;
        match self.max_holders() {
            1 if !self.is_replaceable() => Ok(()),
            limit => write!(f, "/{limit}"),
        }
    }
}

/// As its text.
impl Serialize for AcquisitionId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Debug for AcquisitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AcquisitionId({self})")
    }
}

// === impl AcquisitionIds ===

impl AcquisitionIds {
    /// The number of characters of the instance that are kept.
    const INSTANCE_CHARS: usize = 32;

    /// Creates a generator. `random` is a seed that must be unique among the managers of a store.
    ///
    /// The same seed gives the same ids and the same jitter. Characters other than `[A-Za-z0-9._-]`
    /// in the instance become `-`, and only its last 32 characters are kept.
    pub fn new(instance: &str, random: u64) -> Self {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
        // Pods of one deployment differ in their last characters.
        let cut = instance.chars().count().saturating_sub(Self::INSTANCE_CHARS);
        let instance: String = instance.chars().skip(cut).map(plain).collect();
        Self {
            manager: format!("{instance}:{random:016x}").into(),
            sequence: Arc::new(Sequence { next: AtomicU64::new(0), jitter_seed: AtomicU64::new(random) }),
        }
    }

    /// A generator for one shard of the keys of the same manager. Its ids share no reference count
    /// with those of other shards, because threads that lock different keys would slow each other
    /// down.
    pub(crate) fn for_shard(&self) -> Self {
        Self { manager: Arc::from(&*self.manager), sequence: Arc::clone(&self.sequence) }
    }

    /// Returns the id of the manager, which is the common part of all ids.
    pub fn manager(&self) -> &Arc<str> {
        &self.manager
    }

    /// Returns the next id, of an acquisition that holds its key alone.
    pub fn next(&self) -> AcquisitionId {
        self.next_share(1)
    }

    /// Returns the next id, of an acquisition that holds its key beside others: so many together,
    /// itself included.
    pub fn next_share(&self, max_holders: u16) -> AcquisitionId {
        self.next_of(u64::from(max_holders.saturating_sub(1)))
    }

    /// Returns the next id, of an acquisition that holds its key alone, until a newer one of this
    /// kind replaces it.
    pub fn next_replaceable(&self) -> AcquisitionId {
        self.next_of(REPLACEABLE)
    }

    fn next_of(&self, others: u64) -> AcquisitionId {
        let sequence = self.sequence.next.fetch_add(1, Ordering::Relaxed);
        AcquisitionId::new(Arc::clone(&self.manager), sequence, others)
    }

    /// Whether this generator has issued the id.
    pub(crate) fn has_issued(&self, id: &AcquisitionId) -> bool {
        id.manager == self.manager && id.sequence() < self.sequence.next.load(Ordering::Relaxed)
    }

    /// A random number in 0..1, so that waiters do not poll at the same time.
    pub(crate) fn jitter(&self) -> f64 {
        fastrand::Rng::with_seed(self.sequence.jitter_seed.fetch_add(1, Ordering::Relaxed)).f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acquisition_ids_are_never_reused() {
        let (a, b) = (AcquisitionIds::new("api-7f3", 1), AcquisitionIds::new("api-7f3", 2));
        let all = [a.next(), a.next(), b.next(), b.next()];
        for (i, one) in all.iter().enumerate() {
            assert!(!all[i + 1..].contains(one), "{one} is not unique");
        }
        assert_eq!(all[1].to_string(), "api-7f3:0000000000000001:1");
        assert_eq!(
            (all[1].instance(), all[1].manager(), all[1].sequence()),
            ("api-7f3", "api-7f3:0000000000000001", 1)
        );
        assert!(all.iter().all(|id| AcquisitionId::from_text(&id.to_string()) == *id));
    }

    #[test]
    fn only_ids_issued_by_this_generator_count_as_issued() {
        let (a, b) = (AcquisitionIds::new("api", 1), AcquisitionIds::new("api", 2));
        let ours = a.next();
        b.next();
        assert!(a.has_issued(&ours) && !b.has_issued(&ours));
        assert!(!a.has_issued(&AcquisitionId::from_text("api:0000000000000001:1")), "not yet");
        a.next();
        assert!(a.has_issued(&AcquisitionId::from_text("api:0000000000000001:1")));
    }

    #[test]
    fn acquisition_ids_parse_for_any_host_name_and_author() {
        let odd = AcquisitionIds::new("bücher {eins}\n:a-name-that-is-much-too-long", 1).next();
        assert_eq!(odd.to_string(), "s---a-name-that-is-much-too-long:0000000000000001:0");
        let java = AcquisitionId::from_text("8b1b3cd2-2f9a-4d6e-9c56-6f0a2a1f0f3e:57");
        assert_eq!((java.instance(), java.sequence()), ("8b1b3cd2-2f9a-4d6e-9c56-6f0a2a1f0f3e", 57));
        assert_eq!(AcquisitionId::from_text("other").to_string(), "other:0");
        let large = format!("java:{}", u64::MAX);
        assert_eq!(AcquisitionId::from_text(&large).to_string(), format!("{large}:0"), "not another number");
    }

    #[test]
    fn limit_is_a_part_of_an_id() {
        let ids = AcquisitionIds::new("api", 1);
        for (limit, text) in [(1, "0"), (2, "1/2"), (1_024, "2/1024"), (u16::MAX, "3/65535")] {
            let id = ids.next_share(limit);
            assert_eq!((id.max_holders(), id.to_string()), (limit, format!("api:0000000000000001:{text}")));
            assert_eq!(AcquisitionId::from_text(&id.to_string()), id);
            assert!(ids.has_issued(&id) && id.manager() == &**ids.manager() && !id.is_replaceable());
        }
        let id = ids.next_replaceable();
        assert_eq!((id.max_holders(), id.to_string().as_str()), (1, "api:0000000000000001:4/1"));
        assert!(id.is_replaceable() && AcquisitionId::from_text("api:0000000000000001:4/1") == id);
        for other in ["api:7/0", "api:7/x", "a/4", "api/4:7"] {
            assert_eq!(AcquisitionId::from_text(other).max_holders(), 1, "{other}");
        }
    }
}
