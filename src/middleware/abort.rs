//! Signals that abort a handler or a response.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::error::LockLost;

/// Resolves when the work under a lock must be aborted.
pub(super) type AbortSignal = Pin<Box<dyn Future<Output = LockLost> + Send>>;

pub(super) type AbortSignals = SmallVec<[AbortSignal; 1]>;

/// When the work under a lock is aborted.
#[derive(Clone, Copy, Debug)]
pub(super) enum AbortAt {
    /// When the lock is lost.
    Loss,
    /// At this instant, also if the lock is still held. `None`: later than any instant of the
    /// clock.
    Deadline(Option<Instant>),
}

/// Polls all signals. Ready with the reason of the first one that is ready.
pub(super) fn poll_any(signals: &mut AbortSignals, cx: &mut Context<'_>) -> Poll<LockLost> {
    let ready = signals.iter_mut().find_map(|stop| match stop.as_mut().poll(cx) {
        Poll::Ready(why) => Some(why),
        Poll::Pending => None,
    });
    ready.map_or(Poll::Pending, Poll::Ready)
}
