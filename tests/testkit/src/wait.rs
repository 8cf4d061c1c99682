//! Waiting for a condition or a future, with a limit that only a broken test reaches.

use std::{future::Future, time::Duration};

use tokio::time::{sleep, timeout};

/// Longer than any step takes, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// The output of a future, which must end within the limit.
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(LIMIT, future).await.unwrap_or_else(|_| panic!("never happened: {what}"))
}

/// Polls until the condition holds.
pub async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let poll = async {
        while !is_so().await {
            sleep(ms(2)).await;
        }
    };
    soon(what, poll).await;
}

/// Polls without a runtime, for ten seconds at most. Returns whether the condition holds.
#[expect(clippy::disallowed_methods, reason = "short sleeps of a caller that cannot await")]
pub(crate) fn until_blocking(mut is_so: impl FnMut() -> bool) -> bool {
    (0..10_000).any(|_| {
        is_so() || {
            std::thread::sleep(ms(1));
            false
        }
    })
}

/// Lets all other tasks run until they only wait.
pub async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// A number of milliseconds.
pub const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
