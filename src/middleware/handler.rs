//! Runs the inner service under the locks of its request.

use std::{
    future::Future,
    mem,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
};

use http::{Request, Response, request::Parts};
use pin_project_lite::pin_project;
use tower::{Service, ServiceExt};

use super::{request_locks::RequestLocks, response::HandlerResult};
use crate::body::{budget::Reservation, request_body::RequestBody};

/// A request and its locks. Fields are dropped in order: the resources of the request before the
/// locks.
///
/// The steps of the request borrow it, because each future that owned it would contain it once
/// more.
pub(crate) struct LockedRequest<S> {
    /// `None` after its call, as the head.
    pub(crate) inner: Option<S>,
    pub(crate) head: Option<Parts>,
    pub(crate) body: RequestBody,
    /// What the body uses of the budget until the service is called.
    pub(crate) reservation: Option<Reservation>,
    pub(crate) locks: RequestLocks,
}

pin_project! {
    /// The two parts of a request: up to the end of its handler, and then its response.
    ///
    /// Both parts share their memory, which the variables of one future would not. A handler that
    /// fails has its result already.
    #[project = PipelineProj]
    pub(crate) enum Pipeline<H, R, F> {
        Handler { #[pin] handler: H, finish: F },
        Response { #[pin] response: R },
    }
}

impl<S> LockedRequest<S> {
    pub(crate) fn new(inner: S, head: Parts, body: RequestBody, locks: RequestLocks) -> Self {
        Self { inner: Some(inner), head: Some(head), body, reservation: None, locks }
    }

    pub(crate) fn head(&mut self) -> &mut Parts {
        self.head.as_mut().expect("before the call")
    }

    /// Calls the inner service without a lock.
    pub(crate) async fn pass_through<B>(&mut self) -> Result<Response<B>, S::Error>
    where
        S: Service<Request<RequestBody>, Response = Response<B>>,
    {
        let inner = self.inner.as_mut().expect("before the call").ready().await?;
        self.reservation = None;
        let request = Request::from_parts(self.head.take().expect("before the call"), mem::take(&mut self.body));
        inner.call(request).await
    }

    /// Runs the inner service under the locks. The reservation of the body ends when the service is
    /// called.
    pub(crate) async fn run<B>(&mut self) -> HandlerResult<B, S::Error>
    where
        S: Service<Request<RequestBody>, Response = Response<B>>,
    {
        let Self { inner, head, body, reservation, locks } = self;
        let (context, span) = (locks.context(), locks.span().filter(|span| span.is_enabled()));
        let done = {
            let inner = inner.as_mut().expect("before the call");
            let handler = async {
                // Only now: a request that waits must not use capacity of the inner service.
                let ready = inner.ready().await?;
                // The body no longer waits.
                *reservation = None;
                context.set_running(true);
                let mut call = || {
                    let body = mem::take(body).observed_by(|| context.body_observer(), context.policy());
                    ready.call(Request::from_parts(head.take().expect("before the call"), body))
                };
                match span {
                    Some(span) => span.instrument_handler(call).await,
                    None => call().await,
                }
            };
            locks.run(pin!(context.request_scope().scope(handler))).await
        };
        // Its resources are dropped before the locks are released.
        *inner = None;
        done
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
