//! Calls for several keys of one node of a Cluster, in any slots. Pure.
//!
//! A script for each key would cost a master four times as much, most of it to start the script. So
//! the keys whose requests are simple share a script. It leaves all others as they are.

use deadpool_redis::redis::Value;

use super::{
    keyspace::{InvalidName, Keyspace},
    replies::{UnexpectedReply, is, lease_left, parse_fence, parse_time},
    requests::{Ms, if_busy},
    script::{ACQUIRE_FREE, RELEASE_UNQUEUED, ScriptCall, Variant},
};
use crate::store::{AcquireReply, AcquireRequest, ReleaseRequest};

/// The replies of one call. `None`: nothing was done for this key.
pub type FreeReplies = Vec<Option<AcquireReply>>;

impl Keyspace {
    /// One call that grants the keys that are free, to requests without a record. `expires_at` is
    /// in microseconds of the server's clock.
    pub fn acquire_free<'a>(
        &self,
        requests: impl Iterator<Item = &'a AcquireRequest>,
        expires_at: i64,
    ) -> Result<ScriptCall, InvalidName> {
        let mut call = ScriptCall::new(ACQUIRE_FREE.of(Variant::default()));
        call.reserve(1 + 6 * requests.size_hint().0);
        call.arg(expires_at);
        for request in requests {
            let lock = self.lock(&request.key)?;
            call.arg(lock);
            call.arg(self.queue(lock));
            call.arg(self.fence(lock));
            call.arg(&request.id);
            call.arg(Ms(request.lease));
            call.arg(if_busy(request));
        }
        Ok(call)
    }

    /// One call that releases the keys that are held and have no waiters, for requests without a
    /// block and without a record.
    pub fn release_unqueued<'a>(
        &self,
        requests: impl Iterator<Item = &'a ReleaseRequest>,
    ) -> Result<ScriptCall, InvalidName> {
        let mut call = ScriptCall::new(RELEASE_UNQUEUED.of(Variant::default()));
        call.reserve(3 * requests.size_hint().0);
        for request in requests {
            let lock = self.lock(&request.key)?;
            call.arg(lock);
            call.arg(self.queue(lock));
            call.arg(&request.id);
        }
        Ok(call)
    }
}

/// The server's time, and the replies to this number of requests.
pub fn parse_acquire_free(reply: &Value, count: usize) -> Result<(i64, FreeReplies), UnexpectedReply> {
    if let Value::BulkString(_) = reply {
        return Ok((parse_time(reply)?, vec![Some(AcquireReply::Granted { fence: parse_fence(reply)? }); count]));
    }
    let Value::Array(elements) = reply else { return Err(UnexpectedReply) };
    let [time, others @ ..] = elements.as_slice() else { return Err(UnexpectedReply) };
    let now = parse_time(time)?;
    if matches!(others, [expired] if is(expired, "expired")) {
        return Ok((now, vec![None; count]));
    }
    let mut replies = vec![Some(AcquireReply::Granted { fence: parse_fence(time)? }); count];
    for other in others {
        let (position, reply) = match other {
            Value::Array(busy) => match busy.as_slice() {
                [position, left] => (position, Some(AcquireReply::Busy { lease_left: lease_left(left)? })),
                _ => return Err(UnexpectedReply),
            },
            position => (position, None),
        };
        *at(&mut replies, position)? = reply;
    }
    Ok((now, replies))
}

/// Which of this number of keys were released.
pub fn parse_release_unqueued(reply: &Value, count: usize) -> Result<Vec<bool>, UnexpectedReply> {
    match reply {
        freed if is(freed, "freed") => Ok(vec![true; count]),
        Value::Array(others) => {
            let mut is_released = vec![true; count];
            for position in others {
                *at(&mut is_released, position)? = false;
            }
            Ok(is_released)
        }
        _ => Err(UnexpectedReply),
    }
}

/// The value at a position, which counts from 1.
fn at<'a, T>(values: &'a mut [T], position: &Value) -> Result<&'a mut T, UnexpectedReply> {
    let Value::Int(position) = position else { return Err(UnexpectedReply) };
    let at = usize::try_from(*position).ok().and_then(|position| position.checked_sub(1));
    at.and_then(|at| values.get_mut(at)).ok_or(UnexpectedReply)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NOW: &str = "1700000000000001";

    fn text(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    #[test]
    fn reply_names_the_keys_that_are_not_granted() {
        let parse = |reply| parse_acquire_free(&reply, 3).ok();
        let granted = || Some(AcquireReply::Granted { fence: 1_700_000_000_000_001 });
        let now = 1_700_000_000_000_001_i64;
        assert_eq!(parse(text(NOW)), Some((now, vec![granted(), granted(), granted()])));
        let others = |others: Vec<Value>| Value::Array([text(NOW)].into_iter().chain(others).collect());
        assert_eq!(parse(others(vec![Value::Int(1), Value::Int(3)])), Some((now, vec![None, granted(), None])));
        let busy = |position, left| Value::Array(vec![Value::Int(position), Value::Int(left)]);
        let is_busy = Some(AcquireReply::Busy { lease_left: Duration::from_millis(70) });
        assert_eq!(parse(others(vec![busy(2, 70)])), Some((now, vec![granted(), is_busy, granted()])));
        assert_eq!(parse(others(vec![text("expired")])), Some((now, vec![None; 3])));
        for position in [0, 4, -1, i64::MAX, i64::MIN] {
            assert_eq!(parse(others(vec![Value::Int(position)])), None, "{position}");
            assert_eq!(parse(others(vec![busy(position, 70)])), None, "{position}");
        }
        assert_eq!(parse(others(vec![Value::Array(vec![])])), None);
    }

    #[test]
    fn reply_names_the_keys_that_are_not_released() {
        let parse = |reply| parse_release_unqueued(&reply, 2).ok();
        assert_eq!(parse(text("freed")), Some(vec![true; 2]));
        assert_eq!(parse(Value::Array(vec![Value::Int(2)])), Some(vec![true, false]));
        assert_eq!(parse(Value::Array(vec![Value::Int(3)])), None);
        assert_eq!(parse(text("held")), None);
        assert_eq!(parse(Value::Nil), None);
    }
}
