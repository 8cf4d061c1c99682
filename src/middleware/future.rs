use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::Response;
use pin_project_lite::pin_project;

use super::{context::Slot, prefer, response_body::ResponseBody};
use crate::telemetry::span::SpanAround;

pin_project! {
    /// The response of a [`LockService`](crate::middleware::LockService) or a [`LockManagerService`](crate::middleware::LockManagerService).
    ///
    /// # Cancel safety
    ///
    /// Dropped while it waits, the request leaves the line and its handler never starts. Dropped while the handler runs under its lock (the client has
    /// left, or a timeout further out), the handler finishes in a task of its own and then gives the lock back, unless
    /// [`on_disconnect`](crate::LockLayer::on_disconnect) says otherwise: then it is dropped, and its key free after the lock-delay.
    pub struct ResponseFuture<F, B, E>
    where
        B: 'static,
        E: 'static,
    {
        #[pin]
        state: State<F, B, E>,
    }

    impl<F, B, E> PinnedDrop for ResponseFuture<F, B, E>
    where
        B: 'static,
        E: 'static,
    {
        fn drop(this: Pin<&mut Self>) {
            if let StateProj::Under { under } = this.project().state.project() {
                under.on_disconnect();
            }
        }
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, B, E>
    where
        B: 'static,
        E: 'static,
    {
        /// No lock is asked for.
        Passing { #[pin] inner: F },
        /// A lock is asked for, or may be.
        Under { under: Under<B, E> },
    }
}

struct Under<B: 'static, E: 'static> {
    slot: Slot,
    /// Gone when they have ended.
    steps: Option<Steps<B, E>>,
    /// What the handler logs when it finishes alone belongs where it began.
    around: SpanAround,
}

/// The way of a request that asks for a lock. One box for all of it: the extractors' futures have no names, and a future in a box can
/// move to a task.
pub(super) type Steps<B, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<B>>, E>> + Send>>;

impl<F, B, E> ResponseFuture<F, B, E> {
    pub(super) fn passing(inner: F) -> Self {
        Self { state: State::Passing { inner } }
    }

    pub(super) fn under(slot: Slot, steps: Steps<B, E>) -> Self {
        let under = Under { slot, steps: Some(steps), around: SpanAround::current() };
        Self { state: State::Under { under } }
    }
}

impl<F, B, E> Future for ResponseFuture<F, B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Result<Response<ResponseBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::Passing { inner } => {
                let response = ready!(inner.poll(cx));
                Poll::Ready(response.map(|response| response.map(ResponseBody::passing)))
            }
            StateProj::Under { under } => under.poll(cx),
        }
    }
}

impl<B, E> Under<B, E> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Response<ResponseBody<B>>, E>> {
        let steps = self.steps.as_mut().expect("not polled after its end");
        let mut response = ready!(steps.as_mut().poll(cx));
        self.steps = None;
        if let (Ok(response), Some(wait)) = (&mut response, self.slot.applied()) {
            prefer::applied(response.headers_mut(), wait);
        }
        Poll::Ready(response)
    }

    /// Nobody waits for the answer any more.
    fn on_disconnect(&mut self) {
        let Some(steps) = self.steps.take() else { return };
        // What has panicked has nothing to finish: unwinding has given back all it held.
        let Some(place) = self.slot.finish() else { return };
        let alone = async move {
            // What is answered is dropped: a stream that nobody reads ends there.
            drop(steps.await);
            drop(place);
        };
        self.slot.spawn(self.around.around(alone));
    }
}

impl<F, B, E> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            State::Passing { .. } => "ResponseFuture(passing)",
            State::Under { .. } => "ResponseFuture(under a lock, or on its way to one)",
        })
    }
}
