//! The id of one acquisition of a key in the store.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use serde::{Serialize, Serializer};

/// Who holds a key in the store: one acquisition, never used again.
///
/// A new id for every acquisition is what makes each verb of a store safe to repeat: a late release finds its own
/// grant or nothing. It reads `instance:random:number`; the first two belong to one [`LockManager`](crate::LockManager). It is shown to whoever
/// operates the store, and in no answer to a client.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct AcquisitionId {
    manager: Arc<str>,
    sequence: u64,
}

/// Names the acquisitions of one [`LockManager`](crate::LockManager), numbers their calls, and throws their die.
#[derive(Debug)]
pub struct AcquisitionIds {
    manager: Arc<str>,
    next: AtomicU64,
    next_call: AtomicU64,
    jitter_seed: AtomicU64,
}

// === impl AcquisitionId ===

impl AcquisitionId {
    /// Reads it back from its text. What others wrote in its place (a Java service: its id and thread) is read, too: what is behind the
    /// last colon as the number, if it is one.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        match text.rsplit_once(':').map(|(process, number)| (process, number.parse())) {
            Some((process, Ok(number))) => Self { manager: process.into(), sequence: number },
            _ => Self { manager: text.into(), sequence: 0 },
        }
    }

    /// The process it belongs to, as its [`EventSink`](crate::store::EventSink) has it: `instance:random`.
    #[must_use]
    pub fn manager(&self) -> &str {
        &self.manager
    }

    /// The instance it belongs to: a pod or a host, or as the [`LockManager`](crate::LockManager) were told.
    #[must_use]
    pub fn instance(&self) -> &str {
        self.manager.rsplit_once(':').map_or(&self.manager, |(instance, _)| instance)
    }

    /// Which one of its process: later ones have larger numbers.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }
}

impl fmt::Display for AcquisitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.manager, self.sequence)
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
    /// Characters of an instance's name, its last ones: the rest is cut off.
    const INSTANCE_CHARS: usize = 32;

    /// `random`: 64 bits that no other handle on the same store has. What cannot be read in a log or a command line becomes `-`.
    ///
    /// The same random bits give the same ids, and the same throws of the die.
    pub fn new(instance: &str, random: u64) -> Self {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
        // Pods of one deployment differ in their last characters.
        let cut = instance.chars().count().saturating_sub(Self::INSTANCE_CHARS);
        let instance: String = instance.chars().skip(cut).map(plain).collect();
        Self {
            manager: format!("{instance}:{random:016x}").into(),
            next: AtomicU64::new(0),
            next_call: AtomicU64::new(0),
            jitter_seed: AtomicU64::new(random),
        }
    }

    /// Those of a child process: of the same instance.
    pub(crate) fn for_child(&self, random: u64) -> Self {
        let instance = self.manager.rsplit_once(':').map_or(&*self.manager, |(instance, _)| instance);
        Self::new(instance, random)
    }

    /// What all ids have in common.
    pub fn manager(&self) -> &Arc<str> {
        &self.manager
    }

    /// The next id.
    pub fn next(&self) -> AcquisitionId {
        AcquisitionId { manager: Arc::clone(&self.manager), sequence: self.next.fetch_add(1, Ordering::Relaxed) }
    }

    /// Whether this id was given out here: by this process, and with a number that it has reached.
    pub(crate) fn has_issued(&self, owner: &AcquisitionId) -> bool {
        owner.manager == self.manager && owner.sequence < self.next.load(Ordering::Relaxed)
    }

    pub(crate) fn next_call_id(&self) -> u64 {
        self.next_call.fetch_add(1, Ordering::Relaxed)
    }

    /// In 0..1: so that those who waited together do not ask together again.
    pub(crate) fn jitter(&self) -> f64 {
        fastrand::Rng::with_seed(self.jitter_seed.fetch_add(1, Ordering::Relaxed)).f64()
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
            assert!(!all[i + 1..].contains(one), "{one} is there twice");
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
        assert_eq!(AcquisitionId::from_text("somebody").to_string(), "somebody:0");
    }
}
