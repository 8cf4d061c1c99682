//! Defaults and bounds of the crate.
//!
//! The documentation has the same numbers; a test compares them.

use std::time::Duration;

/// The lease of a grant: how long a crashed holder blocks a key.
pub(crate) const LEASE: Duration = Duration::from_secs(30);

/// The shortest lease: four calls of the store. The longest lease bounds how long a crash blocks a
/// key.
pub(crate) const LEASE_MIN: Duration = Duration::from_secs(2);
pub(crate) const LEASE_MAX: Duration = Duration::from_secs(600);

/// Renewals per lease: two that fail do not lose the lock.
pub(crate) const RENEWALS_PER_LEASE: u32 = 3;
/// A renewal without a reply is repeated after this part of the lease.
pub(crate) const RENEWAL_RETRIES_PER_LEASE: u32 = 30;
/// .. but not before this time, because the first call may still be in flight.
pub(crate) const RENEWAL_RETRY_MIN: Duration = Duration::from_millis(250);

/// Grants that are due within this time are renewed in one call.
pub(crate) const RENEWAL_BATCH_WINDOW: Duration = Duration::from_millis(500);
/// .. at most this part of the lease.
pub(crate) const RENEWAL_BATCH_WINDOWS_PER_LEASE: u32 = 60;
/// Grants in one renewal call: it delays the calls of others in the store by less than a
/// millisecond.
pub(crate) const MAX_RENEWALS_PER_CALL: usize = 128;
/// Renewal calls under way at the same time, at one server of the store.
pub(crate) const MAX_RENEWAL_CALLS: usize = 2;
/// If renewals wait longer than this part of the lease for their turn, no key is acquired ..
pub(crate) const LATE_RENEWALS_PER_LEASE: u32 = 15;
/// .. for this time.
pub(crate) const LATE_RENEWALS_PAUSE: Duration = Duration::from_secs(1);

/// Records in a `MemoryStore`.
#[cfg(feature = "memory")]
pub(crate) const MAX_MEMORY_RECORDS: usize = 100_000;
/// The bodies of these records, and the same for their heads.
#[cfg(feature = "memory")]
pub(crate) const MAX_MEMORY_RECORD_BYTES: usize = 64 << 20;

/// Keys in one page of a listing.
pub(crate) const MAX_LISTED_KEYS: usize = 1000;

/// Waits that are linked to their cause, and that the console shows, at least this time: a shorter
/// one slows no client down.
pub(crate) const LONG_WAIT: Duration = Duration::from_millis(10);
/// How many of them are kept, the longest ones, and for how long after their end: an operator asks
/// why it was slow, not why it is.
#[cfg(feature = "console")]
pub(crate) const MAX_LONG_WAITS: usize = 32;
#[cfg(feature = "console")]
pub(crate) const LONG_WAIT_KEPT: Duration = Duration::from_secs(5 * 60);
/// The bytes of a route that a section leaves with its trace.
pub(crate) const MAX_TRACE_ROUTE_BYTES: usize = 64;
/// Routes with a counter of their own: other instances name them.
pub(crate) const MAX_BLOCKING_ROUTES: usize = 100;
/// Rows of one table of the console. A reader looks at fewer.
#[cfg(feature = "console")]
pub(crate) const MAX_CONSOLE_ROWS: usize = 100;
/// The form of a revocation: three times a raw key, and an acquisition id.
#[cfg(feature = "console")]
pub(crate) const MAX_CONSOLE_FORM_BYTES: usize = 8 << 10;
/// The bytes of a key that the console shows. A raw key may be longer.
#[cfg(feature = "console")]
pub(crate) const MAX_SHOWN_KEY_BYTES: usize = 256;

/// The part of a lease that is not used, because clocks run at different rates: 1 / 100 …
pub(crate) const DRIFT_DIVISOR: u32 = 100;
/// … plus the rounding of the store's clock.
pub(crate) const DRIFT_ROUNDING: Duration = Duration::from_millis(2);

/// Keys that are locked together: as many as one call of a store has.
pub(crate) const MAX_KEYS_TOGETHER: usize = 64;
/// Keys that the requests for several keys of one manager hold while they wait for another one. A
/// route and a client have a part of it.
pub(crate) const MAX_KEYS_OF_WAITERS: usize = 4_096;

/// Pairs of namespaces whose orders are compared. A service with more has few of them in a route.
pub(crate) const MAX_ORDERED_PAIRS: usize = 256;

/// Default wait of `locks.lock(key)`: every wait has an end.
pub(crate) const LOCK_WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Default wait of a request: none, it is rejected.
pub(crate) const REQUEST_WAIT_TIMEOUT: Duration = Duration::ZERO;

/// The longest time that a handler has for its end when a newer request replaces it.
pub(crate) const MAX_GRACE: Duration = Duration::from_secs(30);

/// The least wait of such a newer request, beyond that time and a renewal of the lease: a message
/// may be lost.
pub(crate) const NEWEST_WAIT: Duration = Duration::from_secs(2);

/// Default lock-delay: how long a key stays blocked after an abnormal end, because writes may still
/// be in flight. The store adds it to the lease, for holders that crash.
pub(crate) const LOCK_DELAY: Duration = Duration::from_secs(1);

/// The longest lock-delay. A larger value is a mistake.
pub(crate) const LOCK_DELAY_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest `min_hold`. A larger value is a mistake, and would block the key longer than any
/// process runs.
pub(crate) const MIN_HOLD_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// A grant with less than this part of its lease left is released and acquired again.
pub(crate) const MIN_REMAINING_DIVISOR: u32 = 4;

/// How often a waiter polls the store if the holder is in another process, with 20 % of jitter: the
/// delay of a lost message.
pub(crate) const QUEUE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The lease of an offer: longer than a slow round trip, and a short delay if its process is dead.
pub(crate) const OFFER_TTL: Duration = Duration::from_secs(3);
/// The shortest lease of an offer that an acquire makes. No holder has released the key: an earlier
/// offer may have expired, and its process may be stopped, as may be the next one.
pub(crate) const REPEATED_OFFER_TTL: Duration = Duration::from_secs(1);
/// A queue entry in the store expires after this time without a poll.
pub(crate) const QUEUE_ENTRY_TTL: Duration = Duration::from_secs(10);
/// Processes in the store's queue of one key.
pub(crate) const MAX_STORE_WAITERS: usize = 1024;

/// The longest time and the most sections of local handoffs, before the key is offered to other
/// processes.
pub(crate) const LOCAL_HANDOFF_TIME: Duration = Duration::from_millis(100);
pub(crate) const LOCAL_HANDOFF_SECTIONS: u16 = 1000;

/// The most acquisitions that hold a key beside each other: as readers, or as one of this many
/// permits.
pub(crate) const MAX_HOLDERS: u16 = 1024;

/// How long a ticket holds its key between two requests: at least as long as a client needs to get
/// its response, and at most for a day, because nothing renews it.
pub(crate) const TICKET_GAP_MIN: Duration = Duration::from_secs(1);
pub(crate) const TICKET_GAP_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// The text of a ticket: a key in percent-encoding, a name, and some numbers.
pub(crate) const MAX_TICKET_BYTES: usize = 2048;
/// The name in a ticket: in percent-encoding it fits into an id of 255 bytes.
pub(crate) const MAX_TICKET_LABEL_BYTES: usize = 64;

/// The most holders of a key that its status lists.
pub(crate) const MAX_LISTED_HOLDERS: usize = 64;

/// A number of permits. Zero would never be granted.
#[track_caller]
pub(crate) fn check_max_holders(limit: u16) -> u16 {
    assert!(
        (1..=MAX_HOLDERS).contains(&limit),
        "{limit} permits are not possible: 1 to {MAX_HOLDERS} are (a tenant without any is one of `at_most_by`)"
    );
    limit
}

/// Unverified messages cause at most one call in this time: for each grant with a revocation
/// message, and for all waiters after lost messages.
pub(crate) const RECHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The shortest time between two checks of all grants, because the store may have lost locks. With
/// a long lease it is a thirtieth of the lease.
pub(crate) const DOUBT_INTERVAL: Duration = Duration::from_secs(1);
/// How long a recheck that became due waits for the next message that the key is free.
pub(crate) const RECHECK_GRACE: Duration = Duration::from_millis(10);
/// Raw keys whose channel of Redisson a process listens to. The waiters of further ones poll: about
/// a second is the latency that they had without messages.
#[cfg(feature = "redis")]
pub(crate) const MAX_RAW_KEYS: usize = 1024;
/// After the last reply that an acquisition waits: a key with waiters is subscribed once, and not
/// for each wait. It has a reply in each poll.
#[cfg(feature = "redis")]
pub(crate) const RAW_KEY_LISTENS: Duration = Duration::from_secs(10);
/// The most concurrent releases of offers to unknown ids; other such offers expire.
pub(crate) const MAX_UNCLAIMED_OFFER_RELEASES: usize = 8;

/// The timeout of one call of the store.
#[cfg(any(test, feature = "memory", feature = "__remote", feature = "test-util"))]
pub(crate) const STORE_CALL_TIMEOUT: Duration = Duration::from_millis(500);
/// The timeout of connecting to a server.
#[cfg(feature = "__remote")]
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest timeout of connecting to a server.
#[cfg(feature = "__remote")]
pub(crate) const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// The longest timeout of one call of a server.
#[cfg(feature = "__remote")]
pub(crate) const STORE_CALL_TIMEOUT_MAX: Duration = Duration::from_secs(5);
/// The shortest timeout of connecting to a server and of one call.
#[cfg(feature = "__remote")]
pub(crate) const STORE_TIMEOUT_MIN: Duration = Duration::from_millis(50);
/// How long a call waits for the replicas of a URL: a multiple of the usual time of replication.
#[cfg(feature = "redis")]
pub(crate) const REDIS_MIN_REPLICAS_TIMEOUT: Duration = Duration::from_millis(100);
/// Acquires that wait until they are sent to a server; further ones fail at once.
#[cfg(any(feature = "__database", feature = "redis"))]
pub(crate) const MAX_WAITING_REQUESTS: usize = 10_000;
/// Default of the most connections of a store to a database: most of them for commits that wait for
/// the disk.
#[cfg(feature = "__database")]
pub(crate) const DATABASE_CONNECTIONS: usize = 6;
/// The most connections of a store to a database.
#[cfg(feature = "__database")]
pub(crate) const DATABASE_CONNECTIONS_MAX: usize = 64;
/// The fewest connections of a store to MySQL: for acquires and releases, and for renewals.
#[cfg(feature = "mysql")]
pub(crate) const MYSQL_CONNECTIONS_MIN: usize = 2;
/// Bytes of the prefix of the tables in MySQL: a name has at most 64.
#[cfg(feature = "mysql")]
pub(crate) const MAX_MYSQL_PREFIX_BYTES: usize = 32;
/// When a waiter of MySQL asks again: a random time between these. The server sends no messages.
#[cfg(feature = "mysql")]
pub(crate) const MYSQL_POLL: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(150)];
/// The fewest connections of a store to PostgreSQL: for acquires, for releases, and for messages.
#[cfg(feature = "postgres")]
pub(crate) const POSTGRES_CONNECTIONS_MIN: usize = 3;
/// Default schema of the tables in PostgreSQL, and prefix of those in MySQL.
#[cfg(feature = "__database")]
pub(crate) const TABLES_NAME: &str = "tower_lock";
/// Bytes of the name of a schema: PostgreSQL cuts a longer name, and two could become one.
#[cfg(feature = "postgres")]
pub(crate) const MAX_POSTGRES_SCHEMA_BYTES: usize = 63;
/// When a waiter asks again for a key that a transaction of the application keeps: no message comes
/// when that transaction ends.
#[cfg(feature = "__database")]
pub(crate) const PINNED_POLL: Duration = Duration::from_millis(100);
/// When a waiter asks again that gets no messages of PostgreSQL: a random time between these.
#[cfg(feature = "postgres")]
pub(crate) const POSTGRES_UNNOTIFIED_POLL: [Duration; 2] = [Duration::from_millis(200), Duration::from_millis(300)];
/// Rows that one call of the sweep reads: it takes a few milliseconds of the connection for
/// releases.
#[cfg(feature = "__database")]
pub(crate) const SWEEP_ROWS: i64 = 500;
/// Between two sweeps over all rows: a row that is not used stays for a minute anyway.
#[cfg(feature = "__database")]
pub(crate) const SWEEP_INTERVAL: Duration = Duration::from_secs(30);
/// Between two pages of a sweep: ten thousand rows a second, more than one instance locks.
#[cfg(feature = "__database")]
pub(crate) const SWEEP_PAUSE: Duration = Duration::from_millis(50);
/// Rows that one page of a listing reads, also of keys that are not listed.
#[cfg(feature = "__database")]
pub(crate) const LISTED_ROWS: i64 = 2000;
/// The servers of a `RedlockStore`: with an even number, two halves would have no majority. More
/// than nine cost calls, and no service has so many independent failures.
#[cfg(feature = "redis")]
pub(crate) const REDLOCK_SERVERS_MIN: usize = 3;
#[cfg(feature = "redis")]
pub(crate) const REDLOCK_SERVERS_MAX: usize = 9;
/// When a waiter of a `RedlockStore` asks again: a random time after the first and at most after
/// the second. No server has a queue, or sends messages.
#[cfg(feature = "redis")]
pub(crate) const REDLOCK_POLL: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(150)];
/// The same if votes are split: no acquisition has the key.
#[cfg(feature = "redis")]
pub(crate) const REDLOCK_SPLIT_POLL: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(50)];
/// The votes on an acquisition that does not wait, while they are split: with two callers, each
/// further one leaves half of the ties.
#[cfg(feature = "redis")]
pub(crate) const REDLOCK_VOTES_MAX: usize = 4;
/// The longest delay before the second of these votes: some round trips. Twice that before the
/// third, and so on.
#[cfg(feature = "redis")]
pub(crate) const REDLOCK_REVOTE_DELAY: Duration = Duration::from_millis(8);
/// A request is rejected after this time without a reply for its key: one call and one repetition.
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_secs(1);
/// The first delay and the longest delay before a failed call is repeated; each is twice the
/// previous.
pub(crate) const RETRY_MIN: Duration = Duration::from_millis(10);
pub(crate) const RETRY_MAX: Duration = Duration::from_secs(1);

/// The least time between two warnings that the store does not reply.
pub(crate) const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// The most reports that wait for a log or a recorder; a recorder that blocks loses further ones.
pub(crate) const MAX_QUEUED_REPORTS: usize = 1024;

/// The most pending releases. At this number, no key is acquired.
pub(crate) const MAX_RELEASES_UNDER_WAY: usize = 10_000;

/// Default of `max_hold`: it bounds a handler that hangs.
pub(crate) const MAX_HOLD: Duration = Duration::from_secs(300);

/// The longest time between two chunks of a body: a client with a lost connection.
pub(crate) const BODY_IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// The least bytes per second of a body: a very slow client blocks a key as long as a silent one.
pub(crate) const MIN_BODY_RATE: u64 = 16 << 10;

/// How long a record is kept.
pub(crate) const KEEP_FOR: Duration = Duration::from_secs(86_400);
/// Its minimum. A late copy of a store call must not find a record that has expired.
pub(crate) const KEEP_FOR_MIN: Duration = Duration::from_secs(1);
/// Its maximum: a year.
pub(crate) const KEEP_FOR_MAX: Duration = Duration::from_secs(366 * 86_400);

/// A time that a record may be kept. One that was silently adjusted would be noticed too late.
#[track_caller]
pub(crate) fn check_keep_for(time: Duration) -> Duration {
    assert!(
        (KEEP_FOR_MIN..=KEEP_FOR_MAX).contains(&time),
        "`keep_for({time:?})` cannot be set: it must be from {KEEP_FOR_MIN:?} to {KEEP_FOR_MAX:?}",
    );
    time
}

/// Equal requests are those of a double click, of a form that is sent again, or of a client that
/// repeats a request after a timeout.
pub(crate) const EQUAL_WITHIN_MIN: Duration = Duration::from_secs(1);
pub(crate) const EQUAL_WITHIN_MAX: Duration = Duration::from_secs(600);
/// How long an equal request waits for the answer of the first one: most clients give up then.
pub(crate) const EQUAL_WAIT: Duration = Duration::from_secs(30);

/// How long a leader waits for its key in one call, before it calls again.
pub(crate) const LEAD_WAIT: Duration = Duration::from_secs(60);
/// How long a leader pauses after its first term. Doubled after each short term.
pub(crate) const LEAD_PAUSE_MIN: Duration = Duration::from_secs(1);
/// The maximum pause. A term that lasts longer resets it.
pub(crate) const LEAD_PAUSE_MAX: Duration = Duration::from_secs(30);

/// Handlers of one [`LockManager`](crate::LockManager) that run after their client has
/// disconnected.
pub(crate) const MAX_DETACHED_HANDLERS: usize = 1024;

/// How long a complete response waits for the release of its lock before it is sent.
pub(crate) const RELEASE_WAIT: Duration = Duration::from_millis(250);

/// How long a response waits for its record if it must not be sent without. The store has replied
/// by then, or its call has timed out.
pub(crate) const RECORD_WAIT: Duration = Duration::from_secs(2);

/// The call timeouts that fit into a lease under which records are left: the pause between calls
/// doubles up to a second, so that a shorter lease may end after a few calls.
pub(crate) const RECORD_CALLS: u32 = 10;

/// Waiters of one key.
pub(crate) const MAX_WAITERS_PER_KEY: usize = 256;
/// Waiters of one key that its record answers. More than of other waiters: one record answers all
/// of them at once.
pub(crate) const MAX_DUPLICATES_PER_KEY: usize = 1024;
/// Waiters of one [`LockManager`](crate::LockManager).
pub(crate) const MAX_WAITERS_PER_PROCESS: usize = 10_000;
/// Part of them that is reserved for the first waiter of each key: a flood on some keys does not
/// use it up.
pub(crate) const FIRST_WAITER_RESERVE: usize = MAX_WAITERS_PER_PROCESS / 4;
/// One key may have this part of the capacity that is left beyond the reserve.
pub(crate) const WAITER_SHARE_DIVISOR: usize = 8;
/// The same for waiters that the record of the key answers.
pub(crate) const DUPLICATE_SHARE_DIVISOR: usize = 4;

/// Bytes of the text of a key; a longer one ends in a hash.
pub(crate) const MAX_KEY_BYTES: usize = 256;
/// Bytes of a raw name. A longer one is rejected, because it cannot be shortened.
pub(crate) const MAX_RAW_KEY_BYTES: usize = 1024;

/// Bytes of an idempotency key.
pub(crate) const MAX_IDEMPOTENCY_KEY_BYTES: usize = 255;
/// Bytes of the body of an answer that is kept, unless the layer sets another limit.
pub(crate) const KEEP_UP_TO: usize = 64 << 10;
/// The maximum of that limit.
pub(crate) const KEEP_UP_TO_MAX: usize = 1 << 20;
/// Answers of one scope that are kept, unless the layer sets another limit: a tenth of those of the
/// store in memory.
pub(crate) const MAX_SCOPE_ANSWERS: usize = 10_000;
/// Bytes of the headers and bodies of these answers.
pub(crate) const MAX_SCOPE_BYTES: usize = 8 << 20;
/// Scopes of one layer whose answers are counted.
pub(crate) const MAX_SCOPES: usize = 65_536;
/// Bytes of the head of a record in Redis.
#[cfg(feature = "redis")]
pub(crate) const MAX_RECORD_HEAD_BYTES: usize = 64 << 10;
/// Bytes of the body of a record in Redis or a database. A longer one is not kept.
#[cfg(any(feature = "__database", feature = "redis"))]
pub(crate) const MAX_RECORD_BODY_BYTES: usize = KEEP_UP_TO_MAX;
/// Bytes of the bodies of records whose releases have not reached the store. Beyond this bound, a
/// record is left without its body.
pub(crate) const MAX_PENDING_RECORD_BYTES: usize = 64 << 20;
/// Bytes of the headers of an answer that is kept, with their lengths.
pub(crate) const MAX_ANSWER_HEADER_BYTES: usize = 16 << 10;

/// Bytes of a body that is read before its lock is acquired: as Axum's `DefaultBodyLimit`.
#[cfg(not(feature = "axum"))]
pub(crate) const DEFAULT_BODY_LIMIT: u64 = 2 << 20;
/// .. and at most, even with a larger `DefaultBodyLimit`.
#[cfg(feature = "axum")]
pub(crate) const MAX_BODY_BYTES: u64 = 64 << 20;

/// Bytes of all bodies that are read before their lock is acquired, of one
/// [`LockManager`](crate::LockManager). The largest body fits if there is no other.
pub(crate) const MAX_BUFFERED_BYTES: u64 = 64 << 20;
/// One body may have this part of what the others leave.
pub(crate) const BODY_SHARE_DIVISOR: u64 = 2;
/// The complete bodies of the waiters of one key may have this part of the rest.
pub(crate) const BUFFERED_SHARE_DIVISOR: u64 = 8;
#[cfg(feature = "axum")]
const _: () = assert!(MAX_BODY_BYTES <= MAX_BUFFERED_BYTES);

/// Frames of a response that are polled before its head is sent, after a first one of any size, and
/// their bytes: the response may be complete already.
pub(crate) const EAGER_FRAMES: usize = 16;
pub(crate) const EAGER_BYTES: usize = 64 << 10;
/// If the answer is kept, one more frame for each of these bytes: compression makes small frames.
pub(crate) const KEPT_BYTES_PER_FRAME: usize = 1 << 10;

/// Default prefix of the names of locks in Redis.
#[cfg(feature = "redis")]
pub(crate) const REDIS_PREFIX: &str = "lock";

/// The least and the largest `Retry-After`.
pub(crate) const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
pub(crate) const RETRY_AFTER_MAX: Duration = Duration::from_secs(5);
/// The least `retry_after_ms`. Sections may be shorter, but a client must not retry in a loop.
pub(crate) const RETRY_AFTER_FLOOR: Duration = Duration::from_millis(10);
/// The estimated hold of a route before the first measurement.
pub(crate) const INITIAL_HOLD_ESTIMATE: Duration = Duration::from_secs(1);
