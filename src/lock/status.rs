//! The state of a key, for operators.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use serde::{Serialize, Serializer, ser::SerializeStruct};

use crate::store::Holder;

/// State of a key in the store: its holders, the times of their grants, the time that remains, the
/// number of waiters, and the record of finished work.
///
/// Returned by [`LockManager::inspect`](crate::lock::LockManager::inspect).
/// [`Display`](fmt::Display) writes one line for a log or a terminal, wrapped here:
///
/// ```text
/// held by api-7:5a66841764ffe1bf:2 since 2026-11-22T03:20:00.123Z, 30.500s left,
///     1 process waiting, 0 calls waiting here
/// ```
///
/// [`Serialize`] is for an admin page. The names of the fields are stable: `holders` (each with
/// `id`, and `connected` and `since_unix_ms`, or null), `holding`, `remaining_ms` (null if the key
/// has no TTL), `record_left_ms` (or null), `kept_by` (or null), `waiting`, `waiting_locally`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockStatus {
    /// The holders. None if the key is free, or only blocked. Several hold permits or reads: at
    /// most 64 of them are listed.
    pub holders: Vec<Holder>,
    /// The number of holders. The readers of one process that share a grant count as one.
    pub holding: usize,
    /// How long the store keeps the key if it is neither released nor renewed. Zero if the key is
    /// free.
    ///
    /// At most a lease and a lock-delay. A fixed lease or a
    /// [`max_hold`](crate::LockPolicy::max_hold) of the holder may end sooner, because only its
    /// process knows them. Without a holder it is the rest of a
    /// [`lock_delay`](crate::LockPolicy::lock_delay) or a
    /// [`min_hold`](crate::LockPolicy::min_hold). [`Duration::MAX`] if the key has no TTL: another
    /// program has written it, and it must be deleted manually.
    pub remaining: Duration,
    /// How long the store keeps the record of the key: [`once`](crate::LockManager::once) has run
    /// its work, or a [`ReplayLayer`](crate::ReplayLayer) has kept an answer. `None` if the key has
    /// no record.
    pub record_left: Option<Duration>,
    /// The open transaction that keeps a key without a holder from the next one, because it has
    /// checked the fence and has outlived the lock: `the transaction of backend 4711`, in a
    /// [`PostgresStore`](crate::PostgresStore), and `an open transaction` in a
    /// [`MysqlStore`](crate::MysqlStore).
    pub kept_by: Option<String>,
    /// The number of processes in the queue of the store. The process of the holder is not counted,
    /// even if calls wait in it.
    pub waiting: usize,
    /// The number of calls that wait in this process.
    pub waiting_locally: usize,
}

/// A time as in RFC 3339, in UTC and milliseconds.
pub(crate) struct Rfc3339(pub(crate) SystemTime);

/// Seconds and milliseconds.
struct Seconds(Duration);

/// A holder, serialized.
struct HolderJson<'a>(&'a Holder);

// === impl LockStatus ===

impl LockStatus {
    /// Returns the first holder.
    #[must_use]
    pub fn holder(&self) -> Option<&Holder> {
        self.holders.first()
    }
}

impl fmt::Display for LockStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { holders, holding, remaining, record_left, kept_by, waiting, waiting_locally } = self;
        match self.holder() {
            Some(holder) => {
                // Another program may have written any text: a line break must not start another
                // line of a log.
                write!(f, "held by {}", holder.id.to_string().escape_debug())?;
                if let Some(since) = holder.since {
                    write!(f, " since {}", Rfc3339(since))?;
                }
            }
            None if remaining.is_zero() => f.write_str("free")?,
            None => f.write_str("no holder, but blocked")?,
        }
        match holding.saturating_sub(1) {
            0 => {}
            1 => f.write_str(" and 1 other")?,
            others => write!(f, " and {others} others")?,
        }
        match holders.iter().filter(|holder| holder.connected == Some(false)).count() {
            0 => {}
            1 if *holding == 1 => f.write_str(", its process is not connected")?,
            dead => write!(f, ", {dead} of them not connected")?,
        }
        if *remaining == Duration::MAX {
            f.write_str(", without an end")?;
        } else if !remaining.is_zero() {
            write!(f, ", {} left", Seconds(*remaining))?;
        }
        if let Some(left) = record_left {
            write!(f, ", recorded for another {}", Seconds(*left))?;
        }
        if let Some(transaction) = kept_by {
            write!(f, ", kept by {transaction}")?;
        }
        let processes = if *waiting == 1 { "process" } else { "processes" };
        let calls = if *waiting_locally == 1 { "call" } else { "calls" };
        write!(f, ", {waiting} {processes} waiting, {waiting_locally} {calls} waiting here")
    }
}

impl Serialize for LockStatus {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { holders, holding, remaining, record_left, kept_by, waiting, waiting_locally } = self;
        let mut state = serializer.serialize_struct("LockStatus", 7)?;
        state.serialize_field("holders", &holders.iter().map(HolderJson).collect::<Vec<_>>())?;
        state.serialize_field("holding", holding)?;
        state.serialize_field("remaining_ms", &(*remaining != Duration::MAX).then(|| whole_ms(*remaining)))?;
        state.serialize_field("record_left_ms", &record_left.map(whole_ms))?;
        state.serialize_field("kept_by", kept_by)?;
        state.serialize_field("waiting", waiting)?;
        state.serialize_field("waiting_locally", waiting_locally)?;
        state.end()
    }
}

impl Serialize for HolderJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Holder { id, since, connected, fence: _ } = self.0;
        let since = since.and_then(|since| since.duration_since(SystemTime::UNIX_EPOCH).ok());
        let mut state = serializer.serialize_struct("Holder", 3)?;
        state.serialize_field("id", id)?;
        state.serialize_field("connected", connected)?;
        state.serialize_field("since_unix_ms", &since.map(whole_ms))?;
        state.end()
    }
}

pub(crate) fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}s", self.0.as_secs(), self.0.subsec_millis())
    }
}

impl fmt::Display for Rfc3339 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unix = self.0.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (mut days, second) = (unix.as_secs() / 86_400, unix.as_secs() % 86_400);
        let mut year = 1970;
        let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        while days >= 365 + u64::from(is_leap(year)) {
            days -= 365 + u64::from(is_leap(year));
            year += 1;
        }
        let mut month = 1;
        for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
            if days < length {
                break;
            }
            days -= length;
            month += 1;
        }
        let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
        let (day, ms) = (days + 1, unix.subsec_millis());
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acquisition::AcquisitionId;

    fn holder(id: &str, since_ms: Option<u64>) -> Holder {
        Holder {
            connected: since_ms.map(|_| true),
            since: since_ms.map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms)),
            ..Holder::new(AcquisitionId::from_text(id), 7)
        }
    }

    fn state(id: Option<&str>, since_ms: Option<u64>, remaining: Duration, waiting: usize) -> LockStatus {
        LockStatus {
            holders: id.map(|id| holder(id, since_ms)).into_iter().collect(),
            holding: usize::from(id.is_some()),
            remaining,
            record_left: None,
            kept_by: None,
            waiting,
            waiting_locally: 2 - waiting,
        }
    }

    #[test]
    fn status_formats_as_one_line() {
        let ms = Duration::from_millis;
        for (state, line) in [
            (
                state(Some("api-7:5a66841764ffe1bf:2"), Some(1_795_317_600_123), ms(30_500), 1),
                "held by api-7:5a66841764ffe1bf:2 since 2026-11-22T03:20:00.123Z, 30.500s left, 1 process waiting, 1 call waiting here",
            ),
            (
                state(Some("java\nroot:7"), None, Duration::MAX, 0),
                "held by java\\nroot:7, without an end, 0 processes waiting, 2 calls waiting here",
            ),
            (
                state(None, None, ms(998), 2),
                "no holder, but blocked, 0.998s left, 2 processes waiting, 0 calls waiting here",
            ),
            (state(None, None, ms(0), 0), "free, 0 processes waiting, 2 calls waiting here"),
            (
                LockStatus { record_left: Some(ms(86_399_001)), ..state(None, None, ms(0), 0) },
                "free, recorded for another 86399.001s, 0 processes waiting, 2 calls waiting here",
            ),
            (
                LockStatus { kept_by: Some("the transaction of backend 7".to_owned()), ..state(None, None, ms(0), 0) },
                "free, kept by the transaction of backend 7, 0 processes waiting, 2 calls waiting here",
            ),
            (
                LockStatus {
                    holders: vec![holder("api-7:5a:2/4", None), holder("api-7:5a:3/4", Some(0)).connected(false)],
                    holding: 3,
                    ..state(None, None, ms(500), 0)
                },
                "held by api-7:5a:2/4 and 2 others, 1 of them not connected, 0.500s left, 0 processes waiting, 2 calls waiting here",
            ),
            (
                LockStatus {
                    holders: vec![holder("api-7:5a:2", Some(0)).connected(false)],
                    ..state(Some("api-7:5a:2"), Some(0), ms(500), 0)
                },
                "held by api-7:5a:2 since 1970-01-01T00:00:00.000Z, its process is not connected, 0.500s left, 0 processes waiting, 2 calls waiting here",
            ),
        ] {
            assert_eq!(state.to_string(), line);
        }
    }

    /// Admin pages read these names.
    #[test]
    fn serialized_status_names_are_stable() {
        let held = state(Some("a:1f:2"), Some(1_795_317_600_123), Duration::from_micros(30_500_900), 1);
        assert_eq!(
            serde_json::to_string(&held).expect("it serializes"),
            r#"{"holders":[{"id":"a:1f:2","connected":true,"since_unix_ms":1795317600123}],"holding":1,"remaining_ms":30500,"record_left_ms":null,"kept_by":null,"waiting":1,"waiting_locally":1}"#
        );
        let foreign = LockStatus { record_left: Some(Duration::from_millis(7)), ..state(None, None, Duration::MAX, 0) };
        assert_eq!(
            serde_json::to_string(&foreign).expect("it serializes"),
            r#"{"holders":[],"holding":0,"remaining_ms":null,"record_left_ms":7,"kept_by":null,"waiting":0,"waiting_locally":2}"#
        );
    }

    #[test]
    fn times_are_formatted_as_rfc_3339() {
        for (unix, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, "2000-02-28T23:59:59.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000Z"),
            (1_735_689_600, "2025-01-01T00:00:00.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(Rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(unix)).to_string(), text);
        }
    }
}
