//! Acquires several keys: all of them or none, in the steps of [`Several`].

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    HeldLocks, LockGuard, LockGuards,
    acquire::{AcquireFuture, LockParams},
    driver::Driver,
    driver_data::NotGranted,
};
use crate::{
    error::LockError,
    lock_key::LockKey,
    proto::{
        LockRequest,
        hold_limits::HoldLimits,
        lease::Lease,
        several::{Next, Several},
    },
    telemetry::waits::Caller,
};

/// The requests of one step.
struct Requests {
    futures: Vec<Pin<Box<AcquireFuture>>>,
    results: Vec<Option<Result<LockGuard, LockError>>>,
}

/// Acquires these keys, which are in order, each one once: all of them, or none.
///
/// An error has the position of its key. It releases the keys that were acquired before, and so
/// does a drop of the future. Nothing has run under them, so no time blocks them.
pub(crate) async fn acquire_several(
    driver: &Arc<Driver>,
    keys: &[LockKey],
    params: LockParams,
) -> Result<LockGuards, (usize, NotGranted)> {
    let LockParams { mut request, metrics, caller } = params;
    request.trace = driver.waits.trace_of(&caller);
    match acquire_in_steps(driver, keys, &request, &caller).await {
        Ok(mut guards) => {
            guards.start(request.limits, metrics);
            Ok(guards)
        }
        Err((at, error)) => {
            metrics.into_iter().for_each(|metrics| metrics.rejected(&error));
            Err((at, error.into()))
        }
    }
}

async fn acquire_in_steps(
    driver: &Arc<Driver>,
    keys: &[LockKey],
    request: &LockRequest<()>,
    caller: &Caller,
) -> Result<LockGuards, (usize, LockError)> {
    let started = Instant::now();
    let mut held = LockGuards::unused([]);
    let waits = !request.wait.is_zero();
    if waits {
        driver.order.waits(request.owner.as_ref(), keys);
    }
    let mut several = Several::new(keys.len(), waits);
    loop {
        let step = several.step();
        // At least a nanosecond: a wait that is over has its timeout, and does not become a call
        // without a wait.
        let left = request.wait.saturating_sub(started.elapsed()).max(Duration::from_nanos(1).min(request.wait));
        let mut requests = Requests::send(driver, request, &keys[step.clone()], left, caller);
        let Some(error) = requests.finish(&mut held).await else {
            // Before anything else is requested.
            held = LockGuards::unused([]);
            several.lost();
            continue;
        };
        let granted = held.len() - step.start;
        match (several.replied(granted, error.is_some()), error) {
            // Not after the wait: limits of zero would be lost again and again.
            (Next::Done, _) if held.loss().is_some() && started.elapsed() < request.wait => {
                held = LockGuards::unused([]);
                several.lost();
            }
            (Next::Done, _) => return Ok(held),
            (Next::Step, None) => {}
            (Next::Step, Some(LockError::Busy { .. } | LockError::QueueFull { .. })) if granted > 0 || !waits => {}
            // That key did not wait for the server that moves. Alone, it does.
            (Next::Step, Some(LockError::Store(error))) if error.is_transient() && granted > 0 && waits => {}
            (_, error) => {
                let error = error.expect("a key that is not granted has an error");
                return Err((held.len(), with_wait(error, request.wait)));
            }
        }
    }
}

impl Requests {
    /// Requests these keys together. The first one waits for at most this time.
    fn send(
        driver: &Arc<Driver>,
        request: &LockRequest<()>,
        keys: &[LockKey],
        wait: Duration,
        caller: &Caller,
    ) -> Self {
        let limits = while_waiting(request.limits, wait);
        let request = |(at, key): (usize, &LockKey)| {
            let wait = if at == 0 { wait } else { Duration::ZERO };
            (key.clone(), LockRequest { wait, limits, ..request.clone() })
        };
        let futures = AcquireFuture::send_all(driver, keys.iter().enumerate().map(request).collect(), caller);
        let results = futures.iter().map(|_| None).collect();
        Self { futures: futures.into_iter().map(Box::pin).collect(), results }
    }

    /// Adds the guards of the keys before the first one that is not granted to those that are held.
    /// Returns its error, if there is one. `None`: a key that was held was lost meanwhile.
    async fn finish(&mut self, held: &mut LockGuards) -> Option<Option<LockError>> {
        self.wait(held.held_locks()).await.ok()?;
        let mut error = None;
        let mut unused = LockGuards::unused([]);
        for result in self.results.drain(..).flatten() {
            match result {
                Ok(guard) if error.is_none() => held.push(guard),
                Ok(guard) => unused.push(guard),
                Err(why) => error = error.or(Some(why)),
            }
        }
        Some(error)
    }

    /// Waits for all results. Fails if one of these locks is lost.
    async fn wait(&mut self, held: HeldLocks) -> Result<(), ()> {
        let mut lost = pin!(held.lost());
        poll_fn(|cx| {
            if self.poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            lost.as_mut().poll(cx).map(|_| Err(()))
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
        self.release_from(1);
        Poll::Pending
    }

    /// Releases the keys of this step from this one on that were granted.
    fn release_from(&mut self, first: usize) {
        drop(LockGuards::unused(self.results.drain(first..).flatten().filter_map(Result::ok)));
    }
}

impl Drop for Requests {
    /// The keys that were granted in a step that has not ended.
    fn drop(&mut self) {
        self.release_from(0);
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
        LockError::TimedOut { lease_left, ahead, held_by, .. } => {
            LockError::TimedOut { waited: wait, lease_left, ahead, held_by }
        }
        error => error,
    }
}
