//! Keys that the store grants without a call: the server is memory of each process.

use std::{cell::RefCell, fmt, slice};

use tower_lock::{
    __internals::{
        proto::{FreeKeys, STORE_CALL_TIMEOUT},
        redis_wire::{Timed, parse_acquire, parse_release},
    },
    store::{AcquireReply, AcquireRequest, IfBusy, ReleaseReply, ReleaseRequest},
    trace::SectionTrace,
};

use super::*;

/// The server, during an event of this process.
struct Server<'a> {
    simulation: RefCell<&'a mut Simulation>,
    process: usize,
}

impl Simulation {
    /// Passes an event to a process. For some events, the server grants and frees keys at once.
    pub(super) fn event<T>(
        &mut self,
        index: usize,
        event: impl FnOnce(&mut SimProcess, Option<&dyn FreeKeys>) -> T,
    ) -> T {
        let is_paused = self.paused_until > self.now;
        if !self.free_keys.as_mut().is_some_and(fastrand::Rng::bool) || is_paused {
            return event(&mut self.processes[index].process, None);
        }
        let mut process =
            std::mem::replace(&mut self.processes[index].process, SimProcess::new("away", 0, self.settings));
        let server = Server { simulation: RefCell::new(self), process: index };
        let result = event(&mut process, Some(&server));
        self.processes[index].process = process;
        result
    }

    pub(super) fn guard_ended(&mut self, process: usize, section: &Arc<Section>, ending: GuardEnd) {
        let now = self.local(process);
        self.note_end_of_step(process, section, &ending);
        self.event(process, |process, free_keys| process.guard_ended(now, section, ending, free_keys));
    }

    fn position(&self, key: &LockKey) -> usize {
        self.keys.iter().position(|ours| ours == key).expect("ours")
    }

    fn acquire_free(&mut self, process: usize, request: &AcquireRequest) -> Option<u64> {
        let at = self.position(&request.key);
        let KeyData { holders, queue } = self.key_data(at);
        let (lock, waiters) = (self.locks[at].clone(), format!("tower-lock:lock:q:{{{}}}", self.locks[at]));
        let is_blocked = !holders.is_empty() && holders.iter().all(|(id, _)| id.ends_with(":end"));
        let is_unheld = holders.is_empty() || is_blocked && self.is(Mutation::FreeDespiteBlock);
        let is_unqueued = queue.is_empty() || self.is(Mutation::FreeDespiteQueue);
        if !is_unheld || !is_unqueued || self.has_other_type(at) {
            return None;
        }
        if let Some(passed) = queue.iter().find(|id| self.is_subscribed(id)) {
            self.report_violation(format!("a free key lets {} past {passed}", request.id));
        }
        // Only a mutant has to remove them.
        self.fake.command(&["DEL", &lock, &waiters]);
        let script = self.names.acquire(slice::from_ref(request), 1 << 52).expect("a valid name");
        let reply = self.execute(Some(process), &script);
        for id in &queue {
            self.fake.command(&["RPUSH", &waiters, id]);
        }
        match parse_acquire(&reply, 1) {
            Ok((_, Timed::Done(replies))) if let [Ok(AcquireReply::Granted { fence, .. })] = replies[..] => Some(fence),
            reply => panic!("the key is free: {reply:?}"),
        }
    }

    fn release_free(&mut self, process: usize, request: &ReleaseRequest) -> bool {
        let KeyData { holders, queue } = self.key_data(self.position(&request.key));
        let is_held = matches!(&holders[..], [(id, _)] if *id == request.id.to_string());
        if !is_held || !queue.is_empty() {
            return false;
        }
        let script = self.names.release(slice::from_ref(request)).expect("a valid name");
        let reply = self.execute(Some(process), &script);
        let replies = parse_release(&reply, 1).expect("a reply");
        assert!(matches!(replies[..], [Ok(ReleaseReply::Freed)]), "{replies:?}");
        true
    }
}

impl FreeKeys for Server<'_> {
    fn acquire(&self, key: &LockKey, id: &AcquisitionId, lease: Duration, _: Option<&SectionTrace>) -> Option<u64> {
        let mut simulation = self.simulation.borrow_mut();
        let lease = if simulation.settings.bare { lease.saturating_sub(LOCK_DELAY) } else { lease };
        let request = AcquireRequest::new(key.clone(), id.clone(), lease, IfBusy::Fail, QUEUE, STORE_CALL_TIMEOUT);
        simulation.acquire_free(self.process, &request)
    }

    fn release(&self, key: &LockKey, id: &AcquisitionId) -> bool {
        let request = ReleaseRequest::new(key.clone(), id.clone(), Duration::ZERO, QUEUE);
        self.simulation.borrow_mut().release_free(self.process, &request)
    }
}

impl fmt::Debug for Server<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Server")
    }
}
