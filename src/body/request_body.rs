//! The request body that the inner service receives: complete, or streaming under the lock.

use std::{
    fmt, mem,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, combinators::UnsyncBoxBody};
use smallvec::SmallVec;
use tokio::{runtime::Handle, time::Instant};
use tower::BoxError;

use super::{
    pace::{Pace, TooSlow},
    timer::LazyTimer,
};
use crate::{policy::LockPolicy, sync::Mutex};

/// Request body behind a [`LockLayer`](crate::LockLayer) or a
/// [`LockManagerLayer`](crate::LockManagerLayer).
///
/// The body is complete in memory by default. With
/// [`RequestBodyMode::Stream`](crate::RequestBodyMode::Stream) it is a stream. Size hint and
/// trailers are passed through. Handlers of Axum do not see this type; a plain Tower service takes
/// `Request<RequestBody>`.
#[derive(Default)]
pub struct RequestBody(Kind);

enum Kind {
    Complete(ReplayBody),
    Streaming(IncomingBody),
    /// Accessible to extractors; `None` while one of them reads it.
    Shared(Arc<Mutex<Option<RequestBody>>>),
}

/// Gives an extractor that acquires a lock access to the body of its request, through the
/// extensions.
///
/// It does not own the body: a copy of the extensions keeps no upload open.
#[derive(Clone)]
pub(crate) struct RequestBodyHandle(Weak<Mutex<Option<RequestBody>>>);

/// The bytes and trailers of a body that was read.
#[derive(Debug, Default)]
pub(crate) struct ReplayBody {
    pub(crate) data: Bytes,
    pub(crate) trailers: Option<Box<HeaderMap>>,
    /// The sender did not announce the length.
    pub(crate) has_unknown_length: bool,
}

/// A body that is still being received.
pub(crate) struct IncomingBody {
    pub(crate) inner: BoxedBody,
    /// Boxed, because a body that is read before the lock has none.
    observers: Option<Box<Observers>>,
}

#[derive(Default)]
struct Observers {
    /// The layers that observe the body, from the inside to the outside.
    layers: SmallVec<[LayerPace; 1]>,
    timer: LazyTimer,
}

pub(crate) type BoxedBody = UnsyncBoxBody<Bytes, BoxError>;

/// A layer that observes the body of its request.
pub(crate) trait BodyObserver: Send + Sync {
    /// Sets whether the end of the body has not been read yet.
    fn set_incomplete(&self, is_incomplete: bool);

    /// Whether a lock is held at this layer.
    fn holds_lock(&self) -> bool;
}

/// One layer and its pace: while a lock is held there, the client must not be too slow.
pub(super) struct LayerPace {
    /// `None`: the layer reads the body itself, before it acquires its lock.
    pub(super) observer: Option<Arc<dyn BodyObserver>>,
    pub(super) pace: Pace,
}

impl RequestBody {
    /// Wraps a body. A body that is at its end counts as complete.
    pub fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let mut body = Some(body);
        // From an outer layer: a complete body is not read twice.
        if let Some(own) = (&mut body as &mut dyn std::any::Any).downcast_mut::<Option<Self>>() {
            return own.take().unwrap_or_default();
        }
        match body {
            Some(body) if !body.is_end_stream() => {
                let inner = body.map_err(Into::into).boxed_unsync();
                Self(Kind::Streaming(IncomingBody { inner, observers: None }))
            }
            _ => Self::default(),
        }
    }

    pub(crate) fn complete(content: ReplayBody) -> Self {
        Self(Kind::Complete(content))
    }

    /// The bytes of a complete body.
    pub(crate) fn data(&self) -> Bytes {
        match &self.0 {
            Kind::Complete(content) => content.data.clone(),
            Kind::Streaming(_) | Kind::Shared(_) => Bytes::new(),
        }
    }

    /// Whether the body is complete, and without content.
    pub(crate) fn is_empty(&self) -> bool {
        matches!(&self.0, Kind::Complete(content) if content.data.is_empty())
    }

    /// The complete body, or the stream that is left to read.
    pub(crate) fn take(&mut self) -> Result<ReplayBody, IncomingBody> {
        match mem::take(self).0 {
            Kind::Complete(content) => Ok(content),
            Kind::Streaming(streaming) => Err(streaming),
            Kind::Shared(shared) => {
                let body = shared.lock().take();
                body.unwrap_or_else(Self::taken).take()
            }
        }
    }

    /// Fails when it is read: an empty body would look complete.
    fn taken() -> Self {
        Self::new(TakenBody)
    }

    /// Makes an incomplete body accessible to extractors.
    pub(crate) fn share(self) -> (Self, Option<RequestBodyHandle>) {
        if !matches!(self.0, Kind::Streaming(_)) {
            return (self, None);
        }
        let shared = Arc::new(Mutex::new(Some(self)));
        let handle = RequestBodyHandle(Arc::downgrade(&shared));
        (Self(Kind::Shared(shared)), Some(handle))
    }

    /// Reports to this layer whether the end of the body was read, and applies its pace while a
    /// lock is held there.
    pub(crate) fn observed_by(mut self, observer: impl FnOnce() -> Arc<dyn BodyObserver>, policy: &LockPolicy) -> Self {
        match &mut self.0 {
            Kind::Complete(_) => {}
            Kind::Streaming(streaming) => {
                let observer = observer();
                observer.set_incomplete(true);
                let layer = LayerPace { observer: Some(observer), pace: Pace::from_policy(policy) };
                streaming.observers.get_or_insert_default().layers.insert(0, layer);
            }
            Kind::Shared(shared) => {
                let mut shared = shared.lock();
                *shared = shared.take().map(|body| body.observed_by(observer, policy));
            }
        }
        self
    }
}

#[cfg_attr(not(feature = "axum"), expect(dead_code, reason = "used by extractors"))]
impl RequestBodyHandle {
    /// `None`: the request has no body left, or another extractor reads it.
    pub(crate) fn take(&self) -> Option<RequestBody> {
        self.0.upgrade()?.lock().take()
    }

    /// For the handler, or the next extractor.
    pub(crate) fn put_back(&self, body: RequestBody) {
        if let Some(shared) = self.0.upgrade() {
            *shared.lock() = Some(body);
        }
    }
}

impl IncomingBody {
    /// The end of the body was read.
    pub(crate) fn finish(&mut self) {
        let layers = self.observers.take().into_iter().flat_map(|observers| observers.layers);
        layers.filter_map(|layer| layer.observer).for_each(|observer| observer.set_incomplete(false));
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let next = match Pin::new(&mut self.inner).poll_frame(cx) {
            Poll::Pending => {
                let Some(observers) = &mut self.observers else { return Poll::Pending };
                let why = ready!(poll_too_slow(&mut observers.layers, &mut observers.timer, cx));
                // The inner body is not polled again.
                self.observers = None;
                self.inner = UnsyncBoxBody::default();
                return Poll::Ready(Some(Err(why.into())));
            }
            Poll::Ready(next) => next,
        };
        if next.is_none() || self.inner.is_end_stream() {
            self.finish();
        } else if let (Some(Ok(frame)), Some(observers)) = (&next, &mut self.observers) {
            record(&mut observers.layers, frame.data_ref().map_or(0, Bytes::len));
        }
        Poll::Ready(next)
    }
}

/// Records the progress of a body at these layers.
pub(super) fn record(layers: &mut [LayerPace], bytes: usize) {
    for layer in layers {
        layer.pace().record(Instant::now(), bytes as u64);
    }
}

/// Ready when the client was too slow for one of these layers.
pub(super) fn poll_too_slow(layers: &mut [LayerPace], timer: &mut LazyTimer, cx: &mut Context<'_>) -> Poll<TooSlow> {
    if Handle::try_current().is_err() {
        return Poll::Pending;
    }
    loop {
        let now = Instant::now();
        let mut look_at = None;
        for layer in &mut *layers {
            let pace = layer.pace();
            pace.start_waiting(now);
            if let Some(why) = pace.check(now) {
                return Poll::Ready(why);
            }
            look_at = [look_at, pace.next_check()].into_iter().flatten().min();
        }
        ready!(timer.poll(look_at, cx));
    }
}

impl LayerPace {
    /// Resets the pace while no lock is held: then the client blocks no other request. A lock that
    /// is acquired meanwhile counts from the next check on.
    fn pace(&mut self) -> &mut Pace {
        if self.observer.as_ref().is_some_and(|observer| !observer.holds_lock()) {
            self.pace.reset();
        }
        &mut self.pace
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            Kind::Complete(content) => Poll::Ready(content.next().map(Ok)),
            Kind::Streaming(streaming) => streaming.poll_frame(cx),
            Kind::Shared(shared) => {
                // Outside of the mutex: the inner body may run any code.
                let body = shared.lock().take();
                let mut body = body.unwrap_or_else(Self::taken);
                let next = Pin::new(&mut body).poll_frame(cx);
                *shared.lock() = Some(body);
                next
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Complete(content) => content.is_end_stream(),
            Kind::Streaming(streaming) => streaming.inner.is_end_stream(),
            Kind::Shared(shared) => shared.lock().as_ref().is_some_and(Self::is_end_stream),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Complete(content) => content.size_hint(),
            Kind::Streaming(streaming) => streaming.inner.size_hint(),
            Kind::Shared(shared) => shared.lock().as_ref().map_or_else(SizeHint::new, Self::size_hint),
        }
    }
}

/// Stands for a body that is read elsewhere.
pub(super) struct TakenBody;

impl Body for TakenBody {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(Some(Err("an extractor that acquires a lock has not read this request body to its end")))
    }
}

impl ReplayBody {
    fn next(&mut self) -> Option<Frame<Bytes>> {
        if self.data.is_empty() {
            self.trailers.take().map(|trailers| Frame::trailers(*trailers))
        } else {
            Some(Frame::data(mem::take(&mut self.data)))
        }
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    /// Exact, unless trailers follow a body of unknown length: a proxy that knows the length sends
    /// a `Content-Length`, and then no trailers.
    fn size_hint(&self) -> SizeHint {
        let len = self.data.len() as u64;
        if self.trailers.is_none() || !self.has_unknown_length {
            return SizeHint::with_exact(len);
        }
        let mut at_least = SizeHint::new();
        at_least.set_lower(len);
        at_least
    }
}

impl Default for Kind {
    fn default() -> Self {
        Self::Complete(ReplayBody::default())
    }
}

impl fmt::Debug for RequestBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if matches!(self.0, Kind::Complete(_)) { "complete" } else { "streaming" };
        write!(f, "RequestBody({kind})")
    }
}
