//! The grants that the watchdog has to renew or to check, and when.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};

use tokio::sync::Notify;

use super::driver_data::Grant;
use crate::{
    clock::{BootInstant, Clock},
    limits::{
        LATE_RENEWALS_PAUSE, LATE_RENEWALS_PER_LEASE, RENEWAL_BATCH_WINDOW, RENEWAL_BATCH_WINDOWS_PER_LEASE,
        RENEWALS_PER_LEASE,
    },
    lock_key::shards::KeyShards,
    proto::grant::NextCheck,
    sync::Mutex,
};

/// The grants that are tracked, and the task that sweeps over them.
///
/// The atomics are sequentially consistent. A grant is inserted before they are read, and they are
/// written before a sweep looks for grants: so at least one side sees the other.
#[derive(Debug, Default)]
pub(super) struct RenewalQueue {
    tracked: KeyShards<Tracked>,
    /// The instant of the next sweep, in nanoseconds. `u64::MAX` during a sweep: each grant that
    /// is inserted meanwhile causes another one.
    next_sweep: AtomicU64,
    /// A task sweeps, or is about to start.
    has_task: AtomicBool,
    /// Until this instant, in nanoseconds, renewals count as late at one of the servers at least.
    late_until: AtomicU64,
    /// The same for each server at which they were late.
    late_servers: Mutex<HashMap<usize, BootInstant>>,
    /// Notified when a grant needs a sweep earlier than the next one that is planned.
    pub(super) wakeup: Arc<Notify>,
}

/// The grants of one shard, each with the instant at which it needs a sweep, in no order: most of
/// them end before that, and each sweep looks at all instants.
#[derive(Debug, Default)]
struct Tracked(Vec<(BootInstant, Arc<Grant>)>);

/// What the caller of [`RenewalQueue::insert`] has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inserted {
    /// Nothing.
    Planned,
    /// The task was woken for an earlier sweep.
    Woken,
    /// No task sweeps: one has to be started.
    NeedsTask,
}

/// The result of a sweep.
pub(super) struct Sweep {
    /// To be renewed.
    pub(super) due: Vec<Arc<Grant>>,
    /// Ended.
    pub(super) lost: Vec<Arc<Grant>>,
    /// Whose section has to be checked.
    pub(super) checks: Vec<Arc<Grant>>,
    /// No grant is tracked or has ended.
    pub(super) is_idle: bool,
}

impl RenewalQueue {
    /// Tracks a grant from now on, or plans its next sweep anew.
    pub(super) fn insert(&self, grant: Arc<Grant>) -> Inserted {
        let at = grant.next_check_at();
        {
            let mut tracked = self.tracked.of(&grant.key).lock();
            if grant.end_reason().is_some() {
                // Released meanwhile on another thread.
                return Inserted::Planned;
            }
            tracked.remove(&grant);
            tracked.insert(grant, at);
        }
        let next_sweep = self.next_sweep();
        if !self.has_task.load(SeqCst) {
            Inserted::NeedsTask
        } else if at < next_sweep {
            self.next_sweep.fetch_min(at.as_nanos(), SeqCst);
            self.wakeup.notify_one();
            Inserted::Woken
        } else {
            Inserted::Planned
        }
    }

    /// Stops tracking a grant, before it is released.
    pub(super) fn remove(&self, grant: &Grant) {
        self.tracked.of(&grant.key).lock().remove(grant);
    }

    /// All tracked grants.
    pub(super) fn grants(&self) -> Vec<Arc<Grant>> {
        let mut grants = Vec::new();
        for tracked in self.tracked.iter() {
            grants.extend(tracked.lock().0.iter().map(|(_, grant)| Arc::clone(grant)));
        }
        grants
    }

    fn is_empty(&self) -> bool {
        self.tracked.iter().all(|tracked| tracked.lock().0.is_empty())
    }

    pub(super) fn next_sweep(&self) -> BootInstant {
        BootInstant::from_nanos(self.next_sweep.load(SeqCst))
    }

    /// Notes how long a renewal has waited for its turn at a server.
    pub(super) fn waited(&self, server: usize, duration: Duration, now: BootInstant, lease: Duration) {
        if duration > lease / LATE_RENEWALS_PER_LEASE {
            let until = now.saturating_add(LATE_RENEWALS_PAUSE);
            self.late_servers.lock().insert(server, until);
            self.late_until.fetch_max(until.as_nanos(), SeqCst);
        }
    }

    /// Whether renewals wait too long for their turn: the server has no capacity for more keys.
    pub(super) fn are_late(&self, clock: &Clock, server: impl FnOnce() -> usize) -> bool {
        let until = self.late_until.load(SeqCst);
        // Mostly none is, and the server need not be known.
        if until == 0 {
            return false;
        }
        let (now, server) = (clock.now(), server());
        now < BootInstant::from_nanos(until) && self.late_servers.lock().get(&server).is_some_and(|until| now < *until)
    }

    /// Whether grants are tracked and no task sweeps over them.
    pub(super) fn lacks_task(&self) -> bool {
        !self.has_task.load(SeqCst) && !self.is_empty()
    }

    /// Whether the caller has to start a task. It then counts as started.
    pub(super) fn try_start(&self, now: BootInstant) -> bool {
        let starts = !self.has_task.swap(true, SeqCst);
        if starts {
            self.next_sweep.store(now.as_nanos(), SeqCst);
        }
        starts
    }

    /// Notes that the task was dropped with its runtime.
    pub(super) fn task_dropped(&self) {
        self.has_task.store(false, SeqCst);
    }

    /// Whether the task ends, because no grant is tracked.
    pub(super) fn try_stop(&self) -> bool {
        self.has_task.store(false, SeqCst);
        // A grant that was inserted meanwhile has started another task, or this one goes on.
        self.is_empty() || self.has_task.swap(true, SeqCst)
    }

    /// Takes the grants that need something now, and plans the others.
    pub(super) fn sweep(&self, now: BootInstant, lease: Duration) -> Sweep {
        let soon = now.saturating_add(RENEWAL_BATCH_WINDOW.min(lease / RENEWAL_BATCH_WINDOWS_PER_LEASE));
        let mut sweep = Sweep { due: Vec::new(), lost: Vec::new(), checks: Vec::new(), is_idle: true };
        let mut next = now.saturating_add(lease / RENEWALS_PER_LEASE);
        self.next_sweep.store(u64::MAX, SeqCst);
        for tracked in self.tracked.iter() {
            let due = tracked.lock().take_until(soon);
            let planned: Vec<_> = due.into_iter().filter_map(|(_, grant)| sweep.check(grant, now, soon)).collect();
            let mut tracked = tracked.lock();
            for (until, grant) in planned {
                // A grant that was released meanwhile is not tracked again, and one that was
                // tracked meanwhile is planned already.
                if grant.end_reason().is_none() && grant.data.place.load(Relaxed) == 0 {
                    tracked.insert(grant, until);
                }
            }
            if let Some(first) = tracked.first_at() {
                sweep.is_idle = false;
                next = next.min(first);
            }
        }
        // The checks may track their grants again.
        sweep.is_idle &= sweep.lost.is_empty() && sweep.checks.is_empty();
        self.next_sweep.fetch_min(next.as_nanos(), SeqCst);
        sweep
    }
}

impl Drop for RenewalQueue {
    fn drop(&mut self) {
        // The task ends now instead of at its next sweep.
        self.wakeup.notify_one();
    }
}

impl Sweep {
    /// Checks a grant that is due. Returns the instant of its next sweep.
    fn check(&mut self, grant: Arc<Grant>, now: BootInstant, soon: BootInstant) -> Option<(BootInstant, Arc<Grant>)> {
        match grant.next_check(now, soon) {
            NextCheck::Sleep(until) => return Some((until, grant)),
            NextCheck::Renew(until) => {
                self.due.push(Arc::clone(&grant));
                return Some((until, grant));
            }
            // Not ended here: another section may run under it by now.
            NextCheck::CheckSection => self.checks.push(grant),
            NextCheck::Ended => self.lost.push(grant),
        }
        None
    }
}

impl Tracked {
    fn insert(&mut self, grant: Arc<Grant>, at: BootInstant) {
        self.0.push((at, grant));
        self.set_place(self.0.len() - 1);
    }

    fn remove(&mut self, grant: &Grant) {
        if let Some(index) = grant.data.place.swap(0, Relaxed).checked_sub(1) {
            self.0.swap_remove(index);
            self.set_place(index);
        }
    }

    fn set_place(&self, index: usize) {
        if let Some((_, grant)) = self.0.get(index) {
            grant.data.place.store(index + 1, Relaxed);
        }
    }

    fn take_until(&mut self, end: BootInstant) -> Vec<(BootInstant, Arc<Grant>)> {
        let due: Vec<_> = self.0.iter().filter(|(at, _)| *at <= end).cloned().collect();
        for (_, grant) in &due {
            self.remove(grant);
        }
        due
    }

    /// The instant of the next sweep.
    fn first_at(&self) -> Option<BootInstant> {
        self.0.iter().map(|(at, _)| *at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{acquisition::AcquisitionIds, fencing::FencingToken, lock::driver_data::Section, lock_key::LockKey};

    const START: BootInstant = BootInstant::from_nanos(1 << 40);

    #[test]
    fn grants_are_taken_when_they_are_due_in_any_order_of_insertion() {
        let ids = AcquisitionIds::new("test", 1);
        let token = FencingToken::from_fence(1).expect("small");
        let grant = |_| Arc::clone(&Section::detached(LockKey::from(("n", 1)), token, ids.next()).grant);
        let at = |ms| START.saturating_add(Duration::from_millis(ms));
        let (mut tracked, [a, b, c, d]) = (Tracked::default(), std::array::from_fn(grant));
        for (grant, ms) in [(&a, 20), (&b, 30), (&c, 10), (&d, 40)] {
            tracked.insert(Arc::clone(grant), at(ms));
        }
        tracked.remove(&a);
        assert_eq!(tracked.first_at(), Some(at(10)));
        tracked.remove(&a);
        let mut taken = tracked.take_until(at(30));
        taken.sort_unstable_by_key(|(at, _)| *at);
        assert!(taken.len() == 2 && Arc::ptr_eq(&taken[0].1, &c) && Arc::ptr_eq(&taken[1].1, &b));
        tracked.remove(&b);
        assert_eq!((tracked.first_at(), tracked.0.len()), (Some(at(40)), 1));
        tracked.remove(&d);
        assert_eq!(tracked.first_at(), None);
    }
}
