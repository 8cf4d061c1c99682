//! The task that aborts a streaming response.

use std::{future::poll_fn, sync::Weak, time::Duration};

use tokio::{
    task::AbortHandle,
    time::{Instant, sleep, timeout_at},
};

use super::{
    abort::{AbortSignals, poll_any},
    shared_body::{AbortReason, SharedBody},
};

/// The pause before the next attempt to abort a stream that is being polled.
const POLL_RETRY: Duration = Duration::from_millis(10);

/// The handle of the task. Its drop ends the task.
pub(super) struct StallMonitor(pub(super) Option<AbortHandle>);

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

impl Drop for StallMonitor {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}
