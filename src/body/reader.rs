//! Reads a request body before its lock is acquired: once, within the limit of the route, and
//! replayed unchanged.

use std::{
    error::Error,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::Poll,
};

use bytes::Bytes;
use http::{StatusCode, request::Parts};
use http_body::Body;
use http_body_util::LengthLimitError;

use super::{
    budget::{BodyBudget, BufferFull, Reservation},
    buffer::BodyBuffer,
    pace::{Pace, TooSlow},
    request_body::{IncomingBody, LayerPace, ReplayBody, RequestBody, poll_too_slow, record},
    timer::LazyTimer,
};
use crate::{policy::LockPolicy, rejection::Rejection};

/// The body of a request before its lock is acquired. It is read then, or earlier if the key needs
/// it, or not at all.
#[doc(hidden)]
#[derive(Debug)]
pub struct BodyReader<'a> {
    pub(crate) body: &'a mut RequestBody,
    /// What the body uses of the budget while its request waits.
    pub(crate) reservation: &'a mut Option<Reservation>,
    pub(crate) budget: &'a Arc<BodyBudget>,
    pub(crate) policy: &'a LockPolicy,
}

impl BodyReader<'_> {
    /// The bytes of the body. They are read once.
    pub(crate) async fn read(&mut self, head: &mut Parts) -> Result<Bytes, Rejection> {
        if self.reservation.is_none() && !self.body.is_empty() {
            let mut reservation = self.budget.reserve();
            let content = match self.body.take() {
                Ok(content) => {
                    let len = content.data.len();
                    if len as u64 > body_limit(head) {
                        return Err(Rejection::BodyTooLarge);
                    }
                    reservation.grow(len)?;
                    content
                }
                Err(streaming) => {
                    let layers = [LayerPace { observer: None, pace: Pace::from_policy(self.policy) }];
                    read_to_end(streaming, body_limit(head), &mut reservation, layers).await?
                }
            };
            *self.reservation = Some(reservation);
            *self.body = RequestBody::complete(content);
        }
        Ok(self.body.data())
    }
}

/// Reads the body to its end, within the limit and the budget, while its client keeps the pace.
#[expect(clippy::manual_async_fn, reason = "the future of an `async fn` contains its arguments twice")]
fn read_to_end(
    mut streaming: IncomingBody,
    limit: u64,
    reservation: &mut Reservation,
    mut layers: [LayerPace; 1],
) -> impl Future<Output = Result<ReplayBody, Rejection>> {
    async move {
        let announced = streaming.inner.size_hint();
        // Before the first poll, because that makes hyper ask for the body with `100 Continue`.
        if announced.lower() > limit {
            return Err(Rejection::BodyTooLarge);
        }
        if !reservation.may_grow(announced.lower()) {
            return Err(Rejection::body_buffer_full());
        }
        let mut buffer = BodyBuffer::default();
        let (mut trailers, mut left) = (None, limit);
        let mut timer = LazyTimer::default();
        loop {
            let next = poll_fn(|cx| {
                if let Poll::Ready(next) = Pin::new(&mut streaming.inner).poll_frame(cx) {
                    return Poll::Ready(Ok(next));
                }
                poll_too_slow(&mut layers, &mut timer, cx).map(|_| Err(Rejection::BodyTimeout))
            });
            let Some(frame) = next.await? else { break };
            match frame.map_err(|error| read_error(&*error))?.into_data() {
                Ok(bytes) => {
                    record(&mut layers, bytes.len());
                    left = left.checked_sub(bytes.len() as u64).ok_or(Rejection::BodyTooLarge)?;
                    // Counts the bytes that were received, because an announced length costs its
                    // sender nothing.
                    reservation.grow(bytes.len())?;
                    buffer.push(bytes);
                }
                Err(frame) => trailers = frame.into_trailers().ok().map(Box::new),
            }
        }
        streaming.finish();
        Ok(ReplayBody { data: buffer.into_bytes(), trailers, has_unknown_length: announced.exact().is_none() })
    }
}

/// The limit of the extractors of the handler: `DefaultBodyLimit`, 2 MB if none is set, and 64 MiB
/// if it was disabled.
#[cfg(feature = "axum")]
fn body_limit(head: &mut Parts) -> u64 {
    use std::mem;

    use axum::{RequestExt, extract::Request};

    use super::request_body::TakenBody;
    use crate::limits::MAX_BODY_BYTES;

    // Axum does not expose the limit, but applies it to the size hint of the body. This body has
    // none.
    let mut request = Request::new(axum::body::Body::new(TakenBody));
    mem::swap(request.extensions_mut(), &mut head.extensions);
    let mut request = request.with_limited_body();
    mem::swap(request.extensions_mut(), &mut head.extensions);
    request.body().size_hint().upper().unwrap_or(MAX_BODY_BYTES).min(MAX_BODY_BYTES)
}

/// The default limit of Axum.
#[cfg(not(feature = "axum"))]
fn body_limit(_: &mut Parts) -> u64 {
    crate::limits::DEFAULT_BODY_LIMIT
}

/// The limit of an outer layer causes the same error.
fn read_error(error: &(dyn Error + 'static)) -> Rejection {
    let is = |kind: fn(&(dyn Error + 'static)) -> bool| {
        std::iter::successors(Some(error), |&error| error.source()).any(kind)
    };
    if is(<dyn Error>::is::<LengthLimitError>) {
        Rejection::BodyTooLarge
    } else if is(<dyn Error>::is::<TooSlow>) {
        Rejection::BodyTimeout
    } else {
        Rejection::invalid_key(StatusCode::BAD_REQUEST)
    }
}

impl From<BufferFull> for Rejection {
    fn from(_: BufferFull) -> Self {
        Self::body_buffer_full()
    }
}
