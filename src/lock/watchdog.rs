//! Renews what is held, and notices what is lost.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use tokio::{
    runtime::Handle,
    task::AbortHandle,
    time::{Instant, sleep_until, timeout},
};

use super::{
    hold::{Hold, Need},
    locks::Core,
};
use crate::{
    defaults::{LEASE, RENEWALS_PER_LEASE, STORE_TIMEOUT},
    lease::OwnerId,
    store::{LockStore, RenewAsk, Renewed},
};

/// One task for all holds of a [`Locks`](crate::Locks): it renews in batches, every third of a lease, and ends what is past its
/// deadline, whether the store answers or not (I5).
///
/// It is started by a hold that finds it not running, and goes when it has had nothing to watch for a while.
#[derive(Debug, Default)]
pub(super) struct Watchdog {
    watched: Mutex<Watched>,
}

#[derive(Debug, Default)]
struct Watched {
    holds: BTreeMap<u64, Arc<Hold>>,
    task: Option<AbortHandle>,
    /// When the task is to look again.
    next_look: Option<Instant>,
}

/// What it found when it looked.
struct Look {
    due: Vec<Arc<Hold>>,
    /// When to look again.
    next: Instant,
    /// Nothing was there to be watched.
    idle: bool,
}

impl Watchdog {
    /// From now on it is renewed.
    pub(super) fn watch(core: &Arc<Core>, hold: &Arc<Hold>, runtime: &Handle) {
        let mut watched = core.watchdog.watched();
        watched.holds.insert(hold.owner.number(), Arc::clone(hold));
        // It may have gone with the runtime it ran on, or that runtime may be one that nobody drives.
        let gone = watched.task.as_ref().is_none_or(AbortHandle::is_finished);
        let now = Instant::now();
        if gone || watched.next_look.is_some_and(|look| now > look + STORE_TIMEOUT) {
            let task = runtime.spawn(run(Arc::downgrade(core))).abort_handle();
            if let Some(stuck) = watched.task.replace(task) {
                stuck.abort();
            }
            watched.next_look = Some(now);
        }
    }

    /// Not renewed any more, from before it is given back.
    pub(super) fn forget(&self, owner: &OwnerId) {
        self.watched().holds.remove(&owner.number());
    }

    fn look(&self, now: Instant) -> Look {
        let mut look = Look { due: Vec::new(), next: now + LEASE / RENEWALS_PER_LEASE, idle: true };
        // Not under the mutex: what is over wakes whoever waits for that.
        let holds: Vec<_> = self.watched().holds.values().cloned().collect();
        for hold in holds {
            look.idle = false;
            match hold.need(now) {
                Need::Rest(until) => look.next = look.next.min(until),
                Need::Renewal(until) => {
                    look.next = look.next.min(until);
                    look.due.push(hold);
                }
                Need::Nothing => {}
            }
        }
        look
    }

    /// Whether there still is nothing to be watched; then the task is gone for whoever comes next.
    fn go(&self) -> bool {
        let mut watched = self.watched();
        if watched.holds.is_empty() {
            watched.task = None;
        }
        watched.task.is_none()
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        // No code of others runs under this mutex.
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn run(core: Weak<Core>) {
    let mut was_idle = false;
    loop {
        let next = {
            let Some(core) = core.upgrade() else { return };
            let look = core.watchdog.look(Instant::now());
            if look.idle && was_idle && core.watchdog.go() {
                return;
            }
            was_idle = look.idle;
            if !look.due.is_empty() {
                // In a task of its own: a store that is slow now does not delay the next look.
                Handle::current().spawn(renew(Arc::clone(&core.store), look.due));
            }
            core.watchdog.watched().next_look = Some(look.next);
            look.next
        };
        // A new hold is due a third of a lease from now, and nothing above is later than that.
        sleep_until(next).await;
    }
}

async fn renew(store: Arc<dyn LockStore>, due: Vec<Arc<Hold>>) {
    let asked = Instant::now(); // I3
    let asks: Vec<_> = due.iter().map(|hold| RenewAsk::new(&hold.key, &hold.owner, LEASE)).collect();
    let answers = timeout(STORE_TIMEOUT, store.renew(&asks)).await;
    // No answer: the next look asks again, until the deadline.
    if let Ok(Ok(answers)) = answers {
        for (hold, renewed) in due.iter().zip(answers) {
            match renewed {
                Renewed::Extended => hold.extend(asked, Instant::now()),
                Renewed::NotOwner => hold.lose(),
            }
        }
    }
    for hold in &due {
        hold.tell_if_late(Instant::now());
    }
}
