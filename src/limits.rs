//! Every number the crate decides for its user, in one place.
//!
//! The README has the same table; a test holds the two together.

use std::time::Duration;

/// How long the store keeps a grant that nobody gives back: what a crashed holder costs.
pub(crate) const LEASE: Duration = Duration::from_secs(30);

/// The shortest lease that can be set: four calls of the store. And the longest: a crash should not
/// block a key for longer.
pub(crate) const LEASE_MIN: Duration = Duration::from_secs(2);
pub(crate) const LEASE_MAX: Duration = Duration::from_secs(600);

/// A lease is renewed so many times before it would be over: two that fail are survived.
pub(crate) const RENEWALS_PER_LEASE: u32 = 3;
/// A renewal that was not answered is asked for again after this part of the lease.
pub(crate) const RENEWAL_RETRIES_PER_LEASE: u32 = 30;
/// .. but no sooner than this: a call of the store takes its time.
pub(crate) const RENEWAL_RETRY_MIN: Duration = Duration::from_millis(250);

/// What is due within this time is renewed together with what is due already.
pub(crate) const RENEWAL_BATCH_WINDOW: Duration = Duration::from_millis(500);
/// .. at most this part of the lease.
pub(crate) const RENEWAL_BATCH_WINDOWS_PER_LEASE: u32 = 60;
/// Grants in one call.
pub(crate) const MAX_RENEWALS_PER_CALL: usize = 1000;

/// The part of a lease that is not counted on, for clocks that run at different rates: 1 / 100 of it …
pub(crate) const DRIFT_DIVISOR: u32 = 100;
/// … and the rounding of the store's own clock.
pub(crate) const DRIFT_ROUNDING: Duration = Duration::from_millis(2);

/// How long `locks.lock(key)` waits if nobody says otherwise: every wait has an end.
pub(crate) const LOCK_WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a request waits if nobody says otherwise: not at all, it is refused.
pub(crate) const REQUEST_WAIT_TIMEOUT: Duration = Duration::ZERO;

/// How long the key of a section that ended badly stays taken, for statements that are on their way still; the store counts it on top of
/// the lease, for holders that cannot say how they ended.
pub(crate) const LOCK_DELAY: Duration = Duration::from_secs(1);

/// The longest lock-delay: what is longer is a mistake, and would outlive everybody who could tell.
pub(crate) const LOCK_DELAY_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest `min_hold`: a larger value is a mistake, and the key would stay taken after all
/// processes that know of it have ended.
pub(crate) const MIN_HOLD_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// A grant with less of its lease left than this part is given back and asked for again.
pub(crate) const MIN_REMAINING_DIVISOR: u32 = 4;

/// How often a waiter asks the store again when the holder is elsewhere, give or take a fifth: what a lost message costs.
pub(crate) const QUEUE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The lease of an offer to the next in line: longer than a stalled round trip, short enough to lose.
pub(crate) const OFFER_TTL: Duration = Duration::from_secs(3);
/// A place in the store's line is forgotten when nobody has asked for so long.
pub(crate) const QUEUE_ENTRY_TTL: Duration = Duration::from_secs(10);
/// Processes in the store's line for one key.
pub(crate) const MAX_STORE_WAITERS: usize = 1024;

/// For so long, or so many sections, a process hands a key on within itself before it lets others have their turn.
pub(crate) const LOCAL_HANDOFF_TIME: Duration = Duration::from_millis(100);
pub(crate) const LOCAL_HANDOFF_SECTIONS: u16 = 1000;

/// Messages that a process cannot trust lead to one question to the store in this time at the most: for each grant that is said to be
/// revoked, and for all that wait after a gap.
pub(crate) const RECHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Offers to ids that nothing is known of any more are released so many at a time; the lease of an offer ends the others.
pub(crate) const MAX_UNCLAIMED_OFFER_RELEASES: usize = 8;

/// How long one call of the store may take.
pub(crate) const STORE_CALL_TIMEOUT: Duration = Duration::from_millis(500);
/// How long it may take to connect to Redis.
#[cfg(feature = "redis")]
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A request is turned away when no call for its key was answered for so long: one call, and one repeat.
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_secs(1);
/// What failed is asked for again so soon at first, and twice as late each time, up to the second.
pub(crate) const RETRY_MIN: Duration = Duration::from_millis(10);
pub(crate) const RETRY_MAX: Duration = Duration::from_secs(1);

/// So often at the most a log is told why the store does not answer.
pub(crate) const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// Reports to a log or a recorder that are not told yet: one that blocks loses the rest.
#[cfg(any(feature = "tracing", feature = "metrics"))]
pub(crate) const MAX_QUEUED_REPORTS: usize = 1024;

/// Give-backs that are not known to have reached the store: beyond them nothing new is asked for.
pub(crate) const MAX_PENDING_RELEASES: usize = 10_000;

/// How long a request holds a key if nobody says otherwise: a hung handler.
pub(crate) const MAX_HOLD: Duration = Duration::from_secs(300);

/// How long a client may keep us waiting for the next bytes of a body: a phone in a tunnel.
pub(crate) const BODY_IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes a second that it must move at the least: a sign of life alone keeps a key taken as well as none.
pub(crate) const MIN_BODY_RATE: u64 = 16 << 10;

/// Handlers of one [`LockManager`](crate::LockManager) that finish without their client.
pub(crate) const MAX_DETACHED_HANDLERS: usize = 1024;

/// How long a finished answer waits for its lock to be given back before it is sent all the same.
pub(crate) const RELEASE_WAIT: Duration = Duration::from_millis(250);

/// Waiters in line for one key.
pub(crate) const MAX_WAITERS_PER_KEY: usize = 256;
/// Waiters in all lines of one [`LockManager`](crate::LockManager).
pub(crate) const MAX_WAITERS_PER_PROCESS: usize = 10_000;
/// Of those, places that are only for keys that nobody waits for yet: one for each key. A flood on
/// some keys does not reach them.
pub(crate) const FIRST_WAITER_RESERVE: usize = MAX_WAITERS_PER_PROCESS / 4;
/// One key may have this part of the places that are left beyond the reserve.
pub(crate) const WAITER_SHARE_DIVISOR: usize = 8;

/// Bytes of a key's text; what is longer ends in a hash.
pub(crate) const MAX_KEY_BYTES: usize = 256;
/// Bytes of a raw name. It cannot be shortened, so it is refused.
pub(crate) const MAX_RAW_KEY_BYTES: usize = 1024;

/// Bytes of a body that is read before its lock is taken, where nobody says how long it may be: as Axum's `DefaultBodyLimit`.
#[cfg(not(feature = "axum"))]
pub(crate) const DEFAULT_BODY_LIMIT: u64 = 2 << 20;
/// .. and at the most, whatever the route's `DefaultBodyLimit` says.
#[cfg(feature = "axum")]
pub(crate) const MAX_BODY_BYTES: u64 = 64 << 20;

/// Bytes of the bodies of all requests of one [`LockManager`](crate::LockManager) that are read before their lock is taken: so many that one body of any
/// size that is read fits, if nobody else's is there.
pub(crate) const MAX_BUFFERED_BYTES: u64 = 64 << 20;
/// The complete bodies of the waiters of one key may have this part of what is left of it.
pub(crate) const BUFFERED_SHARE_DIVISOR: u64 = 8;
#[cfg(feature = "axum")]
const _: () = assert!(MAX_BODY_BYTES <= MAX_BUFFERED_BYTES);

/// Frames of a response, behind a first one of any size, that are looked at before the head is sent, and their bytes: is it
/// complete already?
pub(crate) const EAGER_FRAMES: usize = 16;
pub(crate) const EAGER_BYTES: usize = 64 << 10;

/// What the names of locks in Redis begin with, if nobody sets another prefix.
#[cfg(feature = "redis")]
pub(crate) const REDIS_PREFIX: &str = "lock";

/// What a refused client is told to wait, at the least and at the most.
pub(crate) const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
pub(crate) const RETRY_AFTER_MAX: Duration = Duration::from_secs(5);
/// The least that `retry_after_ms`, the finer figure, says: sections may be shorter, but a client that asks again at once is a loop.
pub(crate) const RETRY_AFTER_FLOOR: Duration = Duration::from_millis(10);
/// A route's usual hold before the first one was measured.
pub(crate) const INITIAL_HOLD_ESTIMATE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_has_the_same_numbers() {
        let readme = include_str!("../README.md");
        let s = |duration: Duration| format!("{} s", duration.as_secs());
        for (number, value) in [
            ("lease (`LockManagerBuilder::lease`)", s(LEASE)),
            ("shortest lease", s(LEASE_MIN)),
            ("longest lease", format!("{} min", LEASE_MAX.as_secs() / 60)),
            ("renewal", format!("every third of the lease: {}", s(LEASE / RENEWALS_PER_LEASE))),
            ("drift", format!("{} % + {} ms", 100 / DRIFT_DIVISOR, DRIFT_ROUNDING.as_millis())),
            ("`locks.lock` without `.wait`", s(LOCK_WAIT_TIMEOUT)),
            ("poll of a waiter, if the holder is elsewhere", s(QUEUE_POLL_INTERVAL)),
            ("lock-delay", s(LOCK_DELAY)),
            ("longest lock-delay", format!("{} h", LOCK_DELAY_MAX.as_secs() / 3600)),
            ("longest `min_hold`", format!("{} h", MIN_HOLD_MAX.as_secs() / 3600)),
            (
                "minimum remaining lease of a new grant",
                format!("{} s", LEASE.as_secs_f64() / f64::from(MIN_REMAINING_DIVISOR)),
            ),
            ("offer to the next waiter", s(OFFER_TTL)),
            ("entry in the store queue", s(QUEUE_ENTRY_TTL)),
            ("processes in the store queue", MAX_STORE_WAITERS.to_string()),
            (
                "local handoffs within a process",
                format!("{} ms or {LOCAL_HANDOFF_SECTIONS}", LOCAL_HANDOFF_TIME.as_millis()),
            ),
            ("store call", format!("{} ms", STORE_CALL_TIMEOUT.as_millis())),
            ("store timeout", s(STORE_TIMEOUT)),
            ("retries of a failed call", format!("{} ms to {}", RETRY_MIN.as_millis(), s(RETRY_MAX))),
            ("pending releases", MAX_PENDING_RELEASES.to_string()),
            ("`max_hold` of a request", format!("{} min", MAX_HOLD.as_secs() / 60)),
            ("`body_idle_timeout`", s(BODY_IDLE_TIMEOUT)),
            ("`min_body_rate`", format!("{} KiB/s", MIN_BODY_RATE >> 10)),
            (
                "handlers that finish after a disconnect (`LockManagerBuilder::max_detached`), of one route at most as many as stay free",
                MAX_DETACHED_HANDLERS.to_string(),
            ),
            ("release before a complete response is sent", format!("{} ms", RELEASE_WAIT.as_millis())),
            ("queue of one key", MAX_WAITERS_PER_KEY.to_string()),
            ("queues of all keys, for one `LockManager` and its clones", MAX_WAITERS_PER_PROCESS.to_string()),
            ("of those, for the first waiter of a key", FIRST_WAITER_RESERVE.to_string()),
            ("of the remaining ones, for one key", format!("1 / {WAITER_SHARE_DIVISOR}")),
            (
                "bodies of all requests before their lock, for one `LockManager` and its clones",
                format!("{} MiB", MAX_BUFFERED_BYTES >> 20),
            ),
            ("of the remaining memory, for the waiters of one key", format!("1 / {BUFFERED_SHARE_DIVISOR}")),
            ("key text", format!("{MAX_KEY_BYTES} bytes")),
            ("raw key text", format!("{MAX_RAW_KEY_BYTES} bytes")),
            ("frames read before the head is sent", EAGER_FRAMES.to_string()),
            ("bytes read before the head is sent", format!("{} KiB", EAGER_BYTES >> 10)),
            ("`Retry-After`", format!("{} to {}", RETRY_AFTER_MIN.as_secs(), s(RETRY_AFTER_MAX))),
        ] {
            let row = format!("| {number} | {value} |");
            assert!(readme.contains(&row), "not in the README: {row}");
        }
        #[cfg(feature = "axum")]
        assert!(readme.contains(&format!("at most {} MiB |", MAX_BODY_BYTES >> 20)));
        #[cfg(feature = "tracing")]
        assert!(readme.contains(&format!("| warnings of a store that does not reply | one in {} |", s(WARN_INTERVAL))));
        #[cfg(feature = "redis")]
        assert!(readme.contains(&format!("| a connection to Redis | {} |", s(CONNECT_TIMEOUT))));
        #[cfg(feature = "redis")]
        assert!(readme.contains(&format!("| prefix of names in Redis | `{REDIS_PREFIX}` |")));
        assert_eq!(REQUEST_WAIT_TIMEOUT, Duration::ZERO, "refuse at once");
    }
}
