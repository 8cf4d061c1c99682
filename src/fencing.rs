//! The fencing token of a lock.

use std::fmt;

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

impl FencingToken {
    /// Bits for the sections of one grant.
    const SECTION_BITS: u32 = 10;

    /// The token of the first section under the grant with this fence. `None`: no token of 63 bits can be made
    /// of it, so the store is broken.
    pub(crate) fn from_fence(fence: u64) -> Option<Self> {
        let token = fence.checked_mul(1 << Self::SECTION_BITS)?;
        i64::try_from(token).is_ok().then_some(Self(token))
    }

    /// With this number. `None`: it has more than 63 bits.
    #[cfg(feature = "test-util")]
    pub(crate) fn from_raw(number: u64) -> Option<Self> {
        i64::try_from(number).is_ok().then_some(Self(number))
    }

    /// The token of a later section under the same grant: the low bits count them, from zero.
    pub(crate) fn with_sequence(self, number: u16) -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn section_tokens_rise_and_stay_below_the_next_grant() {
        let (one, two) = (FencingToken::from_fence(7).expect("fits"), FencingToken::from_fence(8).expect("fits"));
        let sections: Vec<_> = (0..1_000).map(|number| one.with_sequence(number)).collect();
        assert!(sections.is_sorted_by(|a, b| a < b) && sections[999] < two && sections[0] == one);
    }

    #[test]
    fn later_grants_have_larger_tokens_that_fit_i64() {
        let year_2255_us = 9_007_199_254_740_991;
        let one = FencingToken::from_fence(year_2255_us - 1).expect("fits");
        let two = FencingToken::from_fence(year_2255_us).expect("fits");
        assert!(one < two);
        assert!(two.as_i64() > 0 && two.as_i64().cast_unsigned() == two.as_u64());
        assert_eq!(FencingToken::from_fence(year_2255_us + 1), None, "a negative number in a column would sort first");
        assert_eq!(FencingToken::from_fence(u64::MAX), None);
    }
}
