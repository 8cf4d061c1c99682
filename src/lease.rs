//! What a store grants, and to whom: the words both halves of the crate share.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::defaults::{DRIFT_DIVISOR, DRIFT_ROUNDING};

/// Who holds a key in the store: one acquisition, never used again.
///
/// A new id for every acquisition is what makes each verb of a store safe to repeat: a late release finds its own
/// grant or nothing. It is shown to whoever operates the store, and in no answer to a client.
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

/// Names the acquisitions of one [`Locks`](crate::Locks).
#[derive(Debug)]
pub(crate) struct OwnerIds {
    process: Arc<str>,
    next: AtomicU64,
}

// === impl OwnerId ===

impl OwnerId {
    /// Which one of its process: later ones have larger numbers.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.process, self.number)
    }
}

impl fmt::Debug for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnerId({self})")
    }
}

// === impl OwnerIds ===

impl OwnerIds {
    /// `random`: 64 bits that no other handle on the same store has.
    pub(crate) fn new(random: u64) -> Self {
        Self { process: format!("{random:016x}").into(), next: AtomicU64::new(0) }
    }

    pub(crate) fn next(&self) -> OwnerId {
        OwnerId { process: Arc::clone(&self.process), number: self.next.fetch_add(1, Ordering::Relaxed) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_ids_are_never_used_twice() {
        let (a, b) = (OwnerIds::new(1), OwnerIds::new(2));
        let all = [a.next(), a.next(), b.next(), b.next()];
        for (i, one) in all.iter().enumerate() {
            assert!(!all[i + 1..].contains(one), "{one} is there twice");
        }
        assert_eq!(all[1].to_string(), "0000000000000001:1");
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
    fn drift_is_taken_off_a_lease() {
        assert_eq!(safe_part(Duration::from_secs(30)), Duration::from_millis(29_698));
        assert_eq!(safe_part(Duration::from_millis(1)), Duration::ZERO, "nothing can be counted on");
    }
}
