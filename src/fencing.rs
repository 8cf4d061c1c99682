//! The fencing token of a lock.

use std::fmt;

/// Number that increases with every grant of a key.
///
/// A holder may be paused until its lease has expired, and write afterwards. A lock cannot prevent
/// that write, but the target of the write can: it stores the largest token and rejects smaller
/// ones (Kleppmann 2016, after the sequencers of Burrows 2006).
///
/// ```sql
/// -- No row is updated: the token is stale. Roll back.
/// UPDATE account_fence SET token = :token WHERE account = :account AND token <= :token;
/// ```
///
/// The low ten bits number the sections under one grant. The other bits are the fence of the grant.
/// A fence also rises over a restart of the store, and so do the tokens. In the stores of this
/// crate a fence is at least the clock of the store in microseconds, and a token fits into a signed
/// 64-bit column until the year 2255.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(u64);

impl FencingToken {
    /// Bits for the sections of one grant.
    const SECTION_BITS: u32 = 10;

    /// The token of the first section under a grant with this fence. `None`: the fence is too large
    /// for a token of 63 bits, which violates the contract of the store.
    pub(crate) fn from_fence(fence: u64) -> Option<Self> {
        let token = fence.checked_mul(1 << Self::SECTION_BITS)?;
        i64::try_from(token).is_ok().then_some(Self(token))
    }

    /// The token with this value. `None`: it has more than 63 bits.
    #[cfg(feature = "test-util")]
    pub(crate) fn from_raw(value: u64) -> Option<Self> {
        i64::try_from(value).is_ok().then_some(Self(value))
    }

    /// The token of a later section under the same grant, counted from zero.
    pub(crate) fn with_sequence(self, sequence: u16) -> Self {
        debug_assert!(sequence < 1 << Self::SECTION_BITS, "a new fence is requested before");
        Self(self.0 | u64::from(sequence))
    }

    /// The fence of the grant.
    pub(crate) fn fence(self) -> u64 {
        self.0 >> Self::SECTION_BITS
    }

    /// Returns the token as `u64`.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// Returns the token as `i64`, for a signed 64-bit column (`BIGINT`).
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

    /// Guarantee: G11.
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
