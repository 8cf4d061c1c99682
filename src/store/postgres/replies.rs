//! Rows of the server as replies.

use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use tokio_postgres::{Row, types::FromSql};

use super::{error::CallError, schema};
use crate::{
    acquisition::AcquisitionId,
    limits::POSTGRES_PINNED_POLL,
    store::{AcquireReply, ForceReleaseReply, Holder, KeyStatus, ListEntry, Record, ReleaseReply},
};

/// The reply to a call that expires.
pub(super) struct Timed {
    /// The time of the server, in microseconds.
    pub(super) now_us: i64,
    /// The replies with the positions of their requests. `None`: the call had expired.
    pub(super) replies: Option<Vec<(usize, TimedReply)>>,
}

/// The reply to one request of such a call.
pub(super) enum TimedReply {
    Acquired(AcquireReply),
    /// A yield: the acquisition holds the key under this fence.
    Extended(u64),
    /// The request has expired while it waited.
    Expired,
}

/// A row of [`list_keys`](schema::Schema::list).
pub(super) enum Listed {
    Entry(ListEntry),
    /// The key after which the next page begins.
    Next(String),
}

pub(super) fn timed(rows: &[Row]) -> Result<Timed, CallError> {
    let (mut now_us, mut replies) = (0, Vec::with_capacity(rows.len()));
    for row in rows {
        now_us = now_us.max(column(row, 1)?);
        let Some(position) = position(row)? else { return Ok(Timed { now_us, replies: None }) };
        replies.push((position, timed_reply(row)?));
    }
    if replies.is_empty() {
        return Err(CallError::UnexpectedReply);
    }
    Ok(Timed { now_us, replies: Some(replies) })
}

fn timed_reply(row: &Row) -> Result<TimedReply, CallError> {
    let lease_left = || Ok::<_, CallError>(micros(column(row, 4)?));
    let waiting = || count(column(row, 5)?);
    let queued =
        |poll_in| Ok::<_, CallError>(AcquireReply::Queued { ahead: waiting()?, lease_left: lease_left()?, poll_in });
    Ok(TimedReply::Acquired(match column(row, 2)? {
        "granted" => AcquireReply::Granted { fence: fence(column(row, 3)?)? },
        "extended" => return Ok(TimedReply::Extended(fence(column(row, 3)?)?)),
        "queued" => queued(None)?,
        // No message comes when the transaction ends.
        "pinned" => queued(Some(POSTGRES_PINNED_POLL))?,
        "busy" => AcquireReply::Busy { lease_left: lease_left()? },
        "full" => AcquireReply::QueueFull { lease_left: lease_left()?, waiting: waiting()? },
        "recorded" => {
            let body: Option<&[u8]> = column(row, 7)?;
            AcquireReply::Recorded(Record::new(column::<&[u8]>(row, 6)?.to_vec(), body.map(Bytes::copy_from_slice)))
        }
        "expired" => return Ok(TimedReply::Expired),
        _ => return Err(CallError::UnexpectedReply),
    }))
}

/// The replies to releases, with their positions.
pub(super) fn released(rows: &[Row]) -> Result<Vec<(usize, ReleaseReply)>, CallError> {
    let released = |row: &Row| {
        let position = position(row)?.ok_or(CallError::UnexpectedReply)?;
        let reply = match column(row, 1)? {
            "freed" => ReleaseReply::Freed,
            "offered" => ReleaseReply::HandedOff,
            "not holder" => ReleaseReply::NotHolder,
            "recorded" => ReleaseReply::RecordedBefore,
            _ => return Err(CallError::UnexpectedReply),
        };
        Ok((position, reply))
    };
    rows.iter().map(released).collect()
}

pub(super) fn revoked(rows: &[Row]) -> Result<ForceReleaseReply, CallError> {
    let row = only(rows)?;
    Ok(match column(row, 0)? {
        "free" => ForceReleaseReply::Free,
        "revoked" => ForceReleaseReply::Revoked { holder: AcquisitionId::from_text(column(row, 1)?) },
        "unblocked" => ForceReleaseReply::Unblocked { blocked_for: micros(column(row, 2)?) },
        _ => return Err(CallError::UnexpectedReply),
    })
}

pub(super) fn status(row: &Row) -> Result<KeyStatus, CallError> {
    let holder = match column::<Option<&str>>(row, 1)? {
        None => None,
        Some(id) => {
            let holder = Holder::new(AcquisitionId::from_text(id), fence(column(row, 2)?)?);
            Some(match UNIX_EPOCH.checked_add(micros(column(row, 3)?)) {
                Some(since) => holder.since(since),
                None => holder,
            })
        }
    };
    let record_left: Option<i64> = column(row, 6)?;
    let status = KeyStatus::new(holder, micros(column(row, 4)?), count(column(row, 5)?)?);
    Ok(status.record_left(record_left.map(micros)))
}

pub(super) fn listed(row: &Row) -> Result<Listed, CallError> {
    let name: &str = column(row, 0)?;
    match column::<Option<i64>>(row, 5)? {
        None => Ok(Listed::Next(name.to_owned())),
        Some(_) => Ok(Listed::Entry(ListEntry::new(schema::key(name), status(row)?))),
    }
}

/// The position of the request that a row replies to, from zero. `None`: the whole call.
pub(super) fn position(row: &Row) -> Result<Option<usize>, CallError> {
    Ok(count(column(row, 0)?)?.checked_sub(1))
}

pub(super) fn only(rows: &[Row]) -> Result<&Row, CallError> {
    if let [row] = rows { Ok(row) } else { Err(CallError::UnexpectedReply) }
}

pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, index: usize) -> Result<T, CallError> {
    row.try_get(index).map_err(|_| CallError::UnexpectedReply)
}

fn fence(value: i64) -> Result<u64, CallError> {
    u64::try_from(value).map_err(|_| CallError::UnexpectedReply)
}

fn count(value: i64) -> Result<usize, CallError> {
    usize::try_from(value).map_err(|_| CallError::UnexpectedReply)
}

fn micros(value: i64) -> Duration {
    Duration::from_micros(u64::try_from(value).unwrap_or(0))
}
