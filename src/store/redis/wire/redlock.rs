//! The scripts of a store on several independent servers: requests and replies. Pure.

use std::time::Duration;

use deadpool_redis::redis::Value;

use super::{
    keyspace::{InvalidName, Keyspace},
    replies::{
        KeyReplies, Timed, UnexpectedReply, elements, is, lease_left, parse_each, parse_fence, parse_timed, text,
    },
    requests::Ms,
    script::{RAISE, ScriptCall, ScriptFile, VOTE, WITHDRAW},
};
use crate::{acquisition::AcquisitionId, lock_key::LockKey};

/// A server's vote on one acquisition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    /// The server has granted the key.
    Granted {
        /// Its fence at this server.
        fence: u64,
    },
    /// The key is busy at this server.
    Busy {
        /// The remaining lease of the holder.
        lease_left: Duration,
        /// Whether the holder has no majority yet, as far as this server knows.
        is_incomplete: bool,
    },
}

/// The result of a raise at one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raised {
    /// The acquisition holds the key at this server.
    Held {
        /// Its fence: at least that of the call.
        fence: u64,
    },
    /// The acquisition does not hold the key at this server.
    NotHolder,
    /// The fence is more than a day ahead of the clock of this server, which does not keep it.
    ClockBehind,
}

/// A grant to complete.
#[derive(Clone, Debug)]
pub struct RaiseRequest {
    /// The key.
    pub key: LockKey,
    /// The acquisition.
    pub id: AcquisitionId,
    /// Its fence.
    pub fence: u64,
    /// Its lease, from the execution of the call.
    pub lease: Duration,
}

impl Keyspace {
    /// One call for the votes on these acquisitions, which have different keys. `expires_at` is in
    /// microseconds of the server's clock.
    pub fn vote<'a>(
        &self,
        acquisitions: impl Iterator<Item = (&'a LockKey, &'a AcquisitionId)> + Clone,
        incomplete_lease: Duration,
        expires_at: i64,
    ) -> Result<ScriptCall, InvalidName> {
        let mut call = self.call_on(&VOTE, acquisitions.clone().map(|(key, _)| key))?;
        self.fence_key(&mut call);
        call.arg(expires_at);
        call.arg(Ms(incomplete_lease));
        acquisitions.for_each(|(_, id)| call.arg(id));
        Ok(call)
    }

    /// One call that completes these grants. `expires_at` is in microseconds of the server's clock.
    pub fn raise(&self, requests: &[RaiseRequest], expires_at: i64) -> Result<ScriptCall, InvalidName> {
        let mut call = self.call_on(&RAISE, requests.iter().map(|request| &request.key))?;
        self.fence_key(&mut call);
        call.arg(expires_at);
        for request in requests {
            call.arg(&request.id);
            call.arg(request.fence);
            call.arg(Ms(request.lease));
        }
        Ok(call)
    }

    /// One call that ends the incomplete grants of these acquisitions.
    pub fn withdraw<'a>(
        &self,
        acquisitions: impl Iterator<Item = (&'a LockKey, &'a AcquisitionId)> + Clone,
    ) -> Result<ScriptCall, InvalidName> {
        let mut call = self.call_on(&WITHDRAW, acquisitions.clone().map(|(key, _)| key))?;
        acquisitions.for_each(|(_, id)| call.arg(id));
        Ok(call)
    }

    /// A call of each script, which changes nothing. The first one has the server's time.
    pub fn redlock_scripts(&self) -> [ScriptCall; 3] {
        [&VOTE, &RAISE, &WITHDRAW].map(|file| {
            let mut call = ScriptCall::new(file.of(false));
            self.fence_key(&mut call);
            // A time that has passed.
            call.arg(0);
            call
        })
    }

    fn call_on<'a>(
        &self,
        file: &'static ScriptFile,
        keys: impl Iterator<Item = &'a LockKey>,
    ) -> Result<ScriptCall, InvalidName> {
        let mut call = ScriptCall::new(file.of(false));
        for key in keys {
            call.key(self.lock(key)?);
        }
        Ok(call)
    }

    /// One server has one fence for all locks.
    fn fence_key(&self, call: &mut ScriptCall) {
        call.key(self.fence("".into()));
    }
}

/// The server's time and its votes on this number of acquisitions.
pub fn parse_vote(reply: &Value, count: usize) -> Result<(i64, Timed<KeyReplies<Vote>>), UnexpectedReply> {
    let parse = |reply: &Value| match elements(reply)? {
        [granted, fence] if is(granted, "granted") => Ok(Vote::Granted { fence: parse_vote_fence(fence)? }),
        [busy, left, is_incomplete] if is(busy, "busy") => {
            Ok(Vote::Busy { lease_left: lease_left(left)?, is_incomplete: *is_incomplete == Value::Int(1) })
        }
        _ => Err(UnexpectedReply),
    };
    parse_timed(reply, |replies| parse_each(replies, count, parse))
}

/// The server's time and the results of this number of raises.
pub fn parse_raise(reply: &Value, count: usize) -> Result<(i64, Timed<KeyReplies<Raised>>), UnexpectedReply> {
    let parse = |reply: &Value| match reply {
        Value::Int(0) => Ok(Raised::NotHolder),
        Value::Int(-1) => Ok(Raised::ClockBehind),
        fence => Ok(Raised::Held { fence: parse_fence(fence)? }),
    };
    parse_timed(reply, |replies| parse_each(replies, count, parse))
}

/// The number of incomplete grants that ended.
pub fn parse_withdraw(reply: &Value) -> Result<usize, UnexpectedReply> {
    let Value::Int(ended) = reply else { return Err(UnexpectedReply) };
    usize::try_from(*ended).map_err(|_| UnexpectedReply)
}

/// A fence, complete or not.
fn parse_vote_fence(fence: &Value) -> Result<u64, UnexpectedReply> {
    let fence = text(fence)?;
    parse_fence(&Value::SimpleString(fence.strip_suffix('?').unwrap_or(fence).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::redis::wire::KeyError;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn votes_and_raises_are_parsed_for_each_key() {
        let votes = Value::Array(vec![
            bulk("1700000000000009"),
            Value::Array(vec![bulk("granted"), bulk("1700000000000007?")]),
            Value::Array(vec![bulk("granted"), bulk("1700000000000005")]),
            Value::Array(vec![bulk("busy"), Value::Int(25), Value::Int(1)]),
            Value::Array(vec![bulk("busy"), Value::Int(-1), Value::Int(0)]),
            Value::Array(vec![bulk("error"), bulk("WRONGTYPE no hash")]),
            Value::Array(vec![bulk("fence missing")]),
        ]);
        let (now, Timed::Done(replies)) = parse_vote(&votes, 5).expect("replies") else { panic!("in time") };
        let busy = |lease_left, is_incomplete| Ok(Vote::Busy { lease_left, is_incomplete });
        let granted = |fence| Ok(Vote::Granted { fence });
        assert_eq!(now, 1_700_000_000_000_009);
        assert_eq!(
            replies,
            [
                granted(1_700_000_000_000_007),
                granted(1_700_000_000_000_005),
                busy(Duration::from_millis(25), true),
                busy(Duration::MAX, false),
                Err(KeyError("WRONGTYPE no hash".to_owned()))
            ]
        );
        assert!(parse_vote(&votes, 4).is_err(), "another number of keys");
        let raised = Value::Array(vec![bulk("7"), bulk("1700000000000008"), Value::Int(0), Value::Int(-1)]);
        let (_, Timed::Done(replies)) = parse_raise(&raised, 3).expect("replies") else { panic!("in time") };
        let held = Raised::Held { fence: 1_700_000_000_000_008 };
        assert_eq!(replies, [Ok(held), Ok(Raised::NotHolder), Ok(Raised::ClockBehind)]);
        let expired = Value::Array(vec![bulk("7"), bulk("expired")]);
        assert_eq!(parse_raise(&expired, 3).ok(), Some((7, Timed::Expired)));
        assert!(parse_raise(&Value::Array(vec![bulk("7"), bulk("17?")]), 1).is_err(), "no incomplete fence");
    }
}
