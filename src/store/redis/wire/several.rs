//! Calls for several keys of one node of a Cluster, in any slots. Pure.
//!
//! A script for each key would cost a master four times as much, most of it to start the script. So
//! the keys whose requests are simple share a script. It leaves all others as they are.

use deadpool_redis::redis::Value;

use super::{
    keyspace::{InvalidName, Keyspace},
    replies::{UnexpectedReply, is, parse_fence, parse_time, timed},
    requests::Ms,
    script::{ACQUIRE_FREE, RELEASE_UNQUEUED, ScriptCall, Variant},
};
use crate::store::{AcquireRequest, ReleaseRequest};

/// The grants of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeGrants {
    /// Of all of them.
    pub fence: u64,
    /// For each request.
    pub is_granted: Vec<bool>,
}

impl Keyspace {
    /// One call that grants the keys that are free, to requests without a record. `expires_at` is
    /// in microseconds of the server's clock.
    pub fn acquire_free(&self, requests: &[AcquireRequest], expires_at: i64) -> Result<ScriptCall, InvalidName> {
        let mut call = ScriptCall::new(ACQUIRE_FREE.of(Variant::default()));
        call.reserve(1 + 5 * requests.len());
        call.arg(expires_at);
        for request in requests {
            let lock = self.lock(&request.key)?;
            call.arg(lock);
            call.arg(self.queue(lock));
            call.arg(self.fence(lock));
            call.arg(&request.id);
            call.arg(Ms(request.lease));
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

/// The server's time, and which of this number of keys were granted.
pub fn parse_acquire_free(reply: &Value, count: usize) -> Result<(i64, FreeGrants), UnexpectedReply> {
    if let Value::BulkString(_) = reply {
        return Ok((parse_time(reply)?, FreeGrants { fence: parse_fence(reply)?, is_granted: vec![true; count] }));
    }
    let (now, elements) = timed(reply)?;
    let is_granted = match elements {
        [expired] if is(expired, "expired") => vec![false; count],
        others => all_but(others, count)?,
    };
    Ok((now, FreeGrants { fence: now.unsigned_abs(), is_granted }))
}

/// Which of this number of keys were released.
pub fn parse_release_unqueued(reply: &Value, count: usize) -> Result<Vec<bool>, UnexpectedReply> {
    match reply {
        freed if is(freed, "freed") => Ok(vec![true; count]),
        Value::Array(others) => all_but(others, count),
        _ => Err(UnexpectedReply),
    }
}

/// False at these positions, which count from 1.
fn all_but(positions: &[Value], count: usize) -> Result<Vec<bool>, UnexpectedReply> {
    let mut all = vec![true; count];
    for position in positions {
        let Value::Int(position) = position else { return Err(UnexpectedReply) };
        let at = usize::try_from(*position).ok().and_then(|position| position.checked_sub(1));
        *at.and_then(|at| all.get_mut(at)).ok_or(UnexpectedReply)? = false;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: &str = "1700000000000001";

    fn text(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    #[test]
    fn reply_names_the_keys_that_are_not_granted() {
        let parse = |reply| parse_acquire_free(&reply, 3).map(|(now, grants)| (now, grants.fence, grants.is_granted));
        let (now, fence) = (1_700_000_000_000_001_i64, 1_700_000_000_000_001_u64);
        assert_eq!(parse(text(NOW)).ok(), Some((now, fence, vec![true; 3])));
        let others = |others: &[i64]| {
            let others = others.iter().map(|other| Value::Int(*other));
            Value::Array([text(NOW)].into_iter().chain(others).collect())
        };
        assert_eq!(parse(others(&[1, 3])).ok(), Some((now, fence, vec![false, true, false])));
        assert_eq!(parse(Value::Array(vec![text(NOW), text("expired")])).ok(), Some((now, fence, vec![false; 3])));
        for position in [0, 4, -1, i64::MAX, i64::MIN] {
            assert!(parse(others(&[position])).is_err(), "{position}");
        }
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
