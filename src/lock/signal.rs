//! The signals that stop a process, and the shutdown that follows.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

type Run = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Future of [`LockManager::shutdown_on_signal`](crate::LockManager::shutdown_on_signal).
#[must_use = "a future does nothing unless it is polled"]
pub struct ShutdownOnSignal {
    serve_for: Duration,
    /// What follows the signal, until the first poll.
    shut_down: Option<Box<dyn FnOnce(Duration) -> Run + Send>>,
    run: Option<Run>,
}

impl ShutdownOnSignal {
    /// `shut_down` gets the time for which requests are served.
    pub(super) fn new<F: Future<Output = ()> + Send + 'static>(
        shut_down: impl FnOnce(Duration) -> F + Send + 'static,
    ) -> Self {
        let shut_down = Box::new(|serve_for| {
            Box::pin(async move {
                stop().await;
                shut_down(serve_for).await;
            }) as Run
        });
        Self { serve_for: Duration::ZERO, shut_down: Some(shut_down), run: None }
    }

    /// Sets how long requests are served after the signal, while
    /// [`health`](crate::LockManager::health) fails already. Default: not at all.
    ///
    /// Set the time after which no balancer sends requests any more: the interval of its readiness
    /// probe, times the failures that it needs. Then no request is rejected because the process
    /// stops. The budget begins afterwards.
    pub fn serve_for(self, time: Duration) -> Self {
        Self { serve_for: time, ..self }
    }
}

impl Future for ShutdownOnSignal {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { serve_for, shut_down, run } = &mut *self;
        if let Some(shut_down) = shut_down.take() {
            *run = Some(shut_down(*serve_for));
        }
        run.as_mut().expect("made by the first poll").as_mut().poll(cx)
    }
}

impl fmt::Debug for ShutdownOnSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShutdownOnSignal").field("serve_for", &self.serve_for).finish_non_exhaustive()
    }
}

/// Completes at the first SIGTERM or Ctrl-C after the first poll.
#[cfg(unix)]
async fn stop() {
    use std::future::poll_fn;

    use tokio::signal::unix::{SignalKind, signal};

    let listen = |kind| signal(kind).expect("the process can listen to signals");
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate()), listen(SignalKind::interrupt()));
    poll_fn(|cx| {
        // Both, so that both wake.
        let (terminated, interrupted) = (terminate.poll_recv(cx), interrupt.poll_recv(cx));
        if terminated.is_ready() || interrupted.is_ready() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Completes at the first Ctrl-C after the first poll.
#[cfg(not(unix))]
async fn stop() {
    tokio::signal::ctrl_c().await.expect("the process can listen to signals");
}
