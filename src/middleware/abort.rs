//! Signals that abort a handler or a response.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::error::LockLost;

/// Ready when what runs in a section is to be broken off.
pub(super) type AbortSignal = Pin<Box<dyn Future<Output = LockLost> + Send>>;

pub(super) type AbortSignals = SmallVec<[AbortSignal; 1]>;

/// When that is.
#[derive(Clone, Copy, Debug)]
pub(super) enum AbortAt {
    /// When the lock is lost.
    Loss,
    /// It goes on with its fence, but not for ever. (`None`: later than any clock.)
    Deadline(Option<Instant>),
}

/// The first of them that is ready.
pub(super) fn poll_any(stops: &mut AbortSignals, cx: &mut Context<'_>) -> Poll<LockLost> {
    let ready = stops.iter_mut().find_map(|stop| match stop.as_mut().poll(cx) {
        Poll::Ready(why) => Some(why),
        Poll::Pending => None,
    });
    ready.map_or(Poll::Pending, Poll::Ready)
}
