//! A task that cuts a streaming body.

use std::{future::poll_fn, sync::Weak, time::Duration};

use tokio::{
    task::AbortHandle,
    time::{Instant, sleep, timeout_at},
};

use super::{
    abort::{Stops, first},
    shared_body::{Cut, Shared},
};

/// How long the keeper leaves a poll that it meets: it is a moment.
const AWAY: Duration = Duration::from_millis(10);

/// Ends with the stream.
pub(super) struct Keeper(pub(super) Option<AbortHandle>);

/// Cuts the stream when a lock is lost, or when its reader is too slow, whether or not anybody polls it.
pub(super) async fn keep<B>(flow: Weak<Shared<B>>, mut stops: Stops, idle: Duration) {
    let mut look_at = Instant::now().checked_add(idle);
    loop {
        let lost = poll_fn(|cx| first(&mut stops, cx));
        let lost = match look_at {
            Some(at) => timeout_at(at, lost).await.ok(),
            None => Some(lost.await),
        };
        let Some(flow) = flow.upgrade() else { return };
        if let Some(why) = lost {
            while !flow.cut(Cut::Lost(why)) {
                sleep(AWAY).await;
            }
            return;
        }
        let now = Instant::now();
        look_at = match flow.too_slow(now) {
            // Where it is not the reader's turn, it may be at any time.
            Ok(at) => at.or_else(|| now.checked_add(idle)),
            Err(why) if flow.cut(Cut::TooSlow(why)) => return,
            Err(_) => now.checked_add(AWAY),
        };
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}
