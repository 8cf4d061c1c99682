//! Waiting for a condition or a future, with a limit that only a broken test reaches.

use std::{future::Future, time::Duration};

use tokio::time::{sleep, timeout};

use crate::limits;

/// The output of a future, which must end within the limit.
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(limits::BROKEN, future).await.unwrap_or_else(|_| panic!("never happened: {what}"))
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

/// Polls without a runtime. Returns whether the condition holds, at the limit at the latest.
#[expect(clippy::disallowed_methods, reason = "short sleeps of a caller that cannot await")]
pub(crate) fn until_blocking(mut is_so: impl FnMut() -> bool) -> bool {
    let began = std::time::Instant::now();
    while !is_so() {
        if began.elapsed() > limits::BROKEN {
            return false;
        }
        std::thread::sleep(ms(1));
    }
    true
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
