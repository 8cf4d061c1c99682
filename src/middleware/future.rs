//! The response of a locked service, and its handler after a disconnect.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::Response;
use pin_project_lite::pin_project;
use tracing::{Instrument, Span};

use super::{context::RequestContext, prefer, response::ResponseBody};

pin_project! {
    /// Response future of [`LockService`](crate::middleware::LockService) and
    /// [`LockManagerService`](crate::middleware::LockManagerService).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped while the request waits, the request leaves the queue and its
    /// handler is not started. If it is dropped while the handler runs under its lock (a
    /// disconnect, or an outer timeout), the handler finishes in a task of its own and then
    /// releases the lock. With
    /// [`on_disconnect(OnDisconnect::Cancel)`](crate::LockLayer::on_disconnect) the handler is
    /// dropped instead, and its key is free after the lock-delay.
    pub struct ResponseFuture<F, B: 'static, E: 'static> {
        #[pin]
        state: State<F, B, E>,
    }

    impl<F, B: 'static, E: 'static> PinnedDrop for ResponseFuture<F, B, E> {
        fn drop(this: Pin<&mut Self>) {
            if let StateProj::Locking { locking } = this.project().state.project() {
                locking.on_disconnect();
            }
        }
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, B: 'static, E: 'static> {
        /// No lock is requested.
        PassThrough { #[pin] inner: F },
        /// A lock is or may be requested.
        Locking { locking: Locking<B, E> },
    }
}

struct Locking<B: 'static, E: 'static> {
    context: RequestContext,
    /// `None` once it has ended.
    pipeline: Option<BoxedPipeline<B, E>>,
    /// The span of a detached handler is the one in which it was started.
    span: Span,
}

/// All steps of a request that needs a lock. Boxed, because futures of extractors have no names,
/// and because a boxed future can move to a task.
pub(crate) type BoxedPipeline<B, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<B>>, E>> + Send>>;

impl<F, B, E> ResponseFuture<F, B, E> {
    pub(crate) fn pass_through(inner: F) -> Self {
        Self { state: State::PassThrough { inner } }
    }

    pub(crate) fn locking(context: RequestContext, pipeline: BoxedPipeline<B, E>) -> Self {
        let locking = Locking { context, pipeline: Some(pipeline), span: Span::current() };
        Self { state: State::Locking { locking } }
    }
}

impl<F, B, E> Future for ResponseFuture<F, B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Result<Response<ResponseBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::PassThrough { inner } => {
                let response = ready!(inner.poll(cx));
                Poll::Ready(response.map(|response| response.map(ResponseBody::pass_through)))
            }
            StateProj::Locking { locking } => locking.poll(cx),
        }
    }
}

impl<B, E> Locking<B, E> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Response<ResponseBody<B>>, E>> {
        let pipeline = self.pipeline.as_mut().expect("polled after completion");
        let mut response = ready!(pipeline.as_mut().poll(cx));
        self.pipeline = None;
        if let (Ok(response), Some(wait)) = (&mut response, self.context.applied_wait()) {
            prefer::set_applied(response.headers_mut(), wait);
        }
        Poll::Ready(response)
    }

    /// Called when the client has disconnected.
    fn on_disconnect(&mut self) {
        let Some(pipeline) = self.pipeline.take() else { return };
        // A handler that panicked has released its locks while unwinding.
        let Some(permit) = self.context.detach_permit() else { return };
        let detached = async move {
            // The response is dropped: a stream without a reader ends here.
            drop(pipeline.await);
            drop(permit);
        };
        self.context.spawn(detached.instrument(self.span.clone()));
    }
}

impl<F, B, E> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            State::PassThrough { .. } => "ResponseFuture(pass-through)",
            State::Locking { .. } => "ResponseFuture(locking)",
        })
    }
}
