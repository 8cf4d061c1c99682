//! The driver of [`Several`]: acquires several keys, all of them or none.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    HeldLock, LockGuard, LockGuards, acquire::AcquireFuture, driver::Driver, driver_data::NotGranted,
    guards::UnusedGuards, held_locks::AnyLost,
};
use crate::{
    error::LockError,
    lock_key::LockKey,
    owner::Owner,
    proto::{
        LockRequest,
        hold_limits::HoldLimits,
        lease::Lease,
        several::{Next, Several},
    },
    store::Demand,
    telemetry::metrics::AcquireMetrics,
};

/// The parameters of a request for several locks.
#[derive(Debug)]
pub(crate) struct SeveralParams {
    /// In order, each one once.
    pub(crate) keys: Vec<LockKey>,
    /// Zero: rejected while another owner holds one of the keys.
    pub(crate) wait: Duration,
    pub(crate) limits: HoldLimits,
    pub(crate) owner: Option<Owner>,
    pub(crate) parent: Option<Owner>,
    /// The label of its metrics.
    pub(crate) route: Option<Arc<str>>,
}

/// The requests of one step.
struct Requests {
    futures: Vec<Pin<Box<AcquireFuture>>>,
    results: Vec<Option<Result<LockGuard, LockError>>>,
}

/// Acquires all keys, or none.
///
/// An error has its key. It releases the keys that were acquired before, and so does a drop of the
/// future. Nothing has run under them, so no time blocks them.
pub(crate) async fn acquire_all(
    driver: Arc<Driver>,
    params: SeveralParams,
) -> Result<LockGuards, (LockKey, LockError)> {
    let metrics = AcquireMetrics::start(params.route.as_ref(), false);
    match acquire_in_steps(&driver, &params).await {
        Ok(guards) => Ok(guards.start(params.limits, metrics)),
        Err((at, error)) => {
            metrics.rejected(&error);
            Err((params.keys[at].clone(), error))
        }
    }
}

/// An error has the position of its key.
async fn acquire_in_steps(driver: &Arc<Driver>, params: &SeveralParams) -> Result<UnusedGuards, (usize, LockError)> {
    let started = Instant::now();
    let mut held = UnusedGuards(Vec::with_capacity(params.keys.len()));
    let waits = !params.wait.is_zero();
    if waits {
        driver.order.waits_for_all(params.owner.clone().or_else(Owner::current).as_ref(), &params.keys);
    }
    let mut several = Several::new(params.keys.len(), waits);
    loop {
        let step = several.step();
        // At least a nanosecond: a wait that is over has its timeout, and does not become a call
        // without a wait.
        let left = params.wait.saturating_sub(started.elapsed()).max(Duration::from_nanos(1).min(params.wait));
        let mut requests = Requests::send(driver, params, &params.keys[step.clone()], left);
        let Some(error) = requests.finish(&mut held).await else {
            // Before anything else is requested.
            held = UnusedGuards(Vec::with_capacity(params.keys.len()));
            several.lost();
            continue;
        };
        let granted = held.0.len() - step.start;
        match (several.replied(granted, error.is_some()), error) {
            // Not after the wait: limits of zero would be lost again and again.
            (Next::Done, _) if held.is_any_lost() && started.elapsed() < params.wait => {
                held = UnusedGuards(Vec::new());
                several.lost();
            }
            (Next::Done, _) => return Ok(held),
            (Next::Step, None) => {}
            (Next::Step, Some(LockError::Busy { .. } | LockError::QueueFull { .. })) if granted > 0 || !waits => {}
            // That key did not wait for the server that moves. Alone, it does.
            (Next::Step, Some(LockError::Store(error))) if error.is_failover() && granted > 0 && waits => {}
            (_, error) => {
                let error = error.expect("a key that is not granted has an error");
                return Err((held.0.len(), with_wait(error, params.wait)));
            }
        }
    }
}

impl Requests {
    /// Requests these keys together. The first one waits for at most this time.
    fn send(driver: &Arc<Driver>, params: &SeveralParams, keys: &[LockKey], wait: Duration) -> Self {
        let SeveralParams { limits, owner, parent, .. } = params;
        let owner = owner.clone().or_else(Owner::current);
        let parent = parent.clone().filter(|_| owner.is_none());
        let limits = while_waiting(*limits, wait);
        let request = |(at, key): (usize, &LockKey)| {
            let (owner, parent, demand) = (owner.clone(), parent.clone(), Demand::new());
            let wait = if at == 0 { wait } else { Duration::ZERO };
            (key.clone(), LockRequest { waiter: (), wait, owner, parent, limits, demand })
        };
        let futures = AcquireFuture::send_all(driver, keys.iter().enumerate().map(request).collect());
        let results = futures.iter().map(|_| None).collect();
        Self { futures: futures.into_iter().map(Box::pin).collect(), results }
    }

    /// Adds the guards of the keys before the first one that is not granted to those that are held.
    /// Returns its error, if there is one. `None`: a key that was held was lost meanwhile.
    async fn finish(&mut self, held: &mut UnusedGuards) -> Option<Option<LockError>> {
        let views: Vec<_> = held.0.iter().map(LockGuard::held_lock).collect();
        self.wait(&views).await.ok()?;
        let mut error = None;
        let mut unused = UnusedGuards(Vec::new());
        for result in self.results.drain(..).flatten() {
            match result {
                Ok(guard) if error.is_none() => held.0.push(guard),
                Ok(guard) => unused.0.push(guard),
                Err(why) => error = error.or(Some(why)),
            }
        }
        Some(error)
    }

    /// Waits for all results. Fails if one of these locks is lost.
    async fn wait(&mut self, held: &[HeldLock]) -> Result<(), ()> {
        let mut lost = None;
        poll_fn(|cx| {
            if self.poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            lost.get_or_insert_with(|| AnyLost::of(held)).poll(cx).map(|_| Err(()))
        })
        .await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        for (future, result) in self.futures.iter_mut().zip(&mut self.results) {
            if result.is_none()
                && let Poll::Ready(done) = future.as_mut().poll(cx)
            {
                *result = Some(done.map_err(NotGranted::into_error));
            }
        }
        if self.results.iter().skip(1).any(Option::is_none) {
            return Poll::Pending;
        }
        if self.results.first().is_some_and(Option::is_some) {
            return Poll::Ready(());
        }
        // The first key is waited for. Greater ones must not be held meanwhile.
        self.futures.truncate(1);
        let unused = self.results.drain(1..).flatten().filter_map(Result::ok);
        drop(UnusedGuards(unused.collect()));
        Poll::Pending
    }
}

impl Drop for Requests {
    /// The keys that were granted in a step that has not ended.
    fn drop(&mut self) {
        let unused = self.results.drain(..).flatten().filter_map(Result::ok);
        drop(UnusedGuards(unused.collect()));
    }
}

/// The limits of a key that is held while others are waited for: it must be held at the end of the
/// wait as long as without one.
fn while_waiting(limits: HoldLimits, wait: Duration) -> HoldLimits {
    HoldLimits {
        lease: match limits.lease {
            Lease::Fixed(lease) => Lease::Fixed(lease.saturating_add(wait)),
            Lease::AutoRenew => Lease::AutoRenew,
        },
        max_hold: limits.max_hold.map(|max| max.saturating_add(wait)),
        ..limits
    }
}

/// The limit of the whole wait, in place of that of the last step.
fn with_wait(error: LockError, wait: Duration) -> LockError {
    match error {
        LockError::TimedOut { lease_left, ahead, .. } => LockError::TimedOut { waited: wait, lease_left, ahead },
        error => error,
    }
}
