//! Requests as calls of scripts. Pure.

use std::{fmt, sync::LazyLock, time::Duration};

use smallvec::SmallVec;

use super::{
    keyspace::{InvalidName, Keyspace, LockName},
    script::{
        ACQUIRE, DELETE_RECORD, FORCE, INSPECT, RAW_ACQUIRE, RAW_FORCE, RAW_RELEASE, RAW_YIELD, RELEASE, RENEW,
        SELF_TEST, Script, ScriptCall, YIELD,
    },
};
use crate::{
    limits::MAX_RECORD_BODY_BYTES,
    lock_key::LockKey,
    store::{
        AcquireRequest, ForceReleaseRequest, IfBusy, NewRecord, QueueConfig, ReleaseRequest, RenewRequest, YieldRequest,
    },
};

impl Keyspace {
    /// One call for these acquires. Several of them have different keys and no records.
    /// `expires_at` is in microseconds of the server's clock.
    pub fn acquire(&self, requests: &[AcquireRequest], expires_at: i64) -> Result<ScriptCall, InvalidName> {
        let [first, ..] = requests else { unreachable!("a call has a request") };
        let locks = self.locks(requests.iter().map(|request| &request.key))?;
        let mut call = self.call_of(&ACQUIRE, &RAW_ACQUIRE, &locks, 5 + 4 * requests.len());
        call.arg(expires_at);
        call.queue_config(first.queue);
        for request in requests {
            call.arg(&request.id);
            call.arg(Ms(request.lease));
            call.arg(if_busy(request));
        }
        self.queues(&mut call, &locks);
        if first.demand.takes_record() {
            call.arg(self.record(locks[0]));
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
        let [first, ..] = requests else { unreachable!("a call has a request") };
        let locks = self.locks(requests.iter().map(|request| &request.key))?;
        let mut call = self.call_of(&RELEASE, &RAW_RELEASE, &locks, 4 + 3 * requests.len());
        call.arg(Ms(first.queue.offer_ttl));
        for request in requests {
            call.arg(&request.id);
            call.arg(Ms(request.block_for));
        }
        self.queues(&mut call, &locks);
        if let Some(NewRecord { record, keep_for }) = first.record.as_deref() {
            call.arg(self.record(locks[0]));
            call.arg(Ms(*keep_for));
            call.data.push(record.head.clone());
            call.data.extend(record.body.clone().filter(|body| body.len() <= MAX_RECORD_BODY_BYTES));
        }
        Ok(call)
    }

    /// The call of a yield. `expires_at` is in microseconds of the server's clock.
    pub fn yield_to_queue(&self, request: &YieldRequest, expires_at: i64) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(&request.key)?;
        let mut call = self.call_of(&YIELD, &RAW_YIELD, &[lock], 11);
        call.arg(expires_at);
        call.queue_config(request.queue);
        call.arg(&request.next_id);
        call.arg(Ms(request.lease));
        call.arg(&request.id);
        call.arg(request.fence);
        call.arg(self.queue(lock));
        if request.demand.takes_record() {
            call.arg(self.record(lock));
        }
        Ok(call)
    }

    /// The call of a force release.
    pub fn force(&self, request: &ForceReleaseRequest) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(&request.key)?;
        let mut call = self.call_of(&FORCE, &RAW_FORCE, &[lock], 4);
        call.arg(Ms(request.block_for));
        call.arg(Ms(request.queue.offer_ttl));
        call.arg(self.queue(lock));
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
        call.arg(self.inbox(""));
        call.arg(self.queue(lock));
        call.arg(self.record(lock));
        call
    }

    /// The call of a deletion of the record of a key.
    pub fn delete_record(&self, key: &LockKey) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(key)?;
        let mut call = ScriptCall::new(&DELETE_RECORD);
        call.key(lock);
        call.arg(self.record(lock));
        Ok(call)
    }

    /// The call of the self-test, on a key of its own.
    pub fn self_test(&self, key: &LockKey, inbox: &str, message: &str) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(key)?;
        let mut call = ScriptCall::new(&SELF_TEST);
        call.key(lock);
        call.arg(self.fence());
        call.arg(self.queue(lock));
        call.arg(inbox);
        call.arg(message);
        Ok(call)
    }

    fn locks<'a>(
        &'a self,
        keys: impl Iterator<Item = &'a LockKey>,
    ) -> Result<SmallVec<[LockName<'a>; 1]>, InvalidName> {
        keys.map(|key| self.lock(key)).collect()
    }

    /// A call with these locks, and with the fence as its first argument. That of one raw key is of
    /// the script for it, and begins with its names. `args` is the number of arguments to expect.
    fn call_of(
        &self,
        script: &'static LazyLock<Script>,
        raw_script: &'static LazyLock<Script>,
        locks: &[LockName<'_>],
        args: usize,
    ) -> ScriptCall {
        let raw = if let [lock] = locks { self.raw_names(*lock) } else { None };
        let mut call = ScriptCall::new(if raw.is_some() { raw_script } else { script });
        call.reserve(locks.len() + args);
        for lock in locks {
            call.key(lock);
        }
        if let Some(raw) = raw {
            call.arg(raw.channel);
            call.arg(raw.own_channel);
            call.arg(raw.reservation);
        }
        call.arg(self.fence());
        call
    }

    fn queues(&self, call: &mut ScriptCall, locks: &[LockName<'_>]) {
        for lock in locks {
            call.arg(self.queue(*lock));
        }
    }
}

impl ScriptCall {
    fn queue_config(&mut self, queue: QueueConfig) {
        self.arg(Ms(queue.offer_ttl));
        self.arg(Ms(queue.entry_ttl));
        self.arg(queue.capacity);
    }
}

fn if_busy(request: &AcquireRequest) -> &'static str {
    match request.if_busy {
        IfBusy::Fail => "fail",
        IfBusy::Enqueue if request.is_repeated => "poll",
        IfBusy::Enqueue => "enqueue",
    }
}

/// Whole milliseconds, rounded up: a lease is never shorter than requested.
struct Ms(Duration);

impl fmt::Display for Ms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_nanos().div_ceil(1_000_000).fmt(f)
    }
}
