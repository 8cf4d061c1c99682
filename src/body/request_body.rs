//! The body of a request on its way in: complete before the lock is taken, or streaming under it.

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
use tokio::{
    runtime::Handle,
    time::{Instant, Sleep, sleep_until},
};
use tower::BoxError;

use super::pace::{Pace, TooSlow};
use crate::{policy::LockPolicy, sync::Mutex};

/// The body of a request that went through a [`LockLayer`](crate::LockLayer) or a [`LockManagerLayer`](crate::LockManagerLayer).
///
/// Complete in memory, as [`request_body`](crate::LockLayer::request_body) has it by default; or as it comes. Size hint and trailers go through.
/// Axum's handlers never see it; a plain Tower service takes `Request<RequestBody>`.
#[derive(Default)]
pub struct RequestBody(Kind);

enum Kind {
    Complete(Content),
    /// In a box: what is complete has none.
    Streaming(Box<Streaming>),
    /// Within reach of the extractors; `None` while one of them reads it.
    Shared(Arc<Mutex<Option<RequestBody>>>),
}

/// Where an extractor that takes a lock finds the body of its request: in the extensions.
///
/// It does not own the body: a copy of the extensions keeps no upload open.
#[derive(Clone)]
pub(crate) struct SharedBody(Weak<Mutex<Option<RequestBody>>>);

/// The bytes and trailers of a body that was read, as the inner service gets them.
#[derive(Debug, Default)]
pub(crate) struct Content {
    pub(crate) data: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
    /// The sender did not say how long it would be.
    pub(crate) is_unannounced: bool,
}

/// A body that is not complete yet.
pub(crate) struct Streaming {
    pub(crate) inner: Incoming,
    /// Whoever waits for its end, from the inside to the outside.
    watches: SmallVec<[Watch; 1]>,
    timer: LazyTimer,
}

/// Rings when it is to be looked again, or too early: it is not set anew with each frame.
#[derive(Debug, Default)]
pub(crate) struct LazyTimer(Option<Pin<Box<Sleep>>>);

pub(crate) type Incoming = UnsyncBoxBody<Bytes, BoxError>;

/// A layer that observes the body of its request.
pub(crate) trait BodyObserver: Send + Sync {
    /// Sets whether the end of the body has not been read yet.
    fn set_incomplete(&self, is_incomplete: bool);

    /// Whether a lock is held at this layer.
    fn holds_lock(&self) -> bool;
}

/// One layer: while a lock is held there, the client must not be too slow.
struct Watch {
    observer: Arc<dyn BodyObserver>,
    pace: Pace,
}

impl RequestBody {
    /// A body of any kind. What is at its end already is complete.
    pub fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let mut body = Some(body);
        // Of a layer of ours further out: what is complete is not read once more.
        if let Some(own) = (&mut body as &mut dyn std::any::Any).downcast_mut::<Option<Self>>() {
            return own.take().unwrap_or_default();
        }
        match body {
            Some(body) if !body.is_end_stream() => {
                let inner = body.map_err(Into::into).boxed_unsync();
                Self(Kind::Streaming(Box::new(Streaming {
                    inner,
                    watches: SmallVec::new(),
                    timer: LazyTimer::default(),
                })))
            }
            _ => Self::default(),
        }
    }

    pub(crate) fn complete(content: Content) -> Self {
        Self(Kind::Complete(content))
    }

    /// The bytes of a complete body.
    pub(crate) fn data(&self) -> Bytes {
        match &self.0 {
            Kind::Complete(content) => content.data.clone(),
            Kind::Streaming(_) | Kind::Shared(_) => Bytes::new(),
        }
    }

    fn is_complete(&self) -> bool {
        matches!(self.0, Kind::Complete(_))
    }

    /// The content of a complete body, or the stream that is still to be read.
    pub(crate) fn take(&mut self) -> Result<Content, Box<Streaming>> {
        match mem::take(self).0 {
            Kind::Complete(content) => Ok(content),
            Kind::Streaming(streaming) => Err(streaming),
            Kind::Shared(shared) => {
                let body = shared.lock().take();
                body.unwrap_or_else(Self::taken).take()
            }
        }
    }

    /// Ends with an error: an empty body would pass for a complete one.
    fn taken() -> Self {
        Self::new(Taken)
    }

    /// Puts a body that is not complete within reach of the extractors.
    pub(crate) fn shared(self) -> (Self, Option<SharedBody>) {
        if !matches!(self.0, Kind::Streaming(_)) {
            return (self, None);
        }
        let shared = Arc::new(Mutex::new(Some(self)));
        let handle = SharedBody(Arc::downgrade(&shared));
        (Self(Kind::Shared(shared)), Some(handle))
    }

    /// As long as its end was not read, the request is incomplete for this slot; and while a lock is held there, the client may not be too slow.
    pub(crate) fn watched_by(mut self, observer: Arc<dyn BodyObserver>, policy: &LockPolicy) -> Self {
        match &mut self.0 {
            Kind::Complete(_) => {}
            Kind::Streaming(streaming) => {
                observer.set_incomplete(true);
                streaming.watches.insert(0, Watch { observer, pace: Pace::of(policy) });
            }
            Kind::Shared(shared) => {
                let mut shared = shared.lock();
                *shared = shared.take().map(|body| body.watched_by(observer, policy));
            }
        }
        self
    }
}

#[cfg_attr(not(feature = "axum"), expect(dead_code, reason = "extractors do"))]
impl SharedBody {
    /// `None`: its request has no body any more, or another extractor reads it.
    pub(crate) fn take(&self) -> Option<RequestBody> {
        self.0.upgrade()?.lock().take()
    }

    /// For the handler, or the next extractor.
    pub(crate) fn put(&self, body: RequestBody) {
        if let Some(shared) = self.0.upgrade() {
            *shared.lock() = Some(body);
        }
    }
}

impl Streaming {
    /// All of it has been read.
    pub(crate) fn is_over(&mut self) {
        for watch in self.watches.drain(..) {
            watch.observer.set_incomplete(false);
        }
        self.timer = LazyTimer::default();
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let next = match Pin::new(&mut self.inner).poll_frame(cx) {
            Poll::Pending => {
                let why = ready!(self.poll_too_slow(cx));
                // It is not asked again.
                self.watches.clear();
                self.inner = UnsyncBoxBody::default();
                return Poll::Ready(Some(Err(why.into())));
            }
            Poll::Ready(next) => next,
        };
        if next.is_none() || self.inner.is_end_stream() {
            self.is_over();
        } else if let Some(Ok(frame)) = &next {
            let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
            for watch in &mut self.watches {
                watch.pace().moved(Instant::now(), bytes);
            }
        }
        Poll::Ready(next)
    }

    /// Ready when its client has kept a lock waiting for too long.
    fn poll_too_slow(&mut self, cx: &mut Context<'_>) -> Poll<TooSlow> {
        if self.watches.is_empty() || Handle::try_current().is_err() {
            return Poll::Pending;
        }
        loop {
            let now = Instant::now();
            let mut look_at = None;
            for watch in &mut self.watches {
                let pace = watch.pace();
                pace.waits(now);
                if let Some(why) = pace.verdict(now) {
                    return Poll::Ready(why);
                }
                look_at = [look_at, pace.look_at()].into_iter().flatten().min();
            }
            ready!(self.timer.poll(look_at, cx));
        }
    }
}

impl Watch {
    /// Where no lock is held the client keeps nobody waiting. It may be taken meanwhile: then it
    /// counts from the next look on.
    fn pace(&mut self) -> &mut Pace {
        if !self.observer.holds_lock() {
            self.pace.forget();
        }
        &mut self.pace
    }
}

impl LazyTimer {
    pub(crate) fn poll(&mut self, at: Option<Instant>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(at) = at else { return Poll::Pending };
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if timer.deadline() > at {
            timer.as_mut().reset(at);
        }
        ready!(timer.as_mut().poll(cx));
        self.0 = None;
        Poll::Ready(())
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
                // Not under the mutex: the body of another layer may do anything.
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

/// In place of a body that is read elsewhere.
struct Taken;

impl Body for Taken {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(Some(Err("an extractor that takes a lock has not read this request body to its end")))
    }
}

impl Content {
    fn next(&mut self) -> Option<Frame<Bytes>> {
        if self.data.is_empty() {
            self.trailers.take().map(Frame::trailers)
        } else {
            Some(Frame::data(mem::take(&mut self.data)))
        }
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    /// Exact, but for trailers behind a body of unannounced size: a proxy that is told the size sends a
    /// `Content-Length`, and then no trailers.
    fn size_hint(&self) -> SizeHint {
        let len = self.data.len() as u64;
        if self.trailers.is_none() || !self.is_unannounced {
            return SizeHint::with_exact(len);
        }
        let mut at_least = SizeHint::new();
        at_least.set_lower(len);
        at_least
    }
}

impl fmt::Debug for Streaming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streaming").field("timer", &self.timer).finish_non_exhaustive()
    }
}

impl Default for Kind {
    fn default() -> Self {
        Self::Complete(Content::default())
    }
}

impl fmt::Debug for RequestBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_complete() { "RequestBody(complete)" } else { "RequestBody(streaming)" })
    }
}
