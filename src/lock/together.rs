//! Events of several keys, whose store calls are made together.
//!
//! The keys of one caller are requested and released in one step: a store with shared calls gets
//! one call for all of them, however many workers the runtime has.

use std::sync::Arc;

use super::{
    driver::Driver,
    driver_data::{Section, TokioDriver, Waiter},
};
use crate::{
    clock::LazyNow,
    lock_key::LockKey,
    proto::{
        Actions, EventContext, GuardEnd, LockRequest, Requested,
        calls::{Calls, Numbered},
        section::ReleaseOutcome,
        table::LockTable,
    },
    store::{AcquireRequest, ReleaseRequest, StoreError},
};

/// The calls of several keys.
#[derive(Default)]
struct Together {
    releases: OfKeys<ReleaseRequest>,
    acquires: OfKeys<AcquireRequest>,
}

/// Requests of several keys, and where their replies go: the key, and the number of the request.
struct OfKeys<T> {
    targets: Vec<(LockKey, u64)>,
    requests: Vec<T>,
}

impl Driver {
    /// Requests locks of different keys.
    pub(super) fn request_all(
        self: &Arc<Self>,
        requests: Vec<(LockKey, LockRequest<()>)>,
    ) -> Vec<Result<Requested<TokioDriver>, StoreError>> {
        self.rearm_lost_timers();
        self.together(|together| {
            let mut send = |(key, request): (LockKey, LockRequest<()>)| {
                self.check_request(&key)?;
                let request = request.map_waiter(|()| Waiter::default);
                let requested =
                    together.event(self, &key, |table, cx, actions| table.request(&key, cx, request, actions));
                self.track_granted(&requested);
                Ok(requested)
            };
            requests.into_iter().map(&mut send).collect()
        })
    }

    /// Ends guards of different keys in the same way, in this order. Returns their outcomes, as
    /// [`end_guard`](Self::end_guard) does.
    pub(super) fn end_guards<'a>(
        self: &Arc<Self>,
        sections: impl Iterator<Item = &'a Arc<Section>>,
        end: &GuardEnd,
    ) -> Vec<Option<ReleaseOutcome>> {
        if !self.is_of_this_process() {
            return sections.map(|section| Some(Self::end_copy(section))).collect();
        }
        self.together(|together| {
            let end_one = |section: &Arc<Section>| {
                let key = &section.grant.key;
                let end = end.clone();
                let outcome =
                    together.event(self, key, |table, cx, actions| table.end_guard(cx, section, end, actions));
                self.untrack_freed(section, outcome);
                outcome
            };
            sections.map(end_one).collect()
        })
    }

    /// Runs a function that passes events to several keys, and makes their calls.
    fn together<T>(self: &Arc<Self>, events: impl FnOnce(&mut Together) -> T) -> T {
        let mut together = Together::default();
        let result = events(&mut together);
        let Together { releases, acquires } = together;
        if self.is_of_this_process() {
            // As for one key, the releases come first.
            if !releases.targets.is_empty() {
                let replies = self.store.release(releases.requests.into_iter().collect());
                self.await_replies(each(&releases.targets), replies, |key, event| self.handle_event(key, event));
            }
            if !acquires.targets.is_empty() {
                let replies = self.store.acquire(acquires.requests.into_iter().collect());
                self.await_replies(each(&acquires.targets), replies, |key, event| self.handle_event(key, event));
            }
        }
        self.notify_if_idle();
        result
    }
}

impl Together {
    /// Passes an event to the table of this key, and executes its actions. Its calls are made
    /// later, with those of the other keys.
    fn event<T>(
        &mut self,
        driver: &Arc<Driver>,
        key: &LockKey,
        event: impl FnOnce(&mut LockTable<TokioDriver>, EventContext<'_>, &mut Actions<TokioDriver>) -> T,
    ) -> T {
        let mut actions = Actions::new();
        let now = LazyNow::new(&driver.clock);
        let result = driver.apply(key, &now, &mut actions, event);
        let Calls { releases, acquires, yields: _ } = &mut actions.calls;
        self.releases.add(key, releases.take());
        self.acquires.add(key, acquires.take());
        driver.carry_out(key, actions, now);
        result
    }
}

impl<T> OfKeys<T> {
    fn add(&mut self, key: &LockKey, calls: Option<Numbered<T>>) {
        for (number, request) in calls.into_iter().flatten() {
            self.targets.push((key.clone(), number));
            self.requests.push(request);
        }
    }
}

impl<T> Default for OfKeys<T> {
    fn default() -> Self {
        Self { targets: Vec::new(), requests: Vec::new() }
    }
}

fn each(targets: &[(LockKey, u64)]) -> impl Iterator<Item = (&LockKey, u64)> {
    targets.iter().map(|(key, number)| (key, *number))
}
