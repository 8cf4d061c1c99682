//! Rows of the server as replies.

use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use tokio_postgres::{Row, types::FromSql};

use super::error::CallError;
use crate::{
    acquisition::AcquisitionId,
    limits::{POSTGRES_PINNED_POLL, POSTGRES_UNNOTIFIED_POLL},
    store::{AcquireReply, ForceReleaseReply, Holder, KeyStatus, Record, ReleaseReply, YieldReply},
};

/// The replies of the rows, in the order of their requests.
pub(super) fn in_order<T>(
    count: usize,
    rows: &[Row],
    reply: impl Fn(&Row) -> Result<T, CallError>,
) -> Result<Vec<T>, CallError> {
    let mut ordered: Vec<_> = (0..count).map(|_| None).collect();
    for row in rows {
        *ordered.get_mut(position(row)?).ok_or(CallError::UnexpectedReply)? = Some(reply(row)?);
    }
    ordered.into_iter().collect::<Option<_>>().ok_or(CallError::UnexpectedReply)
}

/// `has_messages`: the waiter need not poll for its offer.
pub(super) fn acquired(row: &Row, has_messages: bool) -> Result<AcquireReply, CallError> {
    let lease_left = || Ok::<_, CallError>(micros(column(row, 4)?));
    let waiting = || count(column(row, 5)?);
    let queued = |poll_in| Ok(AcquireReply::Queued { ahead: waiting()?, lease_left: lease_left()?, poll_in });
    match column(row, 2)? {
        "granted" => Ok(AcquireReply::Granted { fence: fence(column(row, 3)?)? }),
        "queued" if has_messages => queued(None),
        "queued" => {
            let [least, most] = POSTGRES_UNNOTIFIED_POLL;
            queued(Some(least + (most - least).mul_f64(fastrand::f64())))
        }
        // No message comes when the transaction ends.
        "pinned" => queued(Some(POSTGRES_PINNED_POLL)),
        "busy" => Ok(AcquireReply::Busy { lease_left: lease_left()? }),
        "full" => Ok(AcquireReply::QueueFull { lease_left: lease_left()?, waiting: waiting()? }),
        "recorded" => {
            let body: Option<&[u8]> = column(row, 7)?;
            Ok(AcquireReply::Recorded(Record::new(column::<&[u8]>(row, 6)?.to_vec(), body.map(Bytes::copy_from_slice))))
        }
        // While it waited for the row.
        "expired" => Err(CallError::Expired),
        _ => Err(CallError::UnexpectedReply),
    }
}

pub(super) fn yielded(row: &Row, has_messages: bool) -> Result<YieldReply, CallError> {
    Ok(match column(row, 2)? {
        "extended" => YieldReply::Extended { fence: fence(column(row, 3)?)? },
        _ => YieldReply::NotHolder(acquired(row, has_messages)?),
    })
}

pub(super) fn released(row: &Row) -> Result<ReleaseReply, CallError> {
    Ok(match column(row, 1)? {
        "freed" => ReleaseReply::Freed,
        "offered" => ReleaseReply::HandedOff,
        "not holder" => ReleaseReply::NotHolder,
        "recorded" => ReleaseReply::RecordedBefore,
        _ => return Err(CallError::UnexpectedReply),
    })
}

pub(super) fn revoked(row: &Row) -> Result<ForceReleaseReply, CallError> {
    Ok(match column(row, 0)? {
        "free" => ForceReleaseReply::Free,
        "revoked" => {
            let ids: Vec<&str> = column(row, 1)?;
            ForceReleaseReply::Revoked { holders: ids.into_iter().map(AcquisitionId::from_text).collect() }
        }
        "unblocked" => ForceReleaseReply::Unblocked { blocked_for: micros(column(row, 2)?) },
        _ => return Err(CallError::UnexpectedReply),
    })
}

pub(super) fn status(row: &Row) -> Result<KeyStatus, CallError> {
    let holder = |id: &str, since: i64, fence| {
        let since = UNIX_EPOCH.checked_add(micros(since));
        Holder { since, ..Holder::new(AcquisitionId::from_text(id), fence) }
    };
    let holders = match column::<Option<&str>>(row, 1)? {
        Some(id) => vec![holder(id, column(row, 3)?, fence(column(row, 2)?)?)],
        None => {
            let ids = column::<Option<Vec<&str>>>(row, 7)?.unwrap_or_default();
            let since = column::<Option<Vec<i64>>>(row, 8)?.unwrap_or_default();
            ids.into_iter().zip(since).map(|(id, since)| holder(id, since, 0)).collect()
        }
    };
    let record_left: Option<i64> = column(row, 6)?;
    let status = KeyStatus::new(holders, micros(column(row, 4)?), count(column(row, 5)?)?);
    Ok(status.record_left(record_left.map(micros)))
}

/// The position of the request that a row replies to, from zero.
pub(super) fn position(row: &Row) -> Result<usize, CallError> {
    count(column::<i64>(row, 0)? - 1)
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
