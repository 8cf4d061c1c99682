//! The two parts of a request: up to the end of its handler, and then its response.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;

pin_project! {
    /// Both parts share their memory, which the variables of one future would not.
    #[project = PipelineProj]
    pub(super) enum Pipeline<H, R, F> {
        Handler { #[pin] handler: H, finish: F },
        Response { #[pin] response: R },
    }
}

impl<H, R, F, D, T> Pipeline<H, R, F>
where
    H: Future<Output = Result<D, T>>,
    R: Future<Output = T>,
    F: FnOnce(D) -> R + Copy,
{
    /// A handler that fails has its result already.
    pub(super) fn new(handler: H, finish: F) -> Self {
        Self::Handler { handler, finish }
    }
}

impl<H, R, F, D, T> Future for Pipeline<H, R, F>
where
    H: Future<Output = Result<D, T>>,
    R: Future<Output = T>,
    F: FnOnce(D) -> R + Copy,
{
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        loop {
            match self.as_mut().project() {
                PipelineProj::Handler { handler, finish } => match ready!(handler.poll(cx)) {
                    Ok(done) => {
                        let response = finish(done);
                        self.set(Self::Response { response });
                    }
                    Err(result) => return Poll::Ready(result),
                },
                PipelineProj::Response { response } => return response.poll(cx),
            }
        }
    }
}
