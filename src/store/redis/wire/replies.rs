//! Replies of scripts. Pure.

use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use deadpool_redis::redis::Value;

use crate::{
    acquisition::AcquisitionId,
    store::{
        AcquireReply, DeleteRecordReply, ForceReleaseReply, Holder, KeyStatus, Record, ReleaseReply, RenewReply,
        YieldReply, error::escape_control,
    },
    trace::SectionTrace,
};

/// Error of a reply that no script of this crate sends.
#[derive(Debug, thiserror::Error)]
#[error("unexpected reply: does another program write to these keys, or is there a proxy in between?")]
pub struct UnexpectedReply;

/// The result of a call that expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timed<T> {
    /// The call was executed.
    Done(T),
    /// The call had expired, and did nothing.
    Expired,
}

/// What a script has found in place of the last fence. It has set the fence to the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceMark {
    /// The value of another program.
    Replaced,
    /// Nothing: the server may have lost its locks, too.
    Missing,
}

/// The replies to several requests.
pub type KeyReplies<T> = Vec<Result<T, KeyError>>;

/// The error of the server for one of several keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyError(pub String);

/// The least fence of this crate, in microseconds: the year 2001.
const MIN_FENCE: u64 = 1_000_000_000_000_000;

/// The server's time and the results of this number of acquires.
pub fn parse_acquire(reply: &Value, count: usize) -> Result<(i64, Timed<KeyReplies<AcquireReply>>), UnexpectedReply> {
    if let Value::BulkString(_) = reply {
        let now = parse_time(reply)?;
        return Ok((
            now,
            Timed::Done(vec![Ok(AcquireReply::Granted { fence: parse_fence(reply)?, after: None }); count]),
        ));
    }
    parse_timed(reply, |elements| match elements {
        [each, replies @ ..] if is(each, "each") => {
            parse_each(replies, count, |reply| parse_acquire_reply(self::elements(reply)?))
        }
        // One reply to all.
        reply => Ok(vec![Ok(parse_acquire_reply(reply)?); count]),
    })
}

/// The server's time and the result of a yield.
pub fn parse_yield(reply: &Value) -> Result<(i64, Timed<YieldReply>), UnexpectedReply> {
    parse_timed(reply, |elements| match elements {
        [extended, fence] if is(extended, "extended") => Ok(YieldReply::Extended { fence: parse_fence(fence)? }),
        reply => Ok(YieldReply::NotHolder(parse_acquire_reply(reply)?)),
    })
}

/// The results of this number of renewals.
pub fn parse_renew(reply: &Value, count: usize) -> Result<Vec<RenewReply>, UnexpectedReply> {
    let replies = elements(reply)?.iter().map(|reply| match reply {
        Value::Int(1) => Ok(RenewReply::Extended),
        Value::Int(2) => Ok(RenewReply::Superseded),
        Value::Int(0) => Ok(RenewReply::NotHolder),
        Value::Int(-1) => Ok(RenewReply::Unknown),
        _ => Err(UnexpectedReply),
    });
    if replies.len() == count { replies.collect() } else { Err(UnexpectedReply) }
}

/// The results of this number of releases.
pub fn parse_release(reply: &Value, count: usize) -> Result<KeyReplies<ReleaseReply>, UnexpectedReply> {
    match elements(reply) {
        Ok([each, replies @ ..]) if is(each, "each") => parse_each(replies, count, parse_release_reply),
        // One reply to all.
        _ => Ok(vec![Ok(parse_release_reply(reply)?); count]),
    }
}

/// A text, alone or in an array.
fn parse_release_reply(reply: &Value) -> Result<ReleaseReply, UnexpectedReply> {
    let outcome = if let Ok([outcome]) = elements(reply) { outcome } else { reply };
    match text(outcome)? {
        "freed" => Ok(ReleaseReply::Freed),
        "handed off" => Ok(ReleaseReply::HandedOff),
        "not holder" => Ok(ReleaseReply::NotHolder),
        "recorded before" => Ok(ReleaseReply::RecordedBefore),
        _ => Err(UnexpectedReply),
    }
}

/// The result of a force release.
pub fn parse_force(reply: &Value) -> Result<ForceReleaseReply, UnexpectedReply> {
    match elements(reply)? {
        [free] if is(free, "free") => Ok(ForceReleaseReply::Free),
        [revoked, ids @ ..] if is(revoked, "revoked") => {
            Ok(ForceReleaseReply::Revoked { holders: ids.iter().map(holder_id).collect::<Result<_, _>>()? })
        }
        [unblocked, left] if is(unblocked, "unblocked") => {
            Ok(ForceReleaseReply::Unblocked { blocked_for: lease_left(left)? })
        }
        _ => Err(UnexpectedReply),
    }
}

/// The status of a key.
pub fn parse_inspect(reply: &Value) -> Result<KeyStatus, UnexpectedReply> {
    let [left, waiting, record_left, subscribers, fields @ ..] = elements(reply)? else { return Err(UnexpectedReply) };
    let waiting = usize::try_from(parse_u64(waiting)?).map_err(|_| UnexpectedReply)?;
    let record_left = if matches!(record_left, Value::Int(-2)) { None } else { Some(lease_left(record_left)?) };
    let status =
        |holders: Vec<Holder>| Ok(KeyStatus::new(holders, lease_left(left)?, waiting).record_left(record_left));
    if let [Value::Array(shares)] = fields {
        let [holding, shares @ ..] = &shares[..] else { return Err(UnexpectedReply) };
        let share = |share: &[Value]| Ok(Holder::new(holder_id(&share[0])?, 0).connected(parse_u64(&share[1])? > 0));
        let holders = shares.chunks_exact(2).map(share).collect::<Result<_, _>>()?;
        let holding = usize::try_from(parse_u64(holding)?).map_err(|_| UnexpectedReply)?;
        return Ok(status(holders)?.holding(holding));
    }
    let mut holder = None;
    for field in fields.chunks_exact(2) {
        if !bytes(&field[0])?.ends_with(b":end") {
            let id = holder_id(&field[0])?;
            // Other programs store a count here: then the time of the grant is unknown.
            let fence = text(&field[1]).ok().and_then(|value| value.split(' ').next()?.parse().ok());
            let fence = fence.filter(|fence| *fence >= MIN_FENCE);
            let since = fence.and_then(|fence| UNIX_EPOCH.checked_add(Duration::from_micros(fence)));
            let found = Holder::new(id, fence.unwrap_or(0));
            holder = Some(match since {
                Some(since) => found.since(since).connected(parse_u64(subscribers)? > 0),
                None => found,
            });
        }
    }
    status(holder.into_iter().collect())
}

/// The result of a deletion of a record.
pub fn parse_delete_record(reply: &Value) -> Result<DeleteRecordReply, UnexpectedReply> {
    let [outcome] = elements(reply)? else { return Err(UnexpectedReply) };
    match text(outcome)? {
        "deleted" => Ok(DeleteRecordReply::Deleted),
        "not found" => Ok(DeleteRecordReply::NotFound),
        "busy" => Ok(DeleteRecordReply::Busy),
        _ => Err(UnexpectedReply),
    }
}

/// The next position of a `SCAN`, and the names that it found. A name that is not text is omitted:
/// this crate did not write it.
pub fn parse_scan(reply: &Value) -> Result<(u64, Vec<String>), UnexpectedReply> {
    let [position, Value::Array(names)] = elements(reply)? else { return Err(UnexpectedReply) };
    let names = names.iter().filter_map(|name| text(name).ok().map(str::to_owned));
    Ok((parse_u64(position)?, names.collect()))
}

/// The result of a self-test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelfTestReport {
    /// The server's clock, in microseconds.
    pub now: i64,
    /// The number of receivers of the message.
    pub receivers: u64,
    /// The value that was stored as the last fence and was not one.
    pub invalid_fence: Option<String>,
    /// The refused commands.
    pub refused: Vec<String>,
}

/// The result of a self-test.
pub fn parse_self_test(reply: &Value) -> Result<SelfTestReport, UnexpectedReply> {
    let [now, receivers, Value::BulkString(invalid_fence), refused @ ..] = elements(reply)? else {
        return Err(UnexpectedReply);
    };
    let invalid_fence =
        Some(escape_control(&String::from_utf8_lossy(invalid_fence))).filter(|invalid_fence| !invalid_fence.is_empty());
    let refused = refused.iter().map(|refusal| text(refusal).map(escape_control)).collect::<Result<_, _>>()?;
    Ok(SelfTestReport { now: parse_time(now)?, receivers: parse_u64(receivers)?, invalid_fence, refused })
}

/// What a script has found in place of the last fence, if its reply says so.
pub fn fence_mark(reply: &Value) -> Option<FenceMark> {
    if let Value::Array(elements) = reply { elements.last().and_then(parse_fence_mark) } else { None }
}

/// The mark is an array: a plain text could be a field that another program wrote.
fn parse_fence_mark(value: &Value) -> Option<FenceMark> {
    let Value::Array(mark) = value else { return None };
    match mark.as_slice() {
        [mark] if is(mark, "fence replaced") => Some(FenceMark::Replaced),
        [mark] if is(mark, "fence missing") => Some(FenceMark::Missing),
        _ => None,
    }
}

/// The elements of a reply, without the [`fence_mark`].
pub(super) fn elements(reply: &Value) -> Result<&[Value], UnexpectedReply> {
    let Value::Array(elements) = reply else { return Err(UnexpectedReply) };
    match elements.as_slice() {
        [elements @ .., last] if parse_fence_mark(last).is_some() => Ok(elements),
        elements => Ok(elements),
    }
}

/// The server's time, and the rest of the reply.
pub(super) fn parse_timed<'a, T>(
    reply: &'a Value,
    parse: impl FnOnce(&'a [Value]) -> Result<T, UnexpectedReply>,
) -> Result<(i64, Timed<T>), UnexpectedReply> {
    match elements(reply)? {
        [now, expired] if is(expired, "expired") => Ok((parse_time(now)?, Timed::Expired)),
        [now, rest @ ..] => Ok((parse_time(now)?, Timed::Done(parse(rest)?))),
        [] => Err(UnexpectedReply),
    }
}

/// The replies to this number of requests. The server may have an error for one of their keys.
pub(super) fn parse_each<T>(
    replies: &[Value],
    count: usize,
    parse: impl Fn(&Value) -> Result<T, UnexpectedReply>,
) -> Result<KeyReplies<T>, UnexpectedReply> {
    let replies = replies.iter().map(|reply| match elements(reply) {
        Ok([error, message]) if is(error, "error") => Ok(Err(KeyError(text(message)?.to_owned()))),
        _ => Ok(Ok(parse(reply)?)),
    });
    if replies.len() == count { replies.collect() } else { Err(UnexpectedReply) }
}

fn parse_acquire_reply(elements: &[Value]) -> Result<AcquireReply, UnexpectedReply> {
    match elements {
        [granted, fence, before @ ..] if is(granted, "granted") => {
            Ok(AcquireReply::Granted { fence: parse_fence(fence)?, after: trace(before, "<") })
        }
        [queued, left, ahead, by @ ..] if is(queued, "queued") => Ok(AcquireReply::Queued {
            ahead: usize::try_from(parse_u64(ahead)?).map_err(|_| UnexpectedReply)?,
            poll_in: None,
            lease_left: lease_left(left)?,
            held_by: trace(by, ""),
        }),
        [busy, left, by @ ..] if is(busy, "busy") => {
            Ok(AcquireReply::Busy { lease_left: lease_left(left)?, held_by: trace(by, "") })
        }
        [full, left, waiting] if is(full, "full") => Ok(AcquireReply::QueueFull {
            lease_left: lease_left(left)?,
            waiting: usize::try_from(parse_u64(waiting)?).map_err(|_| UnexpectedReply)?,
        }),
        [superseded] if is(superseded, "superseded") => Ok(AcquireReply::Superseded),
        [recorded, head, body] if is(recorded, "recorded") => {
            let body = if *body == Value::Nil { None } else { Some(Bytes::copy_from_slice(bytes(body)?)) };
            Ok(AcquireReply::Recorded(Record::new(Bytes::copy_from_slice(bytes(head)?), body)))
        }
        _ => Err(UnexpectedReply),
    }
}

/// The trace at the end of a reply. Another program may have written it.
fn trace(rest: &[Value], prefix: &str) -> Option<SectionTrace> {
    text(rest.first()?).ok()?.strip_prefix(prefix)?.parse().ok()
}

/// The server's time, in microseconds.
fn parse_time(value: &Value) -> Result<i64, UnexpectedReply> {
    i64::try_from(parse_u64(value)?).map_err(|_| UnexpectedReply)
}

/// A fence is below 2^53, the limit of exact doubles. A larger one was written by another program.
pub(super) fn parse_fence(value: &Value) -> Result<u64, UnexpectedReply> {
    parse_u64(value).and_then(|fence| if fence < 1 << 53 { Ok(fence) } else { Err(UnexpectedReply) })
}

/// A `PTTL`. Negative values: no TTL (-1), or no key (-2).
pub(super) fn lease_left(left: &Value) -> Result<Duration, UnexpectedReply> {
    match left {
        Value::Int(-1) => Ok(Duration::MAX),
        Value::Int(left) => Ok(Duration::from_millis(u64::try_from(*left).unwrap_or(0))),
        _ => Err(UnexpectedReply),
    }
}

pub(super) fn is(value: &Value, expected: &str) -> bool {
    text(value).is_ok_and(|text| text == expected)
}

pub(super) fn text(value: &Value) -> Result<&str, UnexpectedReply> {
    std::str::from_utf8(bytes(value)?).map_err(|_| UnexpectedReply)
}

fn bytes(value: &Value) -> Result<&[u8], UnexpectedReply> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        Value::SimpleString(text) => Ok(text.as_bytes()),
        _ => Err(UnexpectedReply),
    }
}

/// The field of a lock. Another program may have written it: it is displayed, and never compared.
fn holder_id(value: &Value) -> Result<AcquisitionId, UnexpectedReply> {
    Ok(AcquisitionId::from_text(&escape_control(&String::from_utf8_lossy(bytes(value)?))))
}

fn parse_u64(value: &Value) -> Result<u64, UnexpectedReply> {
    match value {
        Value::Int(number) => u64::try_from(*number).map_err(|_| UnexpectedReply),
        other => text(other)?.parse().map_err(|_| UnexpectedReply),
    }
}
