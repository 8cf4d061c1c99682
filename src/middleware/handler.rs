//! Runs the inner service under the locks of its request.

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tower::{BoxError, Service, ServiceExt};

use super::{request_locks::RequestLocks, response::finish_response, response_body::ResponseBody};
use crate::{
    body::{budget::Reservation, request_body::RequestBody},
    lock::HeldLock,
};

/// Runs the inner service, and releases the locks when its response has ended. The reservation of
/// the body ends when the service is called. The handler finds `lock` in the extensions.
pub(super) async fn run_handler<S, B>(
    mut locks: RequestLocks,
    mut inner: S,
    mut head: Parts,
    body: RequestBody,
    reservation: Option<Reservation>,
    lock: Option<HeldLock>,
) -> Result<Response<ResponseBody<B>>, S::Error>
where
    S: Service<Request<RequestBody>, Response = Response<B>>,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let context = locks.context().clone();
    context.insert_into(&mut head.extensions, lock);
    let method = head.method.clone();
    let request = Request::from_parts(head, body.observed_by(context.body_observer(), context.policy()));
    let span = locks.span();
    // Owns the service, so that the resources of this request are dropped before the lock.
    let handler = async move {
        // Only now: a request that waits must not use capacity of the inner service.
        let ready = inner.ready().await?;
        // The body no longer waits.
        drop(reservation);
        context.set_running(true);
        match span {
            Some(span) => span.instrument_handler(|| ready.call(request)).await,
            None => ready.call(request).await,
        }
    };
    let done = locks.run(handler).await;
    if locks.recorder().is_some() {
        // A disconnect before the record is left must not prevent it.
        locks.context().set_running(true);
    }
    finish_response(locks, &method, done).await
}
