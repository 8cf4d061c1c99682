//! What is asked and what is answered, as scripts and their replies. Pure.

use std::time::Duration;

use deadpool_redis::redis::Value;

use super::{
    keyspace::{Names, NotAName},
    script::{ACQUIRE, FORCE, INSPECT, RELEASE, RENEW, SELF_TEST, Script, ScriptCall, YIELD},
};
use crate::{
    acquisition::AcquisitionId,
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, ForceReleaseReply, ForceReleaseRequest, Holder, IfBusy, KeyStatus,
        ReleaseRequest, Released, RenewReply, RenewRequest, YieldReply, YieldRequest,
    },
};

/// A reply that no script of ours gives.
#[derive(Debug)]
pub struct Misread;

/// What came of a call that has to run in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InTime<T> {
    /// It ran in time.
    Done(T),
    /// It came too late, and did nothing.
    Late,
}

/// In microseconds, the year 2001: no fence of ours is smaller.
const EARLIEST_FENCE: u64 = 1_000_000_000_000_000;

// === what is asked ===

impl Names {
    /// `until`: by the server's clock, in microseconds.
    pub fn acquire(&self, ask: &AcquireRequest, until: i64) -> Result<ScriptCall, NotAName> {
        let lines_up = if ask.if_busy == IfBusy::Enqueue { "1" } else { "0" };
        let args = vec![
            ask.id.to_string(),
            until.to_string(),
            ms(ask.lease),
            lines_up.to_owned(),
            ms(ask.queue.offer_ttl),
            ms(ask.queue.entry_ttl),
            ask.queue.capacity.to_string(),
        ];
        self.call(&ACQUIRE, &ask.key, args)
    }

    /// One call for all of them; one with a name that cannot be is left out, and is answered in its place.
    pub fn renew(&self, asks: &[RenewRequest]) -> (ScriptCall, Vec<bool>) {
        let (mut keys, mut args) = (Vec::with_capacity(asks.len()), Vec::with_capacity(2 * asks.len()));
        let is_asked = asks.iter().map(|ask| {
            let Ok(lock) = self.lock(&ask.key) else { return false };
            keys.push(lock);
            args.extend([ask.id.to_string(), ms(ask.lease)]);
            true
        });
        let is_asked = is_asked.collect();
        (ScriptCall { script: &RENEW, keys, args }, is_asked)
    }

    /// Gives back.
    pub fn release(&self, ask: &ReleaseRequest) -> Result<ScriptCall, NotAName> {
        self.call(&RELEASE, &ask.key, vec![ask.id.to_string(), ms(ask.block_for), ms(ask.queue.offer_ttl)])
    }

    /// `until`: by the server's clock, in microseconds.
    pub fn yield_to_queue(&self, ask: &YieldRequest, until: i64) -> Result<ScriptCall, NotAName> {
        let args = vec![
            ask.next_id.to_string(),
            until.to_string(),
            ms(ask.lease),
            ask.id.to_string(),
            ms(ask.queue.offer_ttl),
            ms(ask.queue.entry_ttl),
            ask.queue.capacity.to_string(),
            ask.fence.to_string(),
        ];
        self.call(&YIELD, &ask.key, args)
    }

    /// Takes away.
    pub fn force(&self, ask: &ForceReleaseRequest) -> Result<ScriptCall, NotAName> {
        self.call(&FORCE, &ask.key, vec![ms(ask.block_for), ms(ask.queue.offer_ttl)])
    }

    /// Looks.
    pub fn inspect(&self, key: &LockKey) -> Result<ScriptCall, NotAName> {
        let lock = self.lock(key)?;
        let line = self.line(&lock);
        Ok(ScriptCall { script: &INSPECT, keys: vec![lock, line], args: Vec::new() })
    }

    /// Tries everything on a key of its own.
    pub fn self_test(&self, key: &LockKey, inbox: &str, message: &str) -> Result<ScriptCall, NotAName> {
        self.call(&SELF_TEST, key, vec![inbox.to_owned(), message.to_owned()])
    }

    fn call(
        &self,
        script: &'static std::sync::LazyLock<Script>,
        key: &LockKey,
        args: Vec<String>,
    ) -> Result<ScriptCall, NotAName> {
        let lock = self.lock(key)?;
        let line = self.line(&lock);
        Ok(ScriptCall { script, keys: vec![self.fences(), lock, line], args })
    }
}

/// Redis counts whole milliseconds. Rounded up: what is kept is kept for at least as long.
fn ms(duration: Duration) -> String {
    duration.as_nanos().div_ceil(1_000_000).to_string()
}

// === what is answered ===

/// What the server's clock said, and what came of an acquire.
pub fn acquired(reply: &Value) -> Result<(i64, InTime<AcquireReply>), Misread> {
    let (now, words) = timed(reply)?;
    let answer = match words {
        [late] if is(late, "late") => InTime::Late,
        words => InTime::Done(got(words)?),
    };
    Ok((now, answer))
}

/// What the server's clock said, and what came of a yield.
pub fn yielded(reply: &Value) -> Result<(i64, InTime<YieldReply>), Misread> {
    let (now, words) = timed(reply)?;
    let answer = match words {
        [late] if is(late, "late") => InTime::Late,
        [extended, fence] if is(extended, "extended") => InTime::Done(YieldReply::Extended { fence: fence_of(fence)? }),
        words => InTime::Done(YieldReply::NotHolder(got(words)?)),
    };
    Ok((now, answer))
}

/// What came of renewals; of those that were asked for, in the order of all.
pub fn renewed(reply: &Value, is_asked: &[bool]) -> Result<Vec<RenewReply>, Misread> {
    let Value::Array(answers) = reply else { return Err(Misread) };
    let mut answers = answers.iter();
    let all = is_asked.iter().map(|is_asked| {
        if !is_asked {
            return Ok(RenewReply::NotHolder);
        }
        match answers.next() {
            Some(Value::Int(1)) => Ok(RenewReply::Extended),
            Some(Value::Int(0)) => Ok(RenewReply::NotHolder),
            Some(Value::Int(-1)) => Ok(RenewReply::Unknown),
            _ => Err(Misread),
        }
    });
    all.collect()
}

/// What came of a release.
pub fn released(reply: &Value) -> Result<Released, Misread> {
    let [what] = words(reply)? else { return Err(Misread) };
    match text(what)? {
        "freed" => Ok(Released::Freed),
        "handed on" => Ok(Released::HandedOff),
        "not owner" => Ok(Released::NotHolder),
        _ => Err(Misread),
    }
}

/// What came of a revocation.
pub fn forced(reply: &Value) -> Result<ForceReleaseReply, Misread> {
    match words(reply)? {
        [free] if is(free, "free") => Ok(ForceReleaseReply::Free),
        [revoked, id] if is(revoked, "revoked") => Ok(ForceReleaseReply::Revoked { holder: holder_id(id)? }),
        [unblocked, left] if is(unblocked, "unblocked") => {
            Ok(ForceReleaseReply::Unblocked { blocked_for: lease_left(left)? })
        }
        _ => Err(Misread),
    }
}

/// Who has it.
pub fn inspected(reply: &Value) -> Result<KeyStatus, Misread> {
    let Value::Array(words) = reply else { return Err(Misread) };
    let [left, waiting, fields @ ..] = words.as_slice() else { return Err(Misread) };
    let mut holder = None;
    for field in fields.chunks_exact(2) {
        if !bytes(&field[0])?.ends_with(b":end") {
            // What others wrote is a count: then nobody knows since when.
            let fence = whole(&field[1]).ok().filter(|fence| *fence >= EARLIEST_FENCE);
            holder = Some(Holder::new(holder_id(&field[0])?, fence.unwrap_or(0)));
        }
    }
    Ok(KeyStatus::new(holder, lease_left(left)?, usize::try_from(whole(waiting)?).map_err(|_| Misread)?))
}

/// What a self-test has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelfTested {
    /// The server's clock, in microseconds.
    pub now: i64,
    /// How many got the message.
    pub receivers: u64,
    /// What stood where the last fence stands and was none.
    pub no_fence: Option<String>,
    /// What was refused.
    pub refused: Vec<String>,
}

/// What a self-test has found.
pub fn self_tested(reply: &Value) -> Result<SelfTested, Misread> {
    let Value::Array(words) = reply else { return Err(Misread) };
    let [Value::Int(now), got_it, Value::BulkString(no_fence), refused @ ..] = words.as_slice() else {
        return Err(Misread);
    };
    let no_fence = Some(escaped(&String::from_utf8_lossy(no_fence))).filter(|no_fence| !no_fence.is_empty());
    let refused = refused.iter().map(|word| text(word).map(escaped)).collect::<Result<_, _>>()?;
    Ok(SelfTested { now: *now, receivers: whole(got_it)?, no_fence, refused })
}

/// Whether a script has put the clock in the place of something that was no fence.
pub fn is_healed(reply: &Value) -> bool {
    matches!(reply, Value::Array(words) if words.last().is_some_and(is_healed_mark))
}

/// An array: a word could be a field that others have written.
fn is_healed_mark(value: &Value) -> bool {
    matches!(value, Value::Array(mark) if matches!(mark.as_slice(), [healed] if is(healed, "healed")))
}

/// What others have written, in one line of a log.
pub fn escaped(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

/// Without what [`is_healed`] looks for.
fn words(reply: &Value) -> Result<&[Value], Misread> {
    match reply {
        Value::Array(words) => match words.as_slice() {
            [words @ .., last] if is_healed_mark(last) => Ok(words),
            words => Ok(words),
        },
        _ => Err(Misread),
    }
}

fn timed(reply: &Value) -> Result<(i64, &[Value]), Misread> {
    match words(reply)? {
        [Value::Int(now), rest @ ..] => Ok((*now, rest)),
        _ => Err(Misread),
    }
}

fn got(words: &[Value]) -> Result<AcquireReply, Misread> {
    match words {
        [granted, fence] if is(granted, "granted") => Ok(AcquireReply::Granted { fence: fence_of(fence)? }),
        [line, left, before] if is(line, "line") => Ok(AcquireReply::Queued {
            ahead: usize::try_from(whole(before)?).map_err(|_| Misread)?,
            lease_left: lease_left(left)?,
        }),
        [held, left] if is(held, "held") => Ok(AcquireReply::Busy { lease_left: lease_left(left)? }),
        [full, left, waiting] if is(full, "full") => Ok(AcquireReply::QueueFull {
            lease_left: lease_left(left)?,
            waiting: usize::try_from(whole(waiting)?).map_err(|_| Misread)?,
        }),
        _ => Err(Misread),
    }
}

/// A double can count no further, and no clock of this century stands there: somebody else has written into the lock.
fn fence_of(value: &Value) -> Result<u64, Misread> {
    whole(value).and_then(|fence| if fence < 1 << 53 { Ok(fence) } else { Err(Misread) })
}

/// `PTTL`: below zero it has no end (-1), or is no more (-2).
fn lease_left(left: &Value) -> Result<Duration, Misread> {
    match left {
        Value::Int(-1) => Ok(Duration::MAX),
        Value::Int(left) => Ok(Duration::from_millis(u64::try_from(*left).unwrap_or(0))),
        _ => Err(Misread),
    }
}

fn is(value: &Value, word: &str) -> bool {
    text(value).is_ok_and(|text| text == word)
}

fn text(value: &Value) -> Result<&str, Misread> {
    std::str::from_utf8(bytes(value)?).map_err(|_| Misread)
}

fn bytes(value: &Value) -> Result<&[u8], Misread> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        Value::SimpleString(text) => Ok(text.as_bytes()),
        _ => Err(Misread),
    }
}

/// Others may have written anything: it is shown, and compared with nothing.
fn holder_id(value: &Value) -> Result<AcquisitionId, Misread> {
    Ok(AcquisitionId::from_text(&escaped(&String::from_utf8_lossy(bytes(value)?))))
}

fn whole(value: &Value) -> Result<u64, Misread> {
    match value {
        Value::Int(number) => u64::try_from(*number).map_err(|_| Misread),
        other => text(other)?.parse().map_err(|_| Misread),
    }
}

impl std::fmt::Display for Misread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(
            "an answer that none of the scripts gives: is another program at these keys, or a proxy in between?",
        )
    }
}

impl std::error::Error for Misread {}
