//! What is asked and what is answered, as scripts and their replies. Pure.

use std::time::Duration;

use deadpool_redis::redis::Value;

use super::{
    keyspace::{InvalidName, Keyspace},
    script::{ACQUIRE, FORCE, INSPECT, RELEASE, RENEW, SELF_TEST, Script, ScriptCall, YIELD},
};
use crate::{
    acquisition::AcquisitionId,
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, ForceReleaseReply, ForceReleaseRequest, Holder, IfBusy, KeyStatus, ReleaseReply,
        ReleaseRequest, RenewReply, RenewRequest, YieldReply, YieldRequest,
    },
};

/// A reply that no script of ours gives.
#[derive(Debug)]
pub struct UnexpectedReply;

/// What came of a call that has to run in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timed<T> {
    /// It ran in time.
    Done(T),
    /// It came too late, and did nothing.
    Expired,
}

/// In microseconds, the year 2001: no fence of ours is smaller.
const MIN_FENCE: u64 = 1_000_000_000_000_000;

// === what is asked ===

impl Keyspace {
    /// `until`: by the server's clock, in microseconds.
    pub fn acquire(&self, ask: &AcquireRequest, until: i64) -> Result<ScriptCall, InvalidName> {
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
    pub fn release(&self, ask: &ReleaseRequest) -> Result<ScriptCall, InvalidName> {
        self.call(&RELEASE, &ask.key, vec![ask.id.to_string(), ms(ask.block_for), ms(ask.queue.offer_ttl)])
    }

    /// `until`: by the server's clock, in microseconds.
    pub fn yield_to_queue(&self, ask: &YieldRequest, until: i64) -> Result<ScriptCall, InvalidName> {
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
    pub fn force(&self, ask: &ForceReleaseRequest) -> Result<ScriptCall, InvalidName> {
        self.call(&FORCE, &ask.key, vec![ms(ask.block_for), ms(ask.queue.offer_ttl)])
    }

    /// Looks.
    pub fn inspect(&self, key: &LockKey) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(key)?;
        let line = self.queue(&lock);
        Ok(ScriptCall { script: &INSPECT, keys: vec![lock, line], args: Vec::new() })
    }

    /// Tries everything on a key of its own.
    pub fn self_test(&self, key: &LockKey, inbox: &str, message: &str) -> Result<ScriptCall, InvalidName> {
        self.call(&SELF_TEST, key, vec![inbox.to_owned(), message.to_owned()])
    }

    fn call(
        &self,
        script: &'static std::sync::LazyLock<Script>,
        key: &LockKey,
        args: Vec<String>,
    ) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(key)?;
        let line = self.queue(&lock);
        Ok(ScriptCall { script, keys: vec![self.fence(), lock, line], args })
    }
}

/// Redis counts whole milliseconds. Rounded up: what is kept is kept for at least as long.
fn ms(duration: Duration) -> String {
    duration.as_nanos().div_ceil(1_000_000).to_string()
}

// === what is answered ===

/// What the server's clock said, and what came of an acquire.
pub fn parse_acquire(reply: &Value) -> Result<(i64, Timed<AcquireReply>), UnexpectedReply> {
    let (now, words) = timed(reply)?;
    let answer = match words {
        [late] if is(late, "late") => Timed::Expired,
        words => Timed::Done(parse_acquire_reply(words)?),
    };
    Ok((now, answer))
}

/// What the server's clock said, and what came of a yield.
pub fn parse_yield(reply: &Value) -> Result<(i64, Timed<YieldReply>), UnexpectedReply> {
    let (now, words) = timed(reply)?;
    let answer = match words {
        [late] if is(late, "late") => Timed::Expired,
        [extended, fence] if is(extended, "extended") => {
            Timed::Done(YieldReply::Extended { fence: parse_fence(fence)? })
        }
        words => Timed::Done(YieldReply::NotHolder(parse_acquire_reply(words)?)),
    };
    Ok((now, answer))
}

/// What came of renewals; of those that were asked for, in the order of all.
pub fn parse_renew(reply: &Value, is_asked: &[bool]) -> Result<Vec<RenewReply>, UnexpectedReply> {
    let Value::Array(answers) = reply else { return Err(UnexpectedReply) };
    let mut answers = answers.iter();
    let all = is_asked.iter().map(|is_asked| {
        if !is_asked {
            return Ok(RenewReply::NotHolder);
        }
        match answers.next() {
            Some(Value::Int(1)) => Ok(RenewReply::Extended),
            Some(Value::Int(0)) => Ok(RenewReply::NotHolder),
            Some(Value::Int(-1)) => Ok(RenewReply::Unknown),
            _ => Err(UnexpectedReply),
        }
    });
    all.collect()
}

/// What came of a release.
pub fn parse_release(reply: &Value) -> Result<ReleaseReply, UnexpectedReply> {
    let [what] = elements(reply)? else { return Err(UnexpectedReply) };
    match text(what)? {
        "freed" => Ok(ReleaseReply::Freed),
        "handed on" => Ok(ReleaseReply::HandedOff),
        "not owner" => Ok(ReleaseReply::NotHolder),
        _ => Err(UnexpectedReply),
    }
}

/// What came of a revocation.
pub fn parse_force(reply: &Value) -> Result<ForceReleaseReply, UnexpectedReply> {
    match elements(reply)? {
        [free] if is(free, "free") => Ok(ForceReleaseReply::Free),
        [revoked, id] if is(revoked, "revoked") => Ok(ForceReleaseReply::Revoked { holder: holder_id(id)? }),
        [unblocked, left] if is(unblocked, "unblocked") => {
            Ok(ForceReleaseReply::Unblocked { blocked_for: lease_left(left)? })
        }
        _ => Err(UnexpectedReply),
    }
}

/// Who has it.
pub fn parse_inspect(reply: &Value) -> Result<KeyStatus, UnexpectedReply> {
    let Value::Array(words) = reply else { return Err(UnexpectedReply) };
    let [left, waiting, fields @ ..] = words.as_slice() else { return Err(UnexpectedReply) };
    let mut holder = None;
    for field in fields.chunks_exact(2) {
        if !bytes(&field[0])?.ends_with(b":end") {
            // What others wrote is a count: then nobody knows since when.
            let fence = parse_u64(&field[1]).ok().filter(|fence| *fence >= MIN_FENCE);
            holder = Some(Holder::new(holder_id(&field[0])?, fence.unwrap_or(0)));
        }
    }
    Ok(KeyStatus::new(holder, lease_left(left)?, usize::try_from(parse_u64(waiting)?).map_err(|_| UnexpectedReply)?))
}

/// What a self-test has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelfTestReport {
    /// The server's clock, in microseconds.
    pub now: i64,
    /// How many got the message.
    pub receivers: u64,
    /// What stood where the last fence stands and was none.
    pub invalid_fence: Option<String>,
    /// What was refused.
    pub refused: Vec<String>,
}

/// What a self-test has found.
pub fn parse_self_test(reply: &Value) -> Result<SelfTestReport, UnexpectedReply> {
    let Value::Array(words) = reply else { return Err(UnexpectedReply) };
    let [Value::Int(now), got_it, Value::BulkString(no_fence), refused @ ..] = words.as_slice() else {
        return Err(UnexpectedReply);
    };
    let no_fence = Some(escape_control(&String::from_utf8_lossy(no_fence))).filter(|no_fence| !no_fence.is_empty());
    let refused = refused.iter().map(|word| text(word).map(escape_control)).collect::<Result<_, _>>()?;
    Ok(SelfTestReport { now: *now, receivers: parse_u64(got_it)?, invalid_fence: no_fence, refused })
}

/// Whether a script has put the clock in the place of something that was no fence.
pub fn fence_was_replaced(reply: &Value) -> bool {
    matches!(reply, Value::Array(words) if words.last().is_some_and(is_replaced_marker))
}

/// An array: a word could be a field that others have written.
fn is_replaced_marker(value: &Value) -> bool {
    matches!(value, Value::Array(mark) if matches!(mark.as_slice(), [healed] if is(healed, "healed")))
}

/// What others have written, in one line of a log.
pub fn escape_control(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

/// Without what [`is_healed`] looks for.
fn elements(reply: &Value) -> Result<&[Value], UnexpectedReply> {
    match reply {
        Value::Array(words) => match words.as_slice() {
            [words @ .., last] if is_replaced_marker(last) => Ok(words),
            words => Ok(words),
        },
        _ => Err(UnexpectedReply),
    }
}

fn timed(reply: &Value) -> Result<(i64, &[Value]), UnexpectedReply> {
    match elements(reply)? {
        [Value::Int(now), rest @ ..] => Ok((*now, rest)),
        _ => Err(UnexpectedReply),
    }
}

fn parse_acquire_reply(words: &[Value]) -> Result<AcquireReply, UnexpectedReply> {
    match words {
        [granted, fence] if is(granted, "granted") => Ok(AcquireReply::Granted { fence: parse_fence(fence)? }),
        [line, left, before] if is(line, "line") => Ok(AcquireReply::Queued {
            ahead: usize::try_from(parse_u64(before)?).map_err(|_| UnexpectedReply)?,
            lease_left: lease_left(left)?,
        }),
        [held, left] if is(held, "held") => Ok(AcquireReply::Busy { lease_left: lease_left(left)? }),
        [full, left, waiting] if is(full, "full") => Ok(AcquireReply::QueueFull {
            lease_left: lease_left(left)?,
            waiting: usize::try_from(parse_u64(waiting)?).map_err(|_| UnexpectedReply)?,
        }),
        _ => Err(UnexpectedReply),
    }
}

/// A double can count no further, and no clock of this century stands there: somebody else has written into the lock.
fn parse_fence(value: &Value) -> Result<u64, UnexpectedReply> {
    parse_u64(value).and_then(|fence| if fence < 1 << 53 { Ok(fence) } else { Err(UnexpectedReply) })
}

/// `PTTL`: below zero it has no end (-1), or is no more (-2).
fn lease_left(left: &Value) -> Result<Duration, UnexpectedReply> {
    match left {
        Value::Int(-1) => Ok(Duration::MAX),
        Value::Int(left) => Ok(Duration::from_millis(u64::try_from(*left).unwrap_or(0))),
        _ => Err(UnexpectedReply),
    }
}

fn is(value: &Value, word: &str) -> bool {
    text(value).is_ok_and(|text| text == word)
}

fn text(value: &Value) -> Result<&str, UnexpectedReply> {
    std::str::from_utf8(bytes(value)?).map_err(|_| UnexpectedReply)
}

fn bytes(value: &Value) -> Result<&[u8], UnexpectedReply> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        Value::SimpleString(text) => Ok(text.as_bytes()),
        _ => Err(UnexpectedReply),
    }
}

/// Others may have written anything: it is shown, and compared with nothing.
fn holder_id(value: &Value) -> Result<AcquisitionId, UnexpectedReply> {
    Ok(AcquisitionId::from_text(&escape_control(&String::from_utf8_lossy(bytes(value)?))))
}

fn parse_u64(value: &Value) -> Result<u64, UnexpectedReply> {
    match value {
        Value::Int(number) => u64::try_from(*number).map_err(|_| UnexpectedReply),
        other => text(other)?.parse().map_err(|_| UnexpectedReply),
    }
}

impl std::fmt::Display for UnexpectedReply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(
            "an answer that none of the scripts gives: is another program at these keys, or a proxy in between?",
        )
    }
}

impl std::error::Error for UnexpectedReply {}
