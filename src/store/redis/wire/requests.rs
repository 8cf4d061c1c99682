//! Requests as calls of scripts. Pure.

use std::{fmt, time::Duration};

use smallvec::SmallVec;

use super::{
    keyspace::{InvalidName, Keyspace, LockName},
    script::{
        ACQUIRE, COMPLETE, DELETE_RECORD, DELETE_RECORD_ALONE, FORCE, INSPECT, LEAVE_QUEUE, NEXT_FENCE, READ_RECORD,
        RELEASE, RENEW, SELF_TEST, ScriptCall, ScriptFile, Variant, WAKE_QUEUE, WRITE_RECORD, YIELD,
    },
};
use crate::{
    acquisition::AcquisitionId,
    limits::MAX_RECORD_BODY_BYTES,
    lock_key::LockKey,
    store::{
        AcquireRequest, ForceReleaseRequest, IfBusy, NewRecord, QueueConfig, Record, ReleaseRequest, RenewRequest,
        YieldRequest,
    },
};

impl Keyspace {
    /// One call for these acquires. Several of them have different keys and no records.
    /// `expires_at` is in microseconds of the server's clock.
    pub fn acquire(&self, requests: &[AcquireRequest], expires_at: i64) -> Result<ScriptCall, InvalidName> {
        let [first, ..] = requests else { unreachable!("a call has a request") };
        let locks = self.locks(requests.iter().map(|request| &request.key))?;
        let mut call = self.call_of(&ACQUIRE, &locks, 5 + 4 * requests.len());
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

    /// One call for all renewals, and which of them it contains: an invalid name is omitted. On a
    /// Cluster several keys are in many slots, and none of them is declared.
    pub fn renew(&self, requests: &[RenewRequest]) -> (ScriptCall, Vec<bool>) {
        let mut call = ScriptCall::new(RENEW.of(Variant::default()));
        call.reserve(3 * requests.len());
        let locks: Vec<_> = requests.iter().map(|request| self.lock(&request.key).ok()).collect();
        let are_declared = self.node().is_none() || requests.len() == 1;
        if are_declared {
            locks.iter().flatten().for_each(|lock| call.key(lock));
        }
        for (request, _) in requests.iter().zip(&locks).filter(|(_, lock)| lock.is_some()) {
            call.arg(&request.id);
            call.arg(Ms(request.lease));
        }
        if !are_declared {
            locks.iter().flatten().for_each(|lock| call.arg(lock));
        }
        (call, locks.iter().map(Option::is_some).collect())
    }

    /// One call for these releases. Several of them have no records.
    pub fn release(&self, requests: &[ReleaseRequest]) -> Result<ScriptCall, InvalidName> {
        let [first, ..] = requests else { unreachable!("a call has a request") };
        let locks = self.locks(requests.iter().map(|request| &request.key))?;
        let mut call = self.call_of(&RELEASE, &locks, 4 + 3 * requests.len());
        call.arg(Ms(first.queue.offer_ttl));
        for request in requests {
            call.arg(&request.id);
            call.arg(Ms(request.block_for));
        }
        self.queues(&mut call, &locks);
        if let Some(NewRecord { record, keep_for }) = first.record.as_deref() {
            call.arg(self.record(locks[0]));
            call.arg(Ms(*keep_for));
            call.record(record);
        }
        Ok(call)
    }

    /// The call of a yield. `expires_at` is in microseconds of the server's clock.
    pub fn yield_to_queue(&self, request: &YieldRequest, expires_at: i64) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(&request.key)?;
        let mut call = self.call_of(&YIELD, &[lock], 11);
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
        let mut call = self.call_of(&FORCE, &[lock], 4);
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
        let mut call = ScriptCall::new(INSPECT.of(self.variant()));
        call.key(lock);
        self.node_args(&mut call);
        call.arg(self.inbox(""));
        call.arg(self.queue(lock));
        call.arg(self.record(lock));
        call
    }

    /// The call of a deletion of the record of a key.
    pub fn delete_record(&self, key: &LockKey) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(key)?;
        let mut call = ScriptCall::new(DELETE_RECORD.of(self.variant()));
        call.key(lock);
        self.node_args(&mut call);
        call.arg(self.record(lock));
        Ok(call)
    }

    /// The call of the self-test, on the lock with this name.
    pub fn self_test(&self, lock: &str, inbox: &str, message: &str) -> ScriptCall {
        let lock = lock.into();
        let mut call = ScriptCall::new(SELF_TEST.of(Variant::default()));
        call.key(lock);
        call.arg(self.fence(lock));
        call.arg(self.queue(lock));
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

    /// The call that gives this fence to a grant without one.
    pub fn complete(&self, key: &LockKey, id: &AcquisitionId, fence: u64) -> Result<ScriptCall, InvalidName> {
        let mut call = ScriptCall::new(COMPLETE.of(Variant::default()));
        call.key(self.lock(key)?);
        call.arg(id);
        call.arg(fence);
        Ok(call)
    }

    /// The call for the fence of a grant of this key. It is larger than `incomplete`, and than that
    /// of each grant before this call.
    pub fn next_fence(&self, key: &LockKey, incomplete: u64) -> Result<ScriptCall, InvalidName> {
        let mut call = ScriptCall::new(NEXT_FENCE.of(Variant::default()));
        call.key(self.fence(self.lock(key)?));
        call.arg(incomplete);
        Ok(call)
    }

    /// The call that reads the record of a key, without its lock.
    pub fn read_record(&self, key: &LockKey) -> Result<ScriptCall, InvalidName> {
        let mut call = ScriptCall::new(READ_RECORD.of(Variant::default()));
        call.key(self.record(self.lock(key)?));
        Ok(call)
    }

    /// The call that leaves the record of a release, without its lock.
    pub fn write_record(
        &self,
        key: &LockKey,
        id: &AcquisitionId,
        NewRecord { record, keep_for }: &NewRecord,
    ) -> Result<ScriptCall, InvalidName> {
        let mut call = ScriptCall::new(WRITE_RECORD.of(Variant::default()));
        call.key(self.record(self.lock(key)?));
        call.arg(id);
        call.arg(Ms(*keep_for));
        call.record(record);
        Ok(call)
    }

    /// The call that deletes the record of a key, without its lock: any, or only the one that this
    /// acquisition has left.
    pub fn delete_record_alone(
        &self,
        key: &LockKey,
        left_by: Option<&AcquisitionId>,
    ) -> Result<ScriptCall, InvalidName> {
        let mut call = ScriptCall::new(DELETE_RECORD_ALONE.of(Variant::default()));
        call.key(self.record(self.lock(key)?));
        if let Some(id) = left_by {
            call.arg(id);
        }
        Ok(call)
    }

    /// The call that removes an entry from the queue of a key, without its lock.
    pub fn leave_queue(&self, key: &LockKey, id: &AcquisitionId) -> Result<ScriptCall, InvalidName> {
        let mut call = ScriptCall::new(LEAVE_QUEUE.of(Variant::default()));
        call.key(self.queue(self.lock(key)?));
        call.arg(id);
        Ok(call)
    }

    /// The call that wakes the first waiter of a key, without its lock. The process of that waiter
    /// is subscribed at the node of these names.
    pub fn wake_queue(&self, key: &LockKey) -> Result<ScriptCall, InvalidName> {
        let lock = self.lock(key)?;
        let mut call = ScriptCall::new(WAKE_QUEUE.of(Variant::default()));
        call.key(self.queue(lock));
        call.arg(self.inbox(""));
        call.arg(lock);
        Ok(call)
    }

    /// A call with these locks, and with the fence as its first argument. That of one raw key is of
    /// the script for it, and begins with its names. `args` is the number of arguments to expect.
    fn call_of(&self, file: &'static ScriptFile, locks: &[LockName<'_>], args: usize) -> ScriptCall {
        let [first, ..] = locks else { unreachable!("a call has a lock") };
        let raw = if locks.len() == 1 { self.raw_names(*first) } else { None };
        let mut call = ScriptCall::new(file.of(Variant { is_raw: raw.is_some(), ..self.variant() }));
        call.reserve(locks.len() + args);
        for lock in locks {
            call.key(lock);
        }
        self.node_args(&mut call);
        if let Some(raw) = raw {
            call.arg(raw.channel);
            call.arg(raw.own_channel);
            call.arg(raw.reservation);
        }
        call.arg(self.fence(*first));
        call
    }

    fn variant(&self) -> Variant {
        Variant { is_raw: false, is_cluster: self.node().is_some() }
    }

    /// The arguments that `cluster.lua` removes.
    fn node_args(&self, call: &mut ScriptCall) {
        if let Some(node) = self.node() {
            call.arg(self.inbox(""));
            call.arg(u8::from(node.is_asking || node.id.is_empty()));
        }
    }

    fn queues(&self, call: &mut ScriptCall, locks: &[LockName<'_>]) {
        for lock in locks {
            call.arg(self.queue(*lock));
        }
    }
}

impl ScriptCall {
    fn record(&mut self, record: &Record) {
        self.data.push(record.head.clone());
        self.data.extend(record.body.clone().filter(|body| body.len() <= MAX_RECORD_BODY_BYTES));
    }

    fn queue_config(&mut self, queue: QueueConfig) {
        self.arg(Ms(queue.offer_ttl));
        self.arg(Ms(queue.entry_ttl));
        self.arg(queue.capacity);
    }
}

pub(super) fn if_busy(request: &AcquireRequest) -> &'static str {
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
