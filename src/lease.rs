//! What a store grants, and to whom: the words both halves of the crate share.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde::{Serialize, Serializer};

use crate::defaults::{DRIFT_DIVISOR, DRIFT_ROUNDING};

/// Who holds a key in the store: one acquisition, never used again.
///
/// A new id for every acquisition is what makes each verb of a store safe to repeat: a late release finds its own
/// grant or nothing. It reads `instance:random:number`; the first two belong to one [`Locks`](crate::Locks). It is shown to whoever
/// operates the store, and in no answer to a client.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct OwnerId {
    process: Arc<str>,
    number: u64,
}

/// A number that grows with every grant of a key: who comes later has the larger one.
///
/// A lock has a lease, so it cannot stop a holder that was paused past the end of it and then writes. The place
/// that is written to can: it keeps the largest token it has seen and refuses smaller ones (Kleppmann 2016, after
/// the sequencers of Burrows 2006).
///
/// ```sql
/// UPDATE account_fence SET token = :token WHERE account = :account AND token <= :token;  -- 0 rows: too late, roll back
/// ```
///
/// The low ten bits number the sections that were served under one grant; the rest is the store's fence, at least
/// the store's clock in microseconds, so that tokens grow over restarts, too. It fits a signed 64-bit column until
/// the year 2255.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(u64);

/// Names the acquisitions of one [`Locks`](crate::Locks), numbers their calls, and throws their die.
#[derive(Debug)]
pub struct OwnerIds {
    process: Arc<str>,
    next: AtomicU64,
    next_call: AtomicU64,
    die: AtomicU64,
}

/// What a store is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseBounds {
    /// For a section that has no end of its own.
    pub longest: Duration,
    /// How long one call of the store may take.
    pub call_timeout: Duration,
}

// === impl OwnerId ===

impl OwnerId {
    /// Reads it back from its text. What others wrote in its place (a Java service: its id and thread) is read, too: what is behind the
    /// last colon as the number, if it is one.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        match text.rsplit_once(':').map(|(process, number)| (process, number.parse())) {
            Some((process, Ok(number))) => Self { process: process.into(), number },
            _ => Self { process: text.into(), number: 0 },
        }
    }

    /// The process it belongs to, as its [`Inbox`](crate::store::Inbox) has it: `instance:random`.
    #[must_use]
    pub fn process(&self) -> &str {
        &self.process
    }

    /// The instance it belongs to: a pod or a host, or as the [`Locks`](crate::Locks) were told.
    #[must_use]
    pub fn instance(&self) -> &str {
        self.process.rsplit_once(':').map_or(&self.process, |(instance, _)| instance)
    }

    /// Which one of its process: later ones have larger numbers.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.process, self.number)
    }
}

/// As its text.
impl Serialize for OwnerId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Debug for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnerId({self})")
    }
}

// === impl OwnerIds ===

impl OwnerIds {
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
            process: format!("{instance}:{random:016x}").into(),
            next: AtomicU64::new(0),
            next_call: AtomicU64::new(0),
            die: AtomicU64::new(random),
        }
    }

    /// Those of a child process: of the same instance.
    pub(crate) fn of_child(&self, random: u64) -> Self {
        let instance = self.process.rsplit_once(':').map_or(&*self.process, |(instance, _)| instance);
        Self::new(instance, random)
    }

    /// What all ids have in common.
    pub fn process(&self) -> &Arc<str> {
        &self.process
    }

    /// The next id.
    pub fn next(&self) -> OwnerId {
        OwnerId { process: Arc::clone(&self.process), number: self.next.fetch_add(1, Ordering::Relaxed) }
    }

    /// Whether this id was given out here: by this process, and with a number that it has reached.
    pub(crate) fn has_issued(&self, owner: &OwnerId) -> bool {
        owner.process == self.process && owner.number < self.next.load(Ordering::Relaxed)
    }

    pub(crate) fn next_call(&self) -> u64 {
        self.next_call.fetch_add(1, Ordering::Relaxed)
    }

    /// In 0..1: so that those who waited together do not ask together again.
    pub(crate) fn die(&self) -> f64 {
        fastrand::Rng::with_seed(self.die.fetch_add(1, Ordering::Relaxed)).f64()
    }
}

// === impl FencingToken ===

impl FencingToken {
    /// Bits for the sections of one grant.
    const SECTION_BITS: u32 = 10;

    /// The token of the first section under the grant with this fence. `None`: no token of 63 bits can be made
    /// of it, so the store is broken.
    pub(crate) fn of_grant(fence: u64) -> Option<Self> {
        let token = fence.checked_mul(1 << Self::SECTION_BITS)?;
        i64::try_from(token).is_ok().then_some(Self(token))
    }

    /// With this number. `None`: it has more than 63 bits.
    #[cfg(feature = "test-util")]
    pub(crate) fn of_number(number: u64) -> Option<Self> {
        i64::try_from(number).is_ok().then_some(Self(number))
    }

    /// The token of a later section under the same grant: the low bits count them, from zero.
    pub(crate) fn of_section(self, number: u16) -> Self {
        debug_assert!(number < 1 << Self::SECTION_BITS, "the store is asked for a new fence before");
        Self(self.0 | u64::from(number))
    }

    /// The fence of the grant it was made of.
    pub(crate) fn fence(self) -> u64 {
        self.0 >> Self::SECTION_BITS
    }

    /// The number, for a `u64`.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// The number, for a signed 64-bit column (`BIGINT`).
    #[must_use]
    pub const fn as_i64(self) -> i64 {
        self.0.cast_signed()
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// I3: what can be counted on of a lease, from the moment *before* the request that asked for it was sent.
pub(crate) fn safe_part(lease: Duration) -> Duration {
    lease.saturating_sub(lease / DRIFT_DIVISOR).saturating_sub(DRIFT_ROUNDING)
}

// === impl LeaseBounds ===

impl LeaseBounds {
    /// What the store is asked for, for a section that lasts so long at the most: the least lease
    /// whose [safe part](safe_part) does not end before it, though the answer takes as long as a
    /// call may. What is longer is renewed.
    pub(crate) fn of_section(self, section: Duration) -> Duration {
        let safe = section.saturating_add(self.call_timeout).saturating_add(DRIFT_ROUNDING);
        safe.saturating_add(safe / (DRIFT_DIVISOR - 1)).saturating_add(Duration::from_nanos(1)).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_ids_are_never_used_twice() {
        let (a, b) = (OwnerIds::new("api-7f3", 1), OwnerIds::new("api-7f3", 2));
        let all = [a.next(), a.next(), b.next(), b.next()];
        for (i, one) in all.iter().enumerate() {
            assert!(!all[i + 1..].contains(one), "{one} is there twice");
        }
        assert_eq!(all[1].to_string(), "api-7f3:0000000000000001:1");
        assert_eq!((all[1].instance(), all[1].process(), all[1].number()), ("api-7f3", "api-7f3:0000000000000001", 1));
        assert!(all.iter().all(|id| OwnerId::from_text(&id.to_string()) == *id));
    }

    #[test]
    fn only_ids_that_were_given_out_here_are_known_as_issued() {
        let (a, b) = (OwnerIds::new("api", 1), OwnerIds::new("api", 2));
        let ours = a.next();
        b.next();
        assert!(a.has_issued(&ours) && !b.has_issued(&ours));
        assert!(!a.has_issued(&OwnerId::from_text("api:0000000000000001:1")), "not yet");
        a.next();
        assert!(a.has_issued(&OwnerId::from_text("api:0000000000000001:1")));
    }

    #[test]
    fn an_owner_id_can_be_read_whatever_the_machine_is_called_and_whoever_wrote_it() {
        let odd = OwnerIds::new("bücher {eins}\n:a-name-that-is-much-too-long", 1).next();
        assert_eq!(odd.to_string(), "s---a-name-that-is-much-too-long:0000000000000001:0");
        let java = OwnerId::from_text("8b1b3cd2-2f9a-4d6e-9c56-6f0a2a1f0f3e:57");
        assert_eq!((java.instance(), java.number()), ("8b1b3cd2-2f9a-4d6e-9c56-6f0a2a1f0f3e", 57));
        assert_eq!(OwnerId::from_text("somebody").to_string(), "somebody:0");
    }

    #[test]
    fn sections_of_one_grant_have_tokens_of_their_own_below_those_of_the_next_grant() {
        let (one, two) = (FencingToken::of_grant(7).expect("fits"), FencingToken::of_grant(8).expect("fits"));
        let sections: Vec<_> = (0..1_000).map(|number| one.of_section(number)).collect();
        assert!(sections.is_sorted_by(|a, b| a < b) && sections[999] < two && sections[0] == one);
    }

    #[test]
    fn a_later_grant_has_a_larger_token_and_fits_a_signed_column() {
        let year_2255_us = 9_007_199_254_740_991;
        let one = FencingToken::of_grant(year_2255_us - 1).expect("fits");
        let two = FencingToken::of_grant(year_2255_us).expect("fits");
        assert!(one < two);
        assert!(two.as_i64() > 0 && two.as_i64().cast_unsigned() == two.as_u64());
        assert_eq!(FencingToken::of_grant(year_2255_us + 1), None, "a negative number in a column would sort first");
        assert_eq!(FencingToken::of_grant(u64::MAX), None);
    }

    #[test]
    fn a_lease_covers_a_section_of_its_length_and_no_more_than_it_must() {
        let call_timeout = Duration::from_millis(500);
        let bounds = LeaseBounds { longest: Duration::from_secs(600), call_timeout };
        for ms in [0, 1, 99, 1_000, 5_000, 29_999, 500_000] {
            let section = Duration::from_millis(ms);
            let lease = bounds.of_section(section);
            assert!(safe_part(lease) >= section + call_timeout, "{section:?} under {lease:?}");
            assert!(
                safe_part(lease) <= section + call_timeout + Duration::from_millis(1),
                "{section:?} under {lease:?}"
            );
        }
        assert_eq!(bounds.of_section(Duration::MAX), bounds.longest);
    }

    #[test]
    fn drift_is_taken_off_a_lease() {
        assert_eq!(safe_part(Duration::from_secs(30)), Duration::from_millis(29_698));
        assert_eq!(safe_part(Duration::from_millis(1)), Duration::ZERO, "nothing can be counted on");
    }
}
