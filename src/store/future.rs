//! The future of a reply.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use super::StoreError;

/// Future of the reply of a store: ready, or boxed.
///
/// A ready reply needs no allocation.
#[must_use = "futures do nothing unless you `.await` or poll them"]
pub struct StoreFuture<T>(State<T>);

enum State<T> {
    Ready(Option<Result<T, StoreError>>),
    Pending(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
}

impl<T> StoreFuture<T> {
    /// Creates a future whose reply is ready.
    pub fn ready(reply: Result<T, StoreError>) -> Self {
        Self(State::Ready(Some(reply)))
    }

    /// Creates a future that returns the reply of this one.
    pub fn new(future: impl Future<Output = Result<T, StoreError>> + Send + 'static) -> Self {
        Self(State::Pending(Box::pin(future)))
    }

    /// The reply, if it is ready. It then needs no task and no runtime.
    pub(crate) fn into_ready(self) -> Result<Result<T, StoreError>, Self> {
        match self.0 {
            State::Ready(Some(reply)) => Ok(reply),
            state => Err(Self(state)),
        }
    }
}

impl<T: Unpin> Future for StoreFuture<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::Ready(reply) => Poll::Ready(reply.take().expect("polled after completion")),
            State::Pending(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for StoreFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            State::Ready(_) => "StoreFuture(ready)",
            State::Pending(_) => "StoreFuture(pending)",
        })
    }
}
