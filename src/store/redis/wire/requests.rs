//! Requests as calls of scripts. Pure.

use std::{fmt, sync::LazyLock, time::Duration};

use super::{
    keyspace::{InvalidName, Keyspace, LockName},
    script::{ACQUIRE, DELETE_RECORD, FORCE, INSPECT, RELEASE, RENEW, SELF_TEST, Script, ScriptCall, YIELD},
};
use crate::{
    limits::MAX_RECORD_BODY_BYTES,
    lock_key::LockKey,
    store::{AcquireRequest, ForceReleaseRequest, IfBusy, NewRecord, ReleaseRequest, RenewRequest, YieldRequest},
};

impl Keyspace {
    /// One call for these acquires. Several of them have different keys and no records.
    /// `expires_at` is in microseconds of the server's clock.
    pub fn acquire(&self, requests: &[AcquireRequest], expires_at: i64) -> Result<ScriptCall, InvalidName> {
        let [first, others @ ..] = requests else { unreachable!("a call has a request") };
        let is_recorded = first.demand.takes_record();
        let mut call = self.call(&ACQUIRE, requests.iter().map(|request| &request.key), is_recorded, 7)?;
        call.arg(&first.id);
        call.arg(expires_at);
        call.arg(Ms(first.lease));
        call.arg(enqueue(first));
        call.arg(Ms(first.queue.offer_ttl));
        call.arg(Ms(first.queue.entry_ttl));
        call.arg(first.queue.capacity);
        for request in others {
            call.arg(&request.id);
            call.arg(Ms(request.lease));
            call.arg(enqueue(request));
        }
        Ok(call)
    }

    /// One call for all renewals, and which of them it contains: an invalid name is omitted.
    pub fn renew(&self, requests: &[RenewRequest]) -> (ScriptCall, Vec<bool>) {
        let mut call = ScriptCall::new(&RENEW);
        call.reserve(3 * requests.len());
        let is_sent: Vec<_> = requests
            .iter()
            .map(|request| match self.lock(&request.key) {
                Ok(lock) => {
                    call.key(lock);
                    true
                }
                Err(_) => false,
            })
            .collect();
        for (request, _) in requests.iter().zip(&is_sent).filter(|(_, is_sent)| **is_sent) {
            call.arg(&request.id);
            call.arg(Ms(request.lease));
        }
        (call, is_sent)
    }

    /// One call for these releases. Several of them have no records.
    pub fn release(&self, requests: &[ReleaseRequest]) -> Result<ScriptCall, InvalidName> {
        let [first, others @ ..] = requests else { unreachable!("a call has a request") };
        let is_recorded = first.record.is_some();
        let mut call = self.call(&RELEASE, requests.iter().map(|request| &request.key), is_recorded, 7)?;
        call.arg(&first.id);
        call.arg(Ms(first.block_for));
        call.arg(Ms(first.queue.offer_ttl));
        if let Some(NewRecord { record, keep_for }) = &first.record {
            call.arg(Ms(*keep_for));
            call.data.push(record.head.clone());
            call.data.extend(record.body.clone().filter(|body| body.len() <= MAX_RECORD_BODY_BYTES));
        }
        for request in others {
            call.arg(&request.id);
            call.arg(Ms(request.block_for));
        }
        Ok(call)
    }

    /// The call of a yield. `expires_at` is in microseconds of the server's clock.
    pub fn yield_to_queue(&self, request: &YieldRequest, expires_at: i64) -> Result<ScriptCall, InvalidName> {
        let mut call = self.call(&YIELD, [&request.key], request.demand.takes_record(), 8)?;
        call.arg(&request.next_id);
        call.arg(expires_at);
        call.arg(Ms(request.lease));
        call.arg(&request.id);
        call.arg(Ms(request.queue.offer_ttl));
        call.arg(Ms(request.queue.entry_ttl));
        call.arg(request.queue.capacity);
        call.arg(request.fence);
        Ok(call)
    }

    /// The call of a force release.
    pub fn force(&self, request: &ForceReleaseRequest) -> Result<ScriptCall, InvalidName> {
        let mut call = self.call(&FORCE, [&request.key], false, 2)?;
        call.arg(Ms(request.block_for));
        call.arg(Ms(request.queue.offer_ttl));
        Ok(call)
    }

    /// The call of an inspect.
    pub fn inspect(&self, key: &LockKey) -> Result<ScriptCall, InvalidName> {
        Ok(self.inspect_name(self.lock(key)?))
    }

    /// The call of an inspect of the lock with this name.
    pub fn inspect_name(&self, lock: LockName<'_>) -> ScriptCall {
        let mut call = ScriptCall::new(&INSPECT);
        call.key(lock);
        call.key(self.queue(lock));
        call.key(self.record(lock));
        call.arg(self.inbox(""));
        call
    }

    /// The call of a deletion of the record of a key.
    pub fn delete_record(&self, key: &LockKey) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(key)?;
        let mut call = ScriptCall::new(&DELETE_RECORD);
        call.key(lock);
        call.key(self.record(lock));
        Ok(call)
    }

    /// The call of the self-test, on a key of its own.
    pub fn self_test(&self, key: &LockKey, inbox: &str, message: &str) -> Result<ScriptCall, InvalidName> {
        let mut call = self.call(&SELF_TEST, [key], false, 2)?;
        call.arg(inbox);
        call.arg(message);
        Ok(call)
    }

    /// A call with the fence, the lock and the queue of each key, and the record of the first one
    /// if the script may use it. `args` is the number of arguments to expect.
    fn call<'a>(
        &self,
        script: &'static LazyLock<Script>,
        keys: impl IntoIterator<Item = &'a LockKey>,
        is_recorded: bool,
        args: usize,
    ) -> Result<ScriptCall, InvalidName> {
        let keys = keys.into_iter();
        let mut call = ScriptCall::new(script);
        // Each further key has three arguments at most.
        call.reserve(2 + args + 5 * keys.size_hint().0);
        call.key(self.fence());
        for key in keys {
            let lock = self.lock(key)?;
            call.key(lock);
            call.key(self.queue(lock));
            if is_recorded {
                call.key(self.record(lock));
            }
        }
        Ok(call)
    }
}

fn enqueue(request: &AcquireRequest) -> char {
    if request.if_busy == IfBusy::Enqueue { '1' } else { '0' }
}

/// Whole milliseconds, rounded up: a lease is never shorter than requested.
struct Ms(Duration);

impl fmt::Display for Ms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_nanos().div_ceil(1_000_000).fmt(f)
    }
}
