//! The signals that stop a process.

/// Completes at the first SIGTERM or Ctrl-C after the first poll.
#[cfg(unix)]
pub(super) async fn stop() {
    use std::{future::poll_fn, task::Poll};

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
pub(super) async fn stop() {
    tokio::signal::ctrl_c().await.expect("the process can listen to signals");
}
