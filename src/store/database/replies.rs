//! Rows of the server as replies. `None`: the row is none of these functions.

use std::time::{Duration, UNIX_EPOCH};

use super::{
    driver::{Batch, Database, Row, key},
    error::{CallError, DriverError},
};
use crate::{
    acquisition::AcquisitionId,
    limits::PINNED_POLL,
    store::{
        AcquireReply, Cursor, DeleteRecordReply, ForceReleaseReply, Holder, KeyStatus, ListEntry, ListReply, Record,
        ReleaseReply, YieldReply,
    },
};

/// The replies of the rows, in the order of their requests.
pub(super) fn in_order<R: Row, T>(
    batch: &Batch<'_>,
    rows: &[R],
    reply: impl Fn(usize, &R) -> Option<T>,
) -> Option<Vec<T>> {
    let mut ordered: Vec<_> = batch.positions.iter().map(|_| None).collect();
    for row in rows {
        let at = position(batch, row)?;
        ordered[at] = Some(reply(at, row)?);
    }
    ordered.into_iter().collect()
}

/// The position of the request that a row replies to. Rows count from one.
pub(super) fn position(batch: &Batch<'_>, row: &impl Row) -> Option<usize> {
    batch.positions.get(count(row.number(0)?.checked_abs()?.checked_sub(1)?)?).copied()
}

/// `waits`: the request waits if the key is busy. `has_messages`: it need not poll for its offer.
pub(super) fn acquired<D: Database>(
    row: &D::Row,
    waits: bool,
    has_messages: bool,
) -> Option<Result<AcquireReply, D::Error>> {
    let lease_left = micros(row.number(4).unwrap_or(0));
    let waiting = count(row.number(5).unwrap_or(0))?;
    let trace = if D::HAS_QUEUE { row.text(8) } else { None };
    let held_by = || trace.as_ref()?.parse().ok();
    let queued = |poll_in| AcquireReply::Queued { ahead: waiting, lease_left, poll_in, held_by: held_by() };
    let [least, most] = D::POLL;
    Some(Ok(match &*row.text(2)? {
        "granted" => {
            let after = trace.as_ref().and_then(|trace| trace.strip_prefix('<')?.parse().ok());
            AcquireReply::Granted { fence: fence(row.number(3)?)?, after }
        }
        "queued" if has_messages => queued(None),
        // No message comes when the transaction ends.
        "pinned" if waits => queued(Some(PINNED_POLL)),
        "busy" | "pinned" if !waits => AcquireReply::Busy { lease_left, held_by: held_by() },
        "queued" | "busy" => queued(Some(least + (most - least).mul_f64(fastrand::f64()))),
        "superseded" => AcquireReply::Superseded,
        "full" => AcquireReply::QueueFull { lease_left, waiting },
        "recorded" => AcquireReply::Recorded(Record::new(row.bytes(6)?, row.bytes(7).map(Into::into))),
        // While it waited for the row.
        "expired" => return Some(Err(CallError::Expired)),
        _ => return None,
    }))
}

pub(super) fn yielded<D: Database>(row: &D::Row, has_messages: bool) -> Result<YieldReply, D::Error> {
    if row.text(2).as_deref() == Some("extended") {
        let fence = row.number(3).and_then(fence).ok_or(CallError::UnexpectedReply)?;
        return Ok(YieldReply::Extended { fence });
    }
    Ok(YieldReply::NotHolder(acquired::<D>(row, true, has_messages).ok_or(CallError::UnexpectedReply)??))
}

pub(super) fn released(row: &impl Row) -> Option<ReleaseReply> {
    Some(match &*row.text(1)? {
        "freed" => ReleaseReply::Freed,
        "offered" => ReleaseReply::HandedOff,
        "not holder" => ReleaseReply::NotHolder,
        "recorded" => ReleaseReply::RecordedBefore,
        _ => return None,
    })
}

pub(super) fn revoked(row: &impl Row) -> Option<ForceReleaseReply> {
    Some(match &*row.text(0)? {
        "free" => ForceReleaseReply::Free,
        "revoked" => {
            let holders = row.texts(1)?.iter().map(|id| AcquisitionId::from_text(id)).collect();
            ForceReleaseReply::Revoked { holders }
        }
        "unblocked" => ForceReleaseReply::Unblocked { blocked_for: micros(row.number(2)?) },
        _ => return None,
    })
}

pub(super) fn deleted(row: &impl Row) -> Option<DeleteRecordReply> {
    Some(match &*row.text(0)? {
        "deleted" => DeleteRecordReply::Deleted,
        "not found" => DeleteRecordReply::NotFound,
        "busy" => DeleteRecordReply::Busy,
        _ => return None,
    })
}

pub(super) fn status(row: &impl Row) -> Option<KeyStatus> {
    let holder = |(id, since): (&String, i64), fence| {
        let since = UNIX_EPOCH.checked_add(micros(since));
        Holder { since, ..Holder::new(AcquisitionId::from_text(id), fence) }
    };
    let holders = match row.text(1) {
        Some(id) => vec![holder((&id, row.number(3)?), fence(row.number(2)?)?)],
        None => {
            let (ids, since) = (row.texts(7).unwrap_or_default(), row.numbers(8).unwrap_or_default());
            ids.iter().zip(since).map(|share| holder(share, 0)).collect()
        }
    };
    let status = KeyStatus::new(holders, micros(row.number(4)?), count(row.number(5)?)?);
    Some(status.record_left(row.number(6).map(micros)))
}

/// A page of a listing.
pub(super) fn page(rows: &[impl Row]) -> Option<ListReply> {
    let mut page = ListReply::new(Vec::new(), None);
    for row in rows {
        let name = row.text(0)?;
        match row.number(5) {
            Some(_) => page.entries.push(ListEntry::new(key(&name), status(row)?)),
            // The key after which the next page begins.
            None => page.next = Some(Cursor::new(name)),
        }
    }
    Some(page)
}

pub(crate) fn only<R, E: DriverError>(rows: &[R]) -> Result<&R, CallError<E>> {
    if let [row] = rows { Ok(row) } else { Err(CallError::UnexpectedReply) }
}

fn fence(value: i64) -> Option<u64> {
    u64::try_from(value).ok()
}

fn count(value: i64) -> Option<usize> {
    usize::try_from(value).ok()
}

fn micros(value: i64) -> Duration {
    Duration::from_micros(u64::try_from(value).unwrap_or(0))
}
