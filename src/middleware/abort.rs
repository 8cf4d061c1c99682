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
pub(super) type Stop = Pin<Box<dyn Future<Output = LockLost> + Send>>;

pub(super) type Stops = SmallVec<[Stop; 1]>;

/// When that is.
#[derive(Clone, Copy, Debug)]
pub(super) enum StopsAt {
    /// When the lock is lost.
    WhenLost,
    /// It goes on with its fence, but not for ever. (`None`: later than any clock.)
    At(Option<Instant>),
}

/// The first of them that is ready.
pub(super) fn first(stops: &mut Stops, cx: &mut Context<'_>) -> Poll<LockLost> {
    let ready = stops.iter_mut().find_map(|stop| match stop.as_mut().poll(cx) {
        Poll::Ready(why) => Some(why),
        Poll::Pending => None,
    });
    ready.map_or(Poll::Pending, Poll::Ready)
}
