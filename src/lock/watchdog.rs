//! Renews what is held, and notices what is lost.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::Ordering::{Acquire, Release},
    },
    time::Duration,
};

use tokio::{sync::Notify, task::AbortHandle, time::timeout};

use super::{driver::Driver, driver_data::Grant};
use crate::{
    clock::BootInstant,
    error::LockLost,
    limits::{MAX_RENEWALS_PER_CALL, RENEWAL_BATCH_WINDOW, RENEWAL_BATCH_WINDOWS_PER_LEASE, RENEWALS_PER_LEASE},
    proto::grant::NextCheck,
    store::{RenewReply, RenewRequest, StoreError, StoreErrorKind},
    sync::Mutex,
    telemetry::reports::Report,
};

/// One task for all grants of a [`LockManager`](crate::LockManager): it renews in batches, every third of a lease, and ends what is past its
/// deadline or its limit, whether the store answers or not (I5).
///
/// It is started by a grant that finds it not running, and goes when it has had nothing to watch for a while.
#[derive(Debug, Default)]
pub(super) struct Watchdog {
    queue: Mutex<RenewalQueue>,
    /// Something is to be looked at before the next look.
    wakeup: Arc<Notify>,
}

#[derive(Debug, Default)]
struct RenewalQueue {
    /// By the moment in which they need something.
    grants: BTreeMap<(BootInstant, u64), Arc<Grant>>,
    task: Option<AbortHandle>,
    /// Which one that is: earlier ones may end later.
    number: u64,
    /// When the task is to look again.
    next_sweep: Option<BootInstant>,
}

/// What it found when it looked.
struct Sweep {
    due: Vec<Arc<Grant>>,
    lost: Vec<Arc<Grant>>,
    limits: Vec<Arc<Grant>>,
    /// When to look again.
    next: BootInstant,
    /// Nothing is there to be watched.
    idle: bool,
}

impl Watchdog {
    /// From now on it is renewed, and looked at when it needs it.
    pub(super) fn track(core: &Arc<Driver>, grant: &Arc<Grant>) {
        let mut watched = core.watchdog.queue.lock();
        if grant.end_reason().is_some() {
            // Given back in the meantime, by somebody on another thread.
            return;
        }
        watched.remove(grant);
        let at = watched.insert(grant, grant.next_check_at());
        // It may have gone with the runtime it ran on, or that runtime may be one that nobody drives.
        let gone = watched.task.as_ref().is_none_or(AbortHandle::is_finished);
        let now = core.clock.now();
        if gone || watched.next_sweep.is_some_and(|look| now > look.saturating_add(core.store_timeout())) {
            drop(watched);
            Self::start(core);
        } else if watched.next_sweep.is_some_and(|look| at < look) {
            watched.next_sweep = Some(at);
            drop(watched);
            core.watchdog.wakeup.notify_one();
            Self::share_wakeup(core);
        }
    }

    /// A task that was woken from a worker is the next one of that worker, and no other one takes it from there: a recorder or a handler that
    /// blocks right now would keep back all renewals. One more task behind it puts it where everybody takes from.
    fn share_wakeup(core: &Arc<Driver>) {
        core.spawn(async {});
    }

    /// A message says that it is over: the store is asked as soon as that is allowed.
    pub(super) fn verify(core: &Arc<Driver>, grant: &Arc<Grant>) {
        if grant.verify(core.clock.now()) {
            Self::track(core, grant);
        }
    }

    /// Somebody who works under a grant was woken for nothing: the runtime of the task may have ended.
    pub(super) fn ensure_running(core: &Arc<Driver>) {
        let watched = core.watchdog.queue.lock();
        if !watched.grants.is_empty() && watched.task.as_ref().is_none_or(AbortHandle::is_finished) {
            drop(watched);
            Self::start(core);
        }
    }

    /// Not under the mutex: where no runtime lives the task is dropped at once, and says so.
    fn start(core: &Arc<Driver>) {
        let mut watched = core.watchdog.queue.lock();
        watched.number += 1;
        let number = watched.number;
        watched.next_sweep = Some(core.clock.now());
        drop(watched);
        let task = Task { core: Arc::downgrade(core), number };
        let started = core.spawn(run(task, Arc::clone(&core.watchdog.wakeup)));
        let mut watched = core.watchdog.queue.lock();
        let is_newest = watched.number == number;
        let superseded = if is_newest { std::mem::replace(&mut watched.task, started) } else { started };
        drop(watched);
        if let Some(superseded) = superseded {
            superseded.abort();
        }
        Self::share_wakeup(core);
    }

    /// Not renewed any more, from before it is given back.
    pub(super) fn untrack(&self, grant: &Grant) {
        self.queue.lock().remove(grant);
    }

    /// All that is held.
    #[cfg(feature = "signal")]
    pub(super) fn grants(&self) -> Vec<Arc<Grant>> {
        self.queue.lock().grants.values().cloned().collect()
    }

    /// This process is a copy of the one that has these grants: here they are over, and nothing is
    /// sent for them.
    pub(super) fn abandon(&self) {
        // A thread of the parent may have held the mutex at the fork, and would never unlock it
        // here. Then the grants are over here at their deadlines, because nothing extends them.
        let Some(watched) = self.queue.try_lock() else { return };
        let grants: Vec<_> = watched.grants.values().cloned().collect();
        drop(watched);
        for grant in grants {
            grant.end(LockLost::Expired);
            grant.data.ended.notify_waiters();
        }
    }

    fn sweep(&self, now: BootInstant, lease: Duration) -> Sweep {
        let soon = now.saturating_add(RENEWAL_BATCH_WINDOW.min(lease / RENEWAL_BATCH_WINDOWS_PER_LEASE));
        let mut look = Sweep {
            due: Vec::new(),
            lost: Vec::new(),
            limits: Vec::new(),
            next: now.saturating_add(lease / RENEWALS_PER_LEASE),
            idle: true,
        };
        // Not under the mutex: what is over wakes whoever waits for that.
        let needy: Vec<_> = self.queue.lock().take_until(soon);
        let mut again = Vec::with_capacity(needy.len());
        for grant in needy {
            match grant.next_check(now, soon) {
                NextCheck::Sleep(until) => again.push((until, grant)),
                NextCheck::Renew(until) => {
                    again.push((until, Arc::clone(&grant)));
                    look.due.push(grant);
                }
                // Not ended here: by now another section may run under it.
                NextCheck::CheckSection => look.limits.push(grant),
                NextCheck::Ended => look.lost.push(grant),
            }
        }
        let mut watched = self.queue.lock();
        for (until, grant) in again {
            // Given back meanwhile, it must not come back.
            if grant.end_reason().is_none() {
                watched.insert(&grant, until);
            }
        }
        if let Some(((first, _), _)) = watched.grants.first_key_value() {
            look.idle = false;
            look.next = look.next.min(*first);
        }
        watched.next_sweep = Some(look.next);
        look
    }

    /// Whether there still is nothing to be watched; then the task is gone for whoever comes next.
    fn try_stop(&self) -> bool {
        let mut watched = self.queue.lock();
        if watched.grants.is_empty() {
            watched.task = None;
        }
        watched.task.is_none()
    }
}

impl RenewalQueue {
    /// Zero says that it is in no list; no moment of a running clock is.
    fn insert(&mut self, grant: &Arc<Grant>, at: BootInstant) -> BootInstant {
        grant.data.listed_at.store(at.as_nanos(), Release);
        self.grants.insert((at, grant.id.sequence()), Arc::clone(grant));
        at
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

/// The task of a watchdog. Dropped with its runtime, it wakes all who work under a grant: one of them starts another.
struct Task {
    core: Weak<Driver>,
    number: u64,
}

impl Drop for Task {
    fn drop(&mut self) {
        let Some(core) = self.core.upgrade() else { return };
        let mut watched = core.watchdog.queue.lock();
        if watched.number != self.number {
            return;
        }
        watched.task = None;
        let grants: Vec<_> = watched.grants.values().cloned().collect();
        drop(watched);
        for grant in grants {
            grant.data.ended.notify_waiters();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // Its task has nothing more to look for, and need not sleep on to find that out.
        self.wakeup.notify_one();
    }
}

async fn run(task: Task, earlier: Arc<Notify>) {
    let Task { core, .. } = &task;
    let mut was_idle = false;
    loop {
        let left = {
            let Some(core) = core.upgrade() else { return };
            let look = core.watchdog.sweep(core.clock.now(), core.lease);
            if look.idle && was_idle && core.watchdog.try_stop() {
                return;
            }
            was_idle = look.idle;
            for grant in look.lost {
                core.grant_lost(&grant.key, &grant.id, grant.end_reason().unwrap_or(LockLost::Expired));
            }
            for grant in look.limits {
                core.check_section(&grant);
            }
            for due in look.due.chunks(MAX_RENEWALS_PER_CALL) {
                // In a task of its own: a store that is slow now does not delay the next look.
                core.spawn(renew(Arc::clone(&core), due.to_vec()));
            }
            look.next.saturating_duration_since(core.clock.now())
        };
        let _ = timeout(left, earlier.notified()).await;
    }
}

async fn renew(core: Arc<Driver>, due: Vec<Arc<Grant>>) {
    let asking = RenewalCall { core: Arc::clone(&core), due };
    let due = &asking.due;
    if !core.is_of_this_process() {
        return;
    }
    let asked = core.clock.now(); // I3
    // As they are now: a lease may grow before the answer comes.
    let leases: Vec<_> = due.iter().map(|grant| grant.lease()).collect();
    let ask = |(grant, &lease): (&Arc<Grant>, _)| {
        RenewRequest::new(grant.key.clone(), grant.id.clone(), grant.store_lease(lease))
    };
    let asks = due.iter().zip(&leases).map(ask).collect();
    let answers = timeout(core.call_timeout, core.store.renew(asks)).await;
    let answers = answers.unwrap_or_else(|_| Err(StoreError::new("lock", "renew", StoreErrorKind::Timeout)));
    core.record_reply("renew", &answers);
    let now = core.clock.now();
    // No answer: the next look asks again, until the deadline.
    for ((grant, lease), renewed) in due.iter().zip(leases).zip(answers.unwrap_or_default()) {
        match renewed {
            RenewReply::Extended => {
                core.report(Report::Renewed { margin: grant.remaining(now) });
                grant.extend(lease, asked, now);
            }
            // Ended there and not here: during a yield it may have gone in order.
            RenewReply::NotHolder => core.grant_lost(&grant.key, &grant.id, LockLost::Revoked),
            RenewReply::Unknown => {}
        }
    }
    for grant in due {
        if grant.take_late_warning(core.clock.now()) {
            core.report(Report::RenewalLate { fence: grant.fence() });
        }
    }
}

/// A renewal that is under way. When it is over, or dropped with its runtime, what was doubted since is asked about.
struct RenewalCall {
    core: Arc<Driver>,
    due: Vec<Arc<Grant>>,
}

impl Drop for RenewalCall {
    fn drop(&mut self) {
        let now = self.core.clock.now();
        for grant in &self.due {
            if grant.renewal_finished(now) {
                Watchdog::track(&self.core, grant);
            }
        }
    }
}
