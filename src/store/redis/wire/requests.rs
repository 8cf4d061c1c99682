//! Requests as calls of scripts. Pure.

use std::{fmt, time::Duration};

use smallvec::SmallVec;

use super::{
    keyspace::{InvalidName, Keyspace, LockName},
    script::{
        ACQUIRE, ACQUIRE_SHARE, DELETE_RECORD, FORCE, INSPECT, KEEP, REDEEM, RELEASE, RELEASE_SHARE, RENEW, SELF_TEST,
        ScriptCall, ScriptFile, YIELD,
    },
};
use crate::{
    limits::MAX_RECORD_BODY_BYTES,
    lock_key::LockKey,
    store::{
        AcquireRequest, ForceReleaseRequest, Heir, IfBusy, NewRecord, QueueConfig, Record, ReleaseRequest,
        RenewRequest, YieldRequest,
    },
    trace::SectionTrace,
};

impl Keyspace {
    /// One call for these acquires. Several of them have different keys and no records, ask for the
    /// whole key, and have one slot on a Cluster. `expires_at` is in microseconds of the server's
    /// clock.
    pub fn acquire(&self, requests: &[AcquireRequest], expires_at: i64) -> Result<ScriptCall, InvalidName> {
        let [first, ..] = requests else { unreachable!("a call has a request") };
        let locks = self.locks(requests.iter().map(|request| &request.key))?;
        let file = match first {
            first if first.in_place_of.is_some() => &REDEEM,
            first if first.id.max_holders() > 1 => &ACQUIRE_SHARE,
            _ => &ACQUIRE,
        };
        let mut call = self.call_of(file, &locks, first.demand.takes_record(), 4 + 4 * requests.len());
        call.arg(expires_at);
        call.queue_config(first.queue);
        for request in requests {
            call.arg(&request.id);
            call.arg(Ms(request.lease));
            match &request.in_place_of {
                Some(holder) => call.arg(holder),
                None => call.arg(if_busy(request)),
            }
            call.trace(&request.key, request.trace.as_ref());
        }
        Ok(call)
    }

    /// One call for these renewals, on a Cluster of one slot. An invalid name is omitted: nobody
    /// holds it. `with_queues`: the replies say which acquisitions newer ones replace.
    pub fn renew(&self, requests: &[RenewRequest], with_queues: bool) -> ScriptCall {
        let valid = || requests.iter().filter_map(|request| Some((self.lock(&request.key).ok()?, request)));
        let mut call = ScriptCall::new(RENEW.of(false));
        call.reserve(3 * requests.len());
        valid().for_each(|(lock, _)| call.key(lock));
        let replaceable = valid().filter(|(_, request)| with_queues && request.id.is_replaceable());
        replaceable.for_each(|(lock, _)| call.key(self.queue(lock)));
        for (_, request) in valid() {
            call.arg(&request.id);
            call.arg(Ms(request.lease));
        }
        call
    }

    /// One call for these releases. Several of them have no records and no shares, and on a Cluster
    /// one slot.
    pub fn release(&self, requests: &[ReleaseRequest]) -> Result<ScriptCall, InvalidName> {
        let [first, ..] = requests else { unreachable!("a call has a request") };
        let locks = self.locks(requests.iter().map(|request| &request.key))?;
        if let Some(heir) = first.heir.as_deref() {
            return Ok(self.keep(&locks, first, heir));
        }
        let file = if first.id.max_holders() > 1 { &RELEASE_SHARE } else { &RELEASE };
        let mut call = self.call_of(file, &locks, first.record.is_some(), 1 + 3 * requests.len());
        call.arg(Ms(first.queue.offer_ttl));
        for request in requests {
            call.arg(&request.id);
            call.arg(Ms(request.block_for));
            call.trace(&request.key, request.trace.as_ref());
        }
        if let Some(NewRecord { record, keep_for }) = first.record.as_deref() {
            call.arg(Ms(*keep_for));
            call.record(record);
        }
        Ok(call)
    }

    /// The call of a release that leaves the key to an heir.
    fn keep(&self, locks: &[LockName<'_>], request: &ReleaseRequest, heir: &Heir) -> ScriptCall {
        let mut call = self.call_of(&KEEP, locks, false, 4);
        call.arg(&request.id);
        call.arg(&heir.id);
        call.arg(Ms(heir.lease));
        call
    }

    /// The call of a yield. `expires_at` is in microseconds of the server's clock.
    pub fn yield_to_queue(&self, request: &YieldRequest, expires_at: i64) -> Result<ScriptCall, InvalidName> {
        let locks = [self.lock(&request.key)?];
        let mut call = self.call_of(&YIELD, &locks, request.demand.takes_record(), 10);
        call.arg(expires_at);
        call.queue_config(request.queue);
        call.arg(&request.next_id);
        call.arg(Ms(request.lease));
        call.arg(&request.id);
        call.arg(request.fence);
        call.trace(&request.key, request.ended.as_ref());
        call.trace(&request.key, request.trace.as_ref());
        Ok(call)
    }

    /// The call of a force release.
    pub fn force(&self, request: &ForceReleaseRequest) -> Result<ScriptCall, InvalidName> {
        let mut call = self.call_of(&FORCE, &[self.lock(&request.key)?], false, 3);
        call.arg(Ms(request.block_for));
        call.arg(Ms(request.queue.offer_ttl));
        call.arg(request.holder.as_ref().map(ToString::to_string).unwrap_or_default());
        Ok(call)
    }

    /// The call of an inspect.
    pub fn inspect(&self, key: &LockKey) -> Result<ScriptCall, InvalidName> {
        Ok(self.inspect_name(self.lock(key)?))
    }

    /// The call of an inspect of the lock with this name.
    pub fn inspect_name(&self, lock: LockName<'_>) -> ScriptCall {
        let mut call = ScriptCall::new(INSPECT.of(false));
        call.key(lock);
        call.key(self.queue(lock));
        call.key(self.record(lock));
        call.arg(self.inbox(""));
        call
    }

    /// The call of a deletion of the record of a key.
    pub fn delete_record(&self, key: &LockKey) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(key)?;
        let mut call = ScriptCall::new(DELETE_RECORD.of(false));
        call.key(lock);
        call.key(self.record(lock));
        Ok(call)
    }

    /// The call of the self-test, on the lock with this name.
    pub fn self_test(&self, lock: &str, inbox: &str, message: &str) -> ScriptCall {
        let lock = lock.into();
        let mut call = ScriptCall::new(SELF_TEST.of(false));
        call.key(lock);
        call.key(self.queue(lock));
        call.key(self.fence(lock));
        call.arg(inbox);
        call.arg(message);
        call
    }

    fn locks<'a>(
        &'a self,
        keys: impl Iterator<Item = &'a LockKey>,
    ) -> Result<SmallVec<[LockName<'a>; 1]>, InvalidName> {
        keys.map(|key| self.lock(key)).collect()
    }

    /// A call with all keys of these locks, and with the prefix of the channels as its first
    /// argument. That of one raw key is of the script for it. `args` is the number of further
    /// arguments to expect.
    fn call_of(&self, file: &'static ScriptFile, locks: &[LockName<'_>], has_record: bool, args: usize) -> ScriptCall {
        let [first, ..] = locks else { unreachable!("a call has a lock") };
        let raw = if locks.len() == 1 { self.raw_names(*first) } else { None };
        let mut call = ScriptCall::new(file.of(raw.is_some()));
        call.reserve(2 * locks.len() + 3 + args);
        for lock in locks {
            call.key(lock);
        }
        for lock in locks {
            call.key(self.queue(*lock));
        }
        if has_record {
            call.key(self.record(*first));
        }
        call.key(self.fence(*first));
        if let Some(raw) = raw {
            call.key(raw.reservation);
            call.arg(raw.channel);
            call.arg(raw.own_channel);
            call.arg(u8::from(self.node_id().is_some()));
        }
        call.arg(self.inbox(""));
        call
    }
}

impl ScriptCall {
    fn record(&mut self, record: &Record) {
        self.data.push(record.head.clone());
        self.data.extend(record.body.clone().filter(|body| body.len() <= MAX_RECORD_BODY_BYTES));
    }

    /// Of a raw key, other programs read the field.
    fn trace(&mut self, key: &LockKey, trace: Option<&SectionTrace>) {
        self.arg(trace.filter(|_| !key.is_raw()).map(ToString::to_string).unwrap_or_default());
    }

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
pub(super) struct Ms(pub(super) Duration);

impl fmt::Display for Ms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_nanos().div_ceil(1_000_000).fmt(f)
    }
}
