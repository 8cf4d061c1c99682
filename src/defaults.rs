//! Every number the crate decides for its user, in one place.
//!
//! The README has the same table; a test holds the two together.

use std::time::Duration;

/// How long the store keeps a grant that nobody gives back: what a crashed holder costs.
pub(crate) const LEASE: Duration = Duration::from_secs(30);

/// A lease is renewed so many times before it would be over: two that fail are survived.
pub(crate) const RENEWALS_PER_LEASE: u32 = 3;
/// A renewal that was not answered is asked for again after this part of the lease.
pub(crate) const RENEWAL_RETRIES_PER_LEASE: u32 = 30;

/// The part of a lease that is not counted on, for clocks that run at different rates: 1 / 100 of it …
pub(crate) const DRIFT_DIVISOR: u32 = 100;
/// … and the rounding of the store's own clock.
pub(crate) const DRIFT_ROUNDING: Duration = Duration::from_millis(2);

/// How long `locks.lock(key)` waits if nobody says otherwise: every wait has an end.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(30);

/// How long a request waits if nobody says otherwise: not at all, it is refused.
pub(crate) const REQUEST_WAIT: Duration = Duration::ZERO;

/// How often a waiter asks the store again when the holder is elsewhere.
pub(crate) const CHECK_IN: Duration = Duration::from_secs(1);

/// How long one call of the store may take.
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a finished answer waits for its lock to be given back before it is sent all the same.
pub(crate) const RELEASE_WAIT: Duration = Duration::from_millis(250);

/// Waiters in line for one key.
pub(crate) const LINE_PER_KEY: usize = 256;
/// Waiters in all lines of one [`Locks`](crate::Locks).
pub(crate) const LINE_PER_PROCESS: usize = 10_000;

/// Bytes of a key's text; what is longer ends in a hash.
pub(crate) const KEY_BYTES: usize = 256;
/// Bytes of a raw name. It cannot be shortened, so it is refused.
pub(crate) const RAW_KEY_BYTES: usize = 1024;

/// Bytes of a body that is read for its key at the most, whatever the route's `DefaultBodyLimit` says.
#[cfg(feature = "axum")]
pub(crate) const BODY_BYTES: u64 = 64 << 20;

/// Frames of a response, behind a first one of any size, that are looked at before the head is sent, and their bytes: is it
/// complete already?
pub(crate) const LOOK_FRAMES: usize = 16;
pub(crate) const LOOK_BYTES: usize = 64 << 10;

/// What a refused client is told to wait, at the least and at the most.
pub(crate) const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
pub(crate) const RETRY_AFTER_MAX: Duration = Duration::from_secs(5);
/// The least that `retry_after_ms`, the finer figure, says: sections may be shorter, but a client that asks again at once is a loop.
pub(crate) const RETRY_AFTER_FLOOR: Duration = Duration::from_millis(10);
/// A route's usual hold before the first one was measured.
pub(crate) const USUAL_HOLD: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_has_the_same_numbers() {
        let readme = include_str!("../README.md");
        let s = |duration: Duration| format!("{} s", duration.as_secs());
        for (number, value) in [
            ("lease", s(LEASE)),
            ("renewal", format!("every {}", s(LEASE / RENEWALS_PER_LEASE))),
            ("drift", format!("{} % + {} ms", 100 / DRIFT_DIVISOR, DRIFT_ROUNDING.as_millis())),
            ("`locks.lock` without `.wait`", s(LOCK_WAIT)),
            ("check-in of a waiter, if the holder is elsewhere", s(CHECK_IN)),
            ("store call", s(STORE_TIMEOUT)),
            ("release before a finished answer is sent", format!("{} ms", RELEASE_WAIT.as_millis())),
            ("line for one key", LINE_PER_KEY.to_string()),
            ("lines of all keys, for one `Locks` and its clones", LINE_PER_PROCESS.to_string()),
            ("key text", format!("{KEY_BYTES} bytes")),
            ("raw key text", format!("{RAW_KEY_BYTES} bytes")),
            ("frames looked at before the head is sent", LOOK_FRAMES.to_string()),
            ("bytes looked at before the head is sent", format!("{} KiB", LOOK_BYTES >> 10)),
            ("`Retry-After`", format!("{} to {}", RETRY_AFTER_MIN.as_secs(), s(RETRY_AFTER_MAX))),
        ] {
            let row = format!("| {number} | {value} |");
            assert!(readme.contains(&row), "not in the README: {row}");
        }
        #[cfg(feature = "axum")]
        assert!(readme.contains(&format!("at most {} MiB |", BODY_BYTES >> 20)));
        assert_eq!(REQUEST_WAIT, Duration::ZERO, "refuse at once");
    }
}
