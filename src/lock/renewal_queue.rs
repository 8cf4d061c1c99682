//! The grants that the watchdog has to renew or to check, ordered by when.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Release},
    },
    time::Duration,
};

use tokio::{sync::Notify, task::AbortHandle};

use super::driver_data::Grant;
use crate::{
    clock::BootInstant,
    error::LockLost,
    limits::{RENEWAL_BATCH_WINDOW, RENEWAL_BATCH_WINDOWS_PER_LEASE, RENEWALS_PER_LEASE},
    proto::grant::NextCheck,
    sync::Mutex,
};

/// The grants that are tracked, and the task that sweeps over them.
#[derive(Debug, Default)]
pub(super) struct RenewalQueue {
    state: Mutex<State>,
    /// Notified when a grant needs a sweep earlier than the next one that is planned.
    pub(super) wakeup: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    /// By the instant at which they need a sweep.
    grants: BTreeMap<(BootInstant, u64), Arc<Grant>>,
    task: Option<AbortHandle>,
    /// The number of the newest task. Earlier ones may end later.
    task_number: u64,
    next_sweep: Option<BootInstant>,
}

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
    /// When to sweep again.
    pub(super) next: BootInstant,
    /// No grant is tracked.
    pub(super) is_idle: bool,
}

impl RenewalQueue {
    /// Tracks a grant from now on, or plans its next sweep anew.
    pub(super) fn insert(&self, grant: &Arc<Grant>, now: BootInstant, store_timeout: Duration) -> Inserted {
        let mut state = self.state.lock();
        if grant.end_reason().is_some() {
            // Released meanwhile on another thread.
            return Inserted::Planned;
        }
        state.remove(grant);
        let at = grant.next_check_at();
        state.insert(grant, at);
        // The task may have ended with its runtime, or its runtime may be one that nothing drives.
        let is_late = state.next_sweep.is_some_and(|sweep| now > sweep.saturating_add(store_timeout));
        if is_late || !state.has_task() {
            Inserted::NeedsTask
        } else if state.next_sweep.is_some_and(|sweep| at < sweep) {
            state.next_sweep = Some(at);
            drop(state);
            self.wakeup.notify_one();
            Inserted::Woken
        } else {
            Inserted::Planned
        }
    }

    /// Stops tracking a grant, before it is released.
    pub(super) fn remove(&self, grant: &Grant) {
        self.state.lock().remove(grant);
    }

    /// All grants that are tracked.
    #[cfg(feature = "signal")]
    pub(super) fn grants(&self) -> Vec<Arc<Grant>> {
        self.state.lock().grants()
    }

    /// Whether grants are tracked and no task sweeps over them.
    pub(super) fn lacks_task(&self) -> bool {
        let state = self.state.lock();
        !state.grants.is_empty() && !state.has_task()
    }

    /// The number of a task that is about to be started.
    pub(super) fn next_task(&self, now: BootInstant) -> u64 {
        let mut state = self.state.lock();
        state.task_number += 1;
        state.next_sweep = Some(now);
        state.task_number
    }

    /// Notes that this task was started, and stops the one that it replaces.
    pub(super) fn task_started(&self, number: u64, task: Option<AbortHandle>) {
        let mut state = self.state.lock();
        let is_newest = state.task_number == number;
        let superseded = if is_newest { std::mem::replace(&mut state.task, task) } else { task };
        drop(state);
        if let Some(superseded) = superseded {
            superseded.abort();
        }
    }

    /// Notes that this task has ended with its runtime. Returns the grants that lost their task.
    pub(super) fn task_ended(&self, number: u64) -> Vec<Arc<Grant>> {
        let mut state = self.state.lock();
        if state.task_number != number {
            return Vec::new();
        }
        state.task = None;
        state.grants()
    }

    /// Lets the task end if no grant is tracked. Returns whether it may end.
    pub(super) fn try_stop(&self) -> bool {
        let mut state = self.state.lock();
        if state.grants.is_empty() {
            state.task = None;
        }
        state.task.is_none()
    }

    /// Ends all grants in this process, a forked child, without a call to the store: they belong to
    /// the parent.
    pub(super) fn abandon(&self) {
        // A thread of the parent may have held the mutex at the fork, and would never unlock it
        // here. Then the grants end at their deadlines, because nothing extends them.
        let Some(state) = self.state.try_lock() else { return };
        let grants = state.grants();
        drop(state);
        for grant in grants {
            grant.end(LockLost::Expired);
            grant.data.ended.notify_waiters();
        }
    }

    /// Takes the grants that need something now, and plans the others.
    pub(super) fn sweep(&self, now: BootInstant, lease: Duration) -> Sweep {
        let soon = now.saturating_add(RENEWAL_BATCH_WINDOW.min(lease / RENEWAL_BATCH_WINDOWS_PER_LEASE));
        let mut sweep = Sweep {
            due: Vec::new(),
            lost: Vec::new(),
            checks: Vec::new(),
            next: now.saturating_add(lease / RENEWALS_PER_LEASE),
            is_idle: true,
        };
        let due = self.state.lock().take_until(soon);
        let mut planned = Vec::with_capacity(due.len());
        for grant in due {
            match grant.next_check(now, soon) {
                NextCheck::Sleep(until) => planned.push((until, grant)),
                NextCheck::Renew(until) => {
                    planned.push((until, Arc::clone(&grant)));
                    sweep.due.push(grant);
                }
                // Not ended here: another section may run under it by now.
                NextCheck::CheckSection => sweep.checks.push(grant),
                NextCheck::Ended => sweep.lost.push(grant),
            }
        }
        let mut state = self.state.lock();
        for (until, grant) in planned {
            // A grant that was released meanwhile is not tracked again.
            if grant.end_reason().is_none() {
                state.insert(&grant, until);
            }
        }
        if let Some(((first, _), _)) = state.grants.first_key_value() {
            sweep.is_idle = false;
            sweep.next = sweep.next.min(*first);
        }
        state.next_sweep = Some(sweep.next);
        sweep
    }
}

impl Drop for RenewalQueue {
    fn drop(&mut self) {
        // The task ends now instead of at its next sweep.
        self.wakeup.notify_one();
    }
}

impl State {
    fn has_task(&self) -> bool {
        self.task.as_ref().is_some_and(|task| !task.is_finished())
    }

    fn grants(&self) -> Vec<Arc<Grant>> {
        self.grants.values().cloned().collect()
    }

    /// Zero means that a grant is not listed. It is no instant of a running clock.
    fn insert(&mut self, grant: &Arc<Grant>, at: BootInstant) {
        grant.data.listed_at.store(at.as_nanos(), Release);
        self.grants.insert((at, grant.id.sequence()), Arc::clone(grant));
    }

    fn remove(&mut self, grant: &Grant) {
        let at = grant.data.listed_at.swap(0, Acquire);
        if at != 0 {
            self.grants.remove(&(BootInstant::from_nanos(at), grant.id.sequence()));
        }
    }

    fn take_until(&mut self, end: BootInstant) -> Vec<Arc<Grant>> {
        let later = self.grants.split_off(&(end, u64::MAX));
        let taken: Vec<_> = std::mem::replace(&mut self.grants, later).into_values().collect();
        for grant in &taken {
            grant.data.listed_at.store(0, Release);
        }
        taken
    }
}
