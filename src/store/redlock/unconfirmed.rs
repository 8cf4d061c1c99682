//! The releases that one server has not confirmed.
//!
//! A release is replied to when a majority has confirmed it. The server that has not may be frozen
//! or separated, and would keep the lock for the rest of its lease: one more server that the next
//! holder does not get. So the release is repeated in the background until the lease has ended.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    select,
    time::{Instant, sleep},
};

use crate::{
    limits::{MAX_RELEASES_UNDER_WAY, RETRY_MAX, RETRY_MIN},
    store::{
        ReleaseRequest,
        redis::{
            error::CallError,
            topology::{Signs, connection::Query, server::Server},
            wire,
        },
        remote::batch::next_call,
    },
    sync::Mutex,
};

/// The releases that one server has not confirmed, and the task that repeats them.
#[derive(Default)]
pub(super) struct Unconfirmed(Mutex<State>);

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    /// When the task was last active. `None`: there is none.
    active_at: Option<Instant>,
}

struct Waiting {
    request: ReleaseRequest,
    since: Instant,
    /// The end of the lease.
    until: Instant,
}

/// The task that repeats the releases. Its drop lets another one start: its runtime may stop.
struct Repeating {
    unconfirmed: Weak<Unconfirmed>,
    server: Arc<Server>,
    signs: Arc<Signs>,
}

impl Unconfirmed {
    /// Nothing drives the runtime of a task that has not been active for this time.
    const STALE_AFTER: Duration = RETRY_MAX.saturating_mul(10);

    /// Repeats these releases until the server has confirmed them, for at most a lease. Without a
    /// runtime, the lease ends them.
    pub(super) fn repeat(
        self: &Arc<Self>,
        requests: &[ReleaseRequest],
        lease: Duration,
        server: &Arc<Server>,
        signs: &Arc<Signs>,
    ) {
        let Ok(runtime) = Handle::try_current() else { return };
        let since = Instant::now();
        let mut state = self.0.lock();
        state.add(requests, since, lease);
        let is_active = state.active_at.is_some_and(|at| at.elapsed() < Self::STALE_AFTER);
        if !is_active {
            state.active_at = Some(since);
            let (server, signs) = (Arc::clone(server), Arc::clone(signs));
            let task = Repeating { unconfirmed: Arc::downgrade(self), server, signs };
            drop(state);
            runtime.spawn(task.run());
        }
    }

    /// Takes the requests of the next call. `None`: there is none, and the task ends.
    fn next_call(&self) -> Option<Vec<Waiting>> {
        self.0.lock().next_call(Instant::now())
    }

    /// Puts the requests of a call that failed back, behind the others: one of them may be refused
    /// each time.
    fn put_back(&self, requests: Vec<Waiting>) {
        let mut state = self.0.lock();
        let free = MAX_RELEASES_UNDER_WAY.saturating_sub(state.waiting.len());
        state.waiting.extend(requests.into_iter().take(free));
    }
}

impl State {
    fn add(&mut self, requests: &[ReleaseRequest], since: Instant, lease: Duration) {
        for request in requests {
            if self.waiting.len() >= MAX_RELEASES_UNDER_WAY {
                // The lease of the oldest ends first.
                self.waiting.pop_front();
            }
            self.waiting.push_back(Waiting { request: request.clone(), since, until: since + lease });
        }
    }

    fn next_call(&mut self, now: Instant) -> Option<Vec<Waiting>> {
        self.waiting.retain(|waiting| waiting.until > now);
        let count = next_call(self.waiting.iter().map(|waiting| &waiting.request));
        self.active_at = (count > 0).then_some(now);
        self.active_at?;
        Some(self.waiting.drain(..count).collect())
    }
}

impl Repeating {
    async fn run(self) {
        let mut delay = RETRY_MIN;
        loop {
            select! {
                () = sleep(delay) => {}
                () = self.signs.recovered.notified() => {}
            }
            // The store may have been dropped.
            let Some(unconfirmed) = self.unconfirmed.upgrade() else { return };
            let Some(waiting) = unconfirmed.next_call() else { return };
            delay = match self.release(&waiting).await {
                Ok(()) => Duration::ZERO,
                Err(_) => {
                    unconfirmed.put_back(waiting);
                    (delay * 2).clamp(RETRY_MIN, RETRY_MAX)
                }
            };
        }
    }

    async fn release(&self, waiting: &[Waiting]) -> Result<(), CallError> {
        let now = Instant::now();
        let requests: Vec<_> = waiting.iter().map(|waiting| waiting.rest(now)).collect();
        let Server { keyspace, release_conn, timeouts, .. } = &*self.server;
        let Ok(call) = keyspace.release(&requests) else { return Ok(()) };
        let reply = release_conn.query(Query::EvalSha(&call), timeouts.call_deadline()).await?;
        // The error of a single key is permanent.
        release_conn.parsed(wire::parse_release(&reply, requests.len())).map(drop)
    }
}

impl Waiting {
    /// The request, with the rest of its block.
    fn rest(&self, now: Instant) -> ReleaseRequest {
        let block_for = self.request.block_for.saturating_sub(now.saturating_duration_since(self.since));
        ReleaseRequest { block_for, ..self.request.clone() }
    }
}

impl Drop for Repeating {
    fn drop(&mut self) {
        if let Some(unconfirmed) = self.unconfirmed.upgrade() {
            unconfirmed.0.lock().active_at = None;
        }
    }
}

impl fmt::Debug for Unconfirmed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Unconfirmed").field(&self.0.lock().waiting.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{acquisition::AcquisitionIds, lock_key::LockKey, proto::QUEUE};

    const LEASE: Duration = Duration::from_secs(30);

    fn releases(count: usize) -> Vec<ReleaseRequest> {
        let ids = AcquisitionIds::new("a", 1);
        let release = |number| ReleaseRequest::new(LockKey::from(("n", number)), ids.next(), LEASE / 2, QUEUE);
        (0..count).map(release).collect()
    }

    #[test]
    fn releases_that_wait_are_bounded_and_end_with_the_lease() {
        let (mut state, now) = (State::default(), Instant::now());
        state.add(&releases(MAX_RELEASES_UNDER_WAY), now, LEASE);
        state.add(&releases(3), now + LEASE / 2, LEASE);
        assert_eq!(state.waiting.len(), MAX_RELEASES_UNDER_WAY);
        let first = state.next_call(now + LEASE / 4).expect("they wait");
        assert_eq!(first[0].request.key, LockKey::from(("n", 3)), "the oldest are dropped");
        assert_eq!(first[0].rest(now + LEASE / 4).block_for, LEASE / 4, "a part of the block has passed");
        let rest = state.next_call(now + LEASE).expect("the newest wait");
        assert_eq!(rest.len(), 3);
        assert!(state.next_call(now + LEASE).is_none() && state.active_at.is_none(), "the task ends");
    }
}
