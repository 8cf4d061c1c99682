//! Reads a request body before its lock is acquired: once, within the limit of the route, and
//! replayed unchanged.

use std::{
    error::Error,
    future::{Future, poll_fn},
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use bytes::{Bytes, BytesMut};
use http::{StatusCode, request::Parts};
use http_body::Body;
use http_body_util::LengthLimitError;
use tokio::time::Instant;

use super::{
    budget::{BodyBudget, EvictableBody, Reservation, ReservationError},
    pace::{Pace, TooSlow},
    request_body::{IncomingBody, ReplayBody, RequestBody},
    timer::LazyTimer,
};
use crate::{policy::LockPolicy, rejection::Rejection, sync::Mutex};

/// The body of a request before its lock is acquired. It is read then, or earlier if the key needs
/// it, or not at all.
#[doc(hidden)]
#[derive(Debug)]
pub struct BodyReader<'a> {
    body: &'a mut RequestBody,
    /// What the body uses of the budget while its request waits.
    reservation: &'a mut Option<Reservation>,
    budget: &'a Arc<BodyBudget>,
    policy: &'a LockPolicy,
}

/// The bytes that were read so far. An eviction takes them.
#[derive(Debug)]
struct SharedBuffer(Mutex<(Option<BodyBuffer>, Option<Waker>)>);

/// The bytes of a body while it is read.
#[derive(Debug)]
enum BodyBuffer {
    /// The usual case, without a copy.
    SingleFrame(Bytes),
    /// Copied at once: a frame of one byte may keep a whole buffer of its connection alive.
    Copied(BytesMut),
}

impl<'a> BodyReader<'a> {
    pub(crate) fn new(
        body: &'a mut RequestBody,
        reservation: &'a mut Option<Reservation>,
        budget: &'a Arc<BodyBudget>,
        policy: &'a LockPolicy,
    ) -> Self {
        Self { body, reservation, budget, policy }
    }

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
                    let pace = Pace::from_policy(self.policy);
                    read_to_end(streaming, body_limit(head), &mut reservation, pace).await?
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
    mut pace: Pace,
) -> impl Future<Output = Result<ReplayBody, Rejection>> {
    async move {
        let announced = streaming.inner.size_hint();
        // Before the first poll, because that makes hyper ask for the body with `100 Continue`.
        if announced.lower() > limit {
            return Err(Rejection::BodyTooLarge);
        }
        if announced.lower() > reservation.budget().available() {
            return Err(Rejection::body_buffer_full());
        }
        // Shared only once the body waits for its client, and can be evicted.
        let (mut own, mut shared) = (BodyBuffer::default(), None::<Arc<SharedBuffer>>);
        let (mut trailers, mut left) = (None, limit);
        let mut timer = LazyTimer::default();
        loop {
            let next = poll_fn(|cx| {
                let next = Pin::new(&mut streaming.inner).poll_frame(cx);
                if next.is_ready() {
                    return next.map(Ok);
                }
                // Only now: a body that is ready is not idle.
                let shared = &*shared.get_or_insert_with(|| Arc::new(SharedBuffer::new(mem::take(&mut own))));
                reservation.set_reader(|| Arc::clone(shared) as _);
                if !shared.register(cx.waker()) {
                    return Poll::Ready(Err(Rejection::BodyTimeout));
                }
                poll_too_slow(&mut pace, &mut timer, cx).map(|_| Err(Rejection::BodyTimeout))
            });
            let Some(frame) = next.await? else { break };
            match frame.map_err(|error| read_error(&*error))?.into_data() {
                Ok(bytes) => {
                    pace.record(Instant::now(), bytes.len() as u64);
                    left = left.checked_sub(bytes.len() as u64).ok_or(Rejection::BodyTooLarge)?;
                    // Counts the bytes that were received, because an announced length costs its
                    // sender nothing.
                    reservation.grow(bytes.len())?;
                    match &shared {
                        Some(shared) => shared.push(bytes),
                        None => own.push(bytes),
                    }
                }
                Err(frame) => trailers = frame.into_trailers().ok().map(Box::new),
            }
        }
        reservation.complete()?;
        streaming.finish();
        let data = match shared {
            Some(shared) => shared.0.lock().0.take().ok_or(Rejection::BodyTimeout)?,
            None => own,
        };
        let data = data.into_bytes();
        Ok(ReplayBody { data, trailers, has_unknown_length: announced.exact().is_none() })
    }
}

/// Ready when the client was too slow.
fn poll_too_slow(pace: &mut Pace, timer: &mut LazyTimer, cx: &mut Context<'_>) -> Poll<TooSlow> {
    loop {
        let now = Instant::now();
        pace.start_waiting(now);
        if let Some(why) = pace.check(now) {
            return Poll::Ready(why);
        }
        ready!(timer.poll(pace.next_check(), cx));
    }
}

/// The limit of the extractors of the handler: `DefaultBodyLimit`, 2 MB if none is set, and 64 MiB
/// if it was disabled.
#[cfg(feature = "axum")]
fn body_limit(head: &mut Parts) -> u64 {
    use std::convert::Infallible;

    use axum::{RequestExt, extract::Request};
    use http_body::Frame;

    use crate::limits::MAX_BODY_BYTES;

    /// A body without a size hint.
    struct UnknownLength;

    impl Body for UnknownLength {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(None)
        }
    }

    // Axum does not expose the limit, but applies it to the size hint of the body.
    let mut request = Request::new(axum::body::Body::new(UnknownLength));
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
        Rejection::InvalidKey { status: StatusCode::BAD_REQUEST, field: None, extractor: None }
    }
}

impl SharedBuffer {
    fn new(buffer: BodyBuffer) -> Self {
        Self(Mutex::new((Some(buffer), None)))
    }

    /// Stores the waker. Returns false if the body was evicted.
    fn register(&self, waker: &Waker) -> bool {
        let mut reading = self.0.lock();
        let (gathered, waits) = &mut *reading;
        waits.get_or_insert_with(|| waker.clone()).clone_from(waker);
        gathered.is_some()
    }

    fn push(&self, frame: Bytes) {
        if let Some(gathered) = &mut self.0.lock().0 {
            gathered.push(frame);
        }
    }
}

impl EvictableBody for SharedBuffer {
    fn evict(&self) {
        let (gathered, waker) = mem::take(&mut *self.0.lock());
        drop(gathered);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl From<ReservationError> for Rejection {
    fn from(why: ReservationError) -> Self {
        match why {
            ReservationError::Exhausted => Self::body_buffer_full(),
            ReservationError::Evicted => Self::BodyTimeout,
        }
    }
}

impl Default for BodyBuffer {
    fn default() -> Self {
        Self::SingleFrame(Bytes::new())
    }
}

impl BodyBuffer {
    fn push(&mut self, frame: Bytes) {
        match self {
            Self::SingleFrame(first) if first.is_empty() => *first = frame,
            Self::SingleFrame(first) => {
                let mut all = BytesMut::with_capacity(first.len() + frame.len());
                all.extend_from_slice(first);
                all.extend_from_slice(&frame);
                *self = Self::Copied(all);
            }
            Self::Copied(all) => all.extend_from_slice(&frame),
        }
    }

    fn into_bytes(self) -> Bytes {
        match self {
            Self::SingleFrame(bytes) => bytes,
            Self::Copied(all) => all.freeze(),
        }
    }
}
