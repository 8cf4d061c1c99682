//! The future of a reply.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use super::StoreError;

/// The answer of a store: at hand, or on its way.
///
/// A store in memory answers without an allocation, any other boxes its future; neither needs a macro.
#[must_use = "futures do nothing unless you `.await` or poll them"]
pub struct StoreFuture<T>(State<T>);

enum State<T> {
    Ready(Option<Result<T, StoreError>>),
    Pending(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
}

// === impl StoreFuture ===

impl<T> StoreFuture<T> {
    /// An answer at hand.
    pub fn ready(answer: Result<T, StoreError>) -> Self {
        Self(State::Ready(Some(answer)))
    }

    /// An answer on its way.
    pub fn new(answer: impl Future<Output = Result<T, StoreError>> + Send + 'static) -> Self {
        Self(State::Pending(Box::pin(answer)))
    }

    /// The answer, if it is at hand: then nobody has to wait for it, and no runtime is needed.
    pub(crate) fn into_ready(self) -> Result<Result<T, StoreError>, Self> {
        match self.0 {
            State::Ready(Some(answer)) => Ok(answer),
            answer => Err(Self(answer)),
        }
    }
}

impl<T: Unpin> Future for StoreFuture<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::Ready(answer) => Poll::Ready(answer.take().expect("not polled after its answer")),
            State::Pending(answer) => answer.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for StoreFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            State::Ready(_) => "StoreFuture(ready)",
            State::Pending(_) => "StoreFuture(coming)",
        })
    }
}
