//! The task that renews locks, and ends those that are past their deadline.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::timeout;

use super::{
    driver::Driver,
    driver_data::Grant,
    renewal_turns::{RenewalTurns, Turn},
};
use crate::{
    error::LockLost,
    store::{RenewReply, RenewRequest, StoreError},
    telemetry::report::Report,
};

/// The watchdog of one manager. One task renews all of its grants in batches, every third of a
/// lease, and ends a grant at its deadline whether the store replies or not (I5).
///
/// It is started for the first grant, and ends when it has had nothing to do for a while.
struct Watchdog {
    driver: Weak<Driver>,
    /// The renewals at each server: a server that does not reply delays no other.
    turns: HashMap<usize, Arc<RenewalTurns>>,
    /// No grant was tracked. Another task may have been started since.
    has_stopped: bool,
}

/// Sends the renewals at one server, one call after another.
struct Caller {
    driver: Arc<Driver>,
    server: usize,
    turns: Arc<RenewalTurns>,
    is_done: bool,
}

/// A renewal that is in flight. When it is finished, or dropped with its runtime, grants that a
/// message has put in doubt since are verified.
struct RenewalCall {
    driver: Arc<Driver>,
    grants: Vec<Arc<Grant>>,
}

/// Starts the task, unless there is one. No mutex may be held: where no runtime lives, the task is
/// dropped at once.
pub(super) fn start(driver: &Arc<Driver>) {
    if driver.renewals.try_start(driver.clock.now()) {
        let watchdog = Watchdog { driver: Arc::downgrade(driver), turns: HashMap::new(), has_stopped: false };
        driver.spawn(watchdog.run());
        driver.share_wakeup();
    }
}

impl Watchdog {
    async fn run(mut self) {
        let Some(wakeup) = self.driver.upgrade().map(|driver| Arc::clone(&driver.renewals.wakeup)) else { return };
        let mut was_idle = false;
        while self.sweep(&mut was_idle).is_some() {
            // A wake-up moves the next sweep forward: mostly to a later instant than now.
            while let Some(left) = self.until_next_sweep() {
                let _ = timeout(left, wakeup.notified()).await;
            }
        }
    }

    /// `None`: the next sweep is due, or the manager no longer exists.
    fn until_next_sweep(&self) -> Option<Duration> {
        let driver = self.driver.upgrade()?;
        let left = driver.renewals.next_sweep().saturating_duration_since(driver.clock.now());
        (!left.is_zero()).then_some(left)
    }

    /// Returns `None` if the task ends.
    fn sweep(&mut self, was_idle: &mut bool) -> Option<()> {
        let driver = self.driver.upgrade()?;
        let sweep = driver.renewals.sweep(driver.clock.now(), driver.lease.longest);
        if sweep.is_idle && *was_idle && driver.renewals.try_stop() {
            self.has_stopped = true;
            return None;
        }
        *was_idle = sweep.is_idle;
        for grant in sweep.lost {
            driver.grant_lost(&grant, grant.end_reason().unwrap_or(LockLost::Expired));
        }
        for grant in sweep.checks {
            driver.check_section(&grant);
        }
        for grant in sweep.due {
            let turns = self.turns.entry(driver.store.server_of(&grant.key)).or_default();
            turns.push(driver.clock.now(), grant);
        }
        for (&server, turns) in &self.turns {
            for _ in 0..turns.missing_callers() {
                // In a task of its own: a slow store does not delay the next sweep.
                let caller = Caller { driver: Arc::clone(&driver), server, turns: Arc::clone(turns), is_done: false };
                driver.spawn(caller.run());
            }
        }
        Some(())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        let Some(driver) = self.driver.upgrade().filter(|_| !self.has_stopped) else { return };
        // Dropped with its runtime: the work under one of these grants starts another task.
        driver.watchdog_dropped();
    }
}

impl Caller {
    async fn run(mut self) {
        while let Some(Turn { grants, waited }) = self.turns.next(self.driver.clock.now()) {
            let Self { driver, server, turns, .. } = &self;
            driver.renewals.waited(*server, waited, driver.clock.now(), driver.lease.longest);
            renew(driver, turns, grants).await;
        }
        self.is_done = true;
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if !self.is_done {
            self.turns.caller_dropped();
        }
    }
}

async fn renew(driver: &Arc<Driver>, turns: &RenewalTurns, grants: Vec<Arc<Grant>>) {
    let call = RenewalCall { driver: Arc::clone(driver), grants };
    let sent_at = driver.clock.now(); // I3
    let grants = &call.grants;
    if !driver.is_of_this_process() {
        return;
    }
    // The leases of now: one may grow before the reply.
    let leases: Vec<_> = grants.iter().map(|grant| grant.lease()).collect();
    let request = |(grant, &lease): (&Arc<Grant>, _)| {
        RenewRequest::new(grant.key.clone(), grant.id.clone(), grant.store_lease(lease))
    };
    let requests = grants.iter().zip(&leases).map(request).collect();
    let replies = timeout(driver.lease.call_timeout, driver.store.renew(requests)).await;
    let replies = replies.unwrap_or_else(|_| Err(StoreError::no_reply("renew")));
    driver.record_reply("renew", &replies);
    let now = driver.clock.now();
    turns.replied_after(now.saturating_duration_since(sent_at));
    let mut margins = Vec::with_capacity(grants.len());
    // Without a reply the next sweep renews again, until the deadline.
    for ((grant, lease), reply) in grants.iter().zip(leases).zip(replies.unwrap_or_default()) {
        match reply {
            RenewReply::Extended | RenewReply::Superseded => {
                margins.push(grant.remaining(now));
                grant.extend(lease, sent_at, now);
                if reply == RenewReply::Superseded {
                    driver.superseded(grant);
                }
            }
            // The driver decides whether it was lost: a yield may have passed it on.
            RenewReply::NotHolder => driver.grant_lost(grant, LockLost::Revoked),
            RenewReply::Unknown => {}
        }
    }
    // Only counted, and one report for all: a held key costs little.
    if cfg!(feature = "metrics") {
        driver.report(Report::Renewed { margins });
    }
    for grant in grants {
        if grant.take_late_warning(driver.clock.now()) {
            driver.report(Report::RenewalLate { key: grant.key.clone(), fence: grant.fence() });
        }
    }
}

impl Drop for RenewalCall {
    fn drop(&mut self) {
        let now = self.driver.clock.now();
        for grant in &self.grants {
            if grant.renewal_finished(now) {
                self.driver.track(Arc::clone(grant));
            }
        }
    }
}
