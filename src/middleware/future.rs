use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::Response;
use pin_project_lite::pin_project;

use super::body_out::ResponseBody;

pin_project! {
    /// The response of a [`LockService`](crate::LockService).
    ///
    /// # Cancel safety
    ///
    /// Dropped while it waits, the request leaves the line and its handler never starts. Dropped while the handler runs, the
    /// handler is dropped first and then the lock given back.
    pub struct ResponseFuture<F, B, E> {
        #[pin]
        state: State<F, B, E>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, B, E> {
        /// No lock is asked for.
        Passing { #[pin] inner: F },
        /// One box for the whole way: the extractors' futures have no names, and a future in a box can move to a task.
        Locked { steps: Steps<B, E> },
    }
}

/// The way of a request that asks for a lock.
pub(super) type Steps<B, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<B>>, E>> + Send>>;

impl<F, B, E> ResponseFuture<F, B, E> {
    pub(super) fn passing(inner: F) -> Self {
        Self { state: State::Passing { inner } }
    }

    pub(super) fn locked(steps: Steps<B, E>) -> Self {
        Self { state: State::Locked { steps } }
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
            StateProj::Locked { steps } => steps.as_mut().poll(cx),
        }
    }
}

impl<F, B, E> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            State::Passing { .. } => "ResponseFuture(passing)",
            State::Locked { .. } => "ResponseFuture(locked)",
        })
    }
}
