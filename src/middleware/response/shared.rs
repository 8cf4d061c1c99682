//! The body of a streaming response, shared by its reader and its monitor.
//!
//! The server polls the body, but not while its client does not read. The monitor is a task that
//! aborts the stream meanwhile.

use std::{future::poll_fn, mem, pin::Pin, sync::Weak, task::Waker, time::Duration};

use tokio::time::{Instant, sleep, timeout_at};
use tower::BoxError;

use crate::{
    body::pace::{Pace, TooSlow},
    error::LockLost,
    lock::poll_any,
    middleware::{request_lock::AbortSignals, request_locks::RequestLocks},
    sync::Mutex,
};

/// The pause before the next attempt to abort a stream that is being polled.
const POLL_RETRY: Duration = Duration::from_millis(10);

/// The body, and the state through which the server that polls it and its monitor communicate.
pub(super) struct SharedBody<B>(Mutex<SharedState<B>>);

pub(super) struct SharedState<B> {
    pub(super) state: BodyState<B>,
    pub(super) pace: Pace,
    /// Bytes that were returned to the server and that the reader has not made space for.
    sent: u64,
    /// Of the task that polls the body.
    waker: Option<Waker>,
}

pub(super) enum BodyState<B> {
    /// Not being polled.
    Idle(Box<LockedBody<B>>),
    /// Being polled, outside of the mutex, because the body is code of the application.
    Polling,
    /// Aborted by the monitor.
    Aborted(AbortReason),
    /// Ended.
    Done,
}

/// Fields are dropped in order: the resources of the body (a transaction, a file) are dropped
/// before the next section starts.
pub(super) struct LockedBody<B> {
    pub(super) inner: Pin<Box<B>>,
    pub(super) locks: RequestLocks,
}

/// Why a stream was aborted.
#[derive(Clone, Copy, Debug)]
pub(super) enum AbortReason {
    Lost(LockLost),
    TooSlow(TooSlow),
}

impl<B> SharedBody<B> {
    pub(super) fn new(body: LockedBody<B>, pace: Pace) -> Self {
        Self(Mutex::new(SharedState { state: BodyState::Idle(Box::new(body)), pace, sent: 1, waker: None }))
    }

    /// Takes the body to poll it.
    pub(super) fn start_poll(&self, waker: &Waker) -> Result<Box<LockedBody<B>>, AbortReason> {
        let mut shared = self.0.lock();
        match mem::replace(&mut shared.state, BodyState::Polling) {
            BodyState::Idle(body) => {
                let bytes = mem::take(&mut shared.sent);
                shared.pace.record(Instant::now(), bytes);
                shared.waker.get_or_insert_with(|| waker.clone()).clone_from(waker);
                Ok(body)
            }
            BodyState::Aborted(reason) => Err(reason),
            // A poll has panicked, and dropped the body.
            BodyState::Polling | BodyState::Done => Err(AbortReason::Lost(LockLost::Released)),
        }
    }

    /// Puts the body back. With `sent`, a frame of so many bytes was returned, and the reader is
    /// next.
    pub(super) fn finish_poll(&self, body: Box<LockedBody<B>>, sent: Option<u64>) {
        let mut shared = self.0.lock();
        shared.state = BodyState::Idle(body);
        if let Some(bytes) = sent {
            // A frame without bytes is progress, too.
            shared.sent = bytes.max(1);
            shared.pace.start_waiting(Instant::now());
        }
    }

    /// Ends the stream. Returns the body if it is neither being polled nor aborted.
    pub(super) fn finish(&self) -> Option<Box<LockedBody<B>>> {
        match mem::replace(&mut self.0.lock().state, BodyState::Done) {
            BodyState::Idle(body) => Some(body),
            BodyState::Polling | BodyState::Aborted(_) | BodyState::Done => None,
        }
    }

    /// Aborts the stream. Returns false while it is polled: that poll checks its locks itself.
    pub(super) fn abort(&self, reason: AbortReason) -> bool {
        let mut shared = self.0.lock();
        let (body, waker) = match mem::replace(&mut shared.state, BodyState::Aborted(reason)) {
            BodyState::Idle(body) => (body, shared.waker.take()),
            BodyState::Polling => {
                shared.state = BodyState::Polling;
                return false;
            }
            ended @ (BodyState::Aborted(_) | BodyState::Done) => {
                shared.state = ended;
                return true;
            }
        };
        drop(shared);
        // Outside of the mutex, because the body is code of the application. The waker goes first:
        // the drop of the body may panic.
        if let Some(waker) = waker {
            waker.wake();
        }
        body.abort(reason);
        true
    }

    /// Fails if the reader was too slow. Otherwise returns the time of the next check if the reader
    /// is next.
    pub(super) fn check_pace(&self, now: Instant) -> Result<Option<Instant>, TooSlow> {
        let mut shared = self.0.lock();
        match shared.pace.check(now) {
            Some(why) => Err(why),
            None => Ok(shared.pace.next_check()),
        }
    }
}

impl<B> LockedBody<B> {
    pub(super) fn abort(self, reason: AbortReason) {
        drop(self.inner);
        match reason {
            AbortReason::Lost(why) => self.locks.lost(why),
            AbortReason::TooSlow(why) => self.locks.stalled(why),
        }
    }
}

/// Aborts the stream when a lock is lost or its reader is too slow, also if the stream is not
/// polled.
pub(super) async fn monitor<B>(body: Weak<SharedBody<B>>, mut signals: AbortSignals, idle: Duration) {
    let mut next_check = Instant::now().checked_add(idle);
    loop {
        let lost = poll_fn(|cx| poll_any(&mut signals, cx));
        let lost = match next_check {
            Some(at) => timeout_at(at, lost).await.ok(),
            None => Some(lost.await),
        };
        let Some(body) = body.upgrade() else { return };
        if let Some(why) = lost {
            while !body.abort(AbortReason::Lost(why)) {
                sleep(POLL_RETRY).await;
            }
            return;
        }
        let now = Instant::now();
        next_check = match body.check_pace(now) {
            // The reader may be next at any time.
            Ok(at) => at.or_else(|| now.checked_add(idle)),
            Err(why) if body.abort(AbortReason::TooSlow(why)) => return,
            Err(_) => now.checked_add(POLL_RETRY),
        };
    }
}

impl From<AbortReason> for BoxError {
    fn from(reason: AbortReason) -> Self {
        match reason {
            AbortReason::Lost(why) => why.into(),
            AbortReason::TooSlow(why) => why.into(),
        }
    }
}
