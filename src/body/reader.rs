//! A body that is read before its lock is taken: once, within the route's limit, and given on as it came.

use std::{
    error::Error,
    future::poll_fn,
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
    budget::{Abort, NoRoom, Room, Share},
    pace::{Pace, TooSlow},
    request_body::{Content, LazyTimer, RequestBody, Streaming},
};
use crate::{policy::LockPolicy, rejection::Rejection, sync::Mutex};

/// The body of a request before its lock is taken: read by then, or when its key needs it, or not at all.
#[doc(hidden)]
#[derive(Debug)]
pub struct BodyReader<'a> {
    body: RequestBody,
    /// What it takes up while its request waits.
    share: Option<Share>,
    room: &'a Arc<Room>,
    policy: &'a LockPolicy,
}

/// What was read so far: whoever needs the bytes can take them away.
#[derive(Debug)]
struct Reading(Mutex<(Option<Gathered>, Option<Waker>)>);

/// The bytes of a body, as they come.
#[derive(Debug)]
enum Gathered {
    /// The usual case: it is not copied.
    OneFrame(Bytes),
    /// Copied at once: a frame of one byte may keep a whole buffer of its connection alive.
    Frames(BytesMut),
}

impl<'a> BodyReader<'a> {
    pub(crate) fn new(body: RequestBody, room: &'a Arc<Room>, policy: &'a LockPolicy) -> Self {
        Self { body, share: None, room, policy }
    }

    /// The bytes of the body. Once they are here they stay.
    pub(crate) async fn read(&mut self, head: &mut Parts) -> Result<Bytes, Rejection> {
        if self.share.is_none() {
            let mut share = self.room.share();
            let content = match self.body.take() {
                Ok(content) if content.data.is_empty() => content,
                Ok(content) => {
                    let len = content.data.len();
                    if len as u64 > limit(head) {
                        return Err(Rejection::BodyTooLarge);
                    }
                    share.grow(len)?;
                    content
                }
                Err(streaming) => {
                    let pace = Pace::of(self.policy);
                    gather(streaming, limit(head), &mut share, pace).await?
                }
            };
            self.share = Some(share);
            self.body = RequestBody::complete(content);
        }
        Ok(self.body.data())
    }

    /// For the inner service; its room is free when that is called.
    pub(crate) fn finish(self) -> (RequestBody, Option<Share>) {
        (self.body, self.share)
    }
}

/// Reads it to its end: within the limit, only while there is room for it, and only while its client sends it.
async fn gather(
    mut streaming: Box<Streaming>,
    limit: u64,
    share: &mut Share,
    mut pace: Pace,
) -> Result<Content, Rejection> {
    let announced = streaming.inner.size_hint();
    // Before the first poll: that is when hyper would ask for the body with `100 Continue`.
    if announced.lower() > limit {
        return Err(Rejection::BodyTooLarge);
    }
    if announced.lower() > share.room().at_most() {
        return Err(Rejection::bodies_full());
    }
    let reading = Arc::new(Reading(Mutex::new((Some(Gathered::default()), None))));
    let (mut trailers, mut left) = (None, limit);
    let mut timer = LazyTimer::default();
    loop {
        let next = poll_fn(|cx| {
            let next = Pin::new(&mut streaming.inner).poll_frame(cx);
            if next.is_ready() {
                return next.map(Ok);
            }
            // Only now: what is at hand is nobody's idle body.
            share.reads(|| Arc::clone(&reading) as _);
            if !reading.waits(cx.waker()) {
                return Poll::Ready(Err(Rejection::BodyTimeout));
            }
            poll_too_slow(&mut pace, &mut timer, cx).map(|_| Err(Rejection::BodyTimeout))
        });
        let Some(frame) = next.await? else { break };
        match frame.map_err(|error| unreadable(&*error))?.into_data() {
            Ok(bytes) => {
                pace.moved(Instant::now(), bytes.len() as u64);
                left = left.checked_sub(bytes.len() as u64).ok_or(Rejection::BodyTooLarge)?;
                // What is counted is what has come: an announced length costs its sender nothing.
                share.grow(bytes.len())?;
                reading.push(bytes);
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    share.is_complete()?;
    streaming.is_over();
    let data = reading.0.lock().0.take().ok_or(Rejection::BodyTimeout)?.into_bytes();
    Ok(Content { data, trailers, is_unannounced: announced.exact().is_none() })
}

/// Ready when the client has kept us waiting for too long.
fn poll_too_slow(pace: &mut Pace, timer: &mut LazyTimer, cx: &mut Context<'_>) -> Poll<TooSlow> {
    loop {
        let now = Instant::now();
        pace.waits(now);
        if let Some(why) = pace.verdict(now) {
            return Poll::Ready(why);
        }
        ready!(timer.poll(pace.look_at(), cx));
    }
}

/// The limit that the handler's extractors have: `DefaultBodyLimit`, 2 MB if nothing is set, and 64 MiB where it was disabled.
#[cfg(feature = "axum")]
fn limit(head: &mut Parts) -> u64 {
    use std::{convert::Infallible, mem};

    use axum::{RequestExt, extract::Request};
    use http_body::Frame;

    use crate::limits::MAX_BODY_BYTES;

    /// As long as it likes.
    struct Unannounced;

    impl Body for Unannounced {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(None)
        }
    }

    // Axum keeps the limit to itself; that it caps the size hint is how to learn it.
    let mut request = Request::new(axum::body::Body::new(Unannounced));
    mem::swap(request.extensions_mut(), &mut head.extensions);
    let mut request = request.with_limited_body();
    mem::swap(request.extensions_mut(), &mut head.extensions);
    request.body().size_hint().upper().unwrap_or(MAX_BODY_BYTES).min(MAX_BODY_BYTES)
}

/// Nobody says otherwise.
#[cfg(not(feature = "axum"))]
fn limit(_: &mut Parts) -> u64 {
    crate::limits::DEFAULT_BODY_LIMIT
}

/// A limit that a layer outside has set shows in the same error.
fn unreadable(error: &(dyn Error + 'static)) -> Rejection {
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

impl Reading {
    /// False: it was aborted.
    fn waits(&self, waker: &Waker) -> bool {
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

impl Abort for Reading {
    fn abort(&self) {
        let (gathered, waker) = std::mem::take(&mut *self.0.lock());
        drop(gathered);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl From<NoRoom> for Rejection {
    fn from(why: NoRoom) -> Self {
        match why {
            NoRoom::Full => Self::bodies_full(),
            NoRoom::Aborted => Self::BodyTimeout,
        }
    }
}

impl Default for Gathered {
    fn default() -> Self {
        Self::OneFrame(Bytes::new())
    }
}

impl Gathered {
    fn push(&mut self, frame: Bytes) {
        match self {
            Self::OneFrame(first) if first.is_empty() => *first = frame,
            Self::OneFrame(first) => {
                let mut all = BytesMut::with_capacity(first.len() + frame.len());
                all.extend_from_slice(first);
                all.extend_from_slice(&frame);
                *self = Self::Frames(all);
            }
            Self::Frames(all) => all.extend_from_slice(&frame),
        }
    }

    fn into_bytes(self) -> Bytes {
        match self {
            Self::OneFrame(bytes) => bytes,
            Self::Frames(all) => all.freeze(),
        }
    }
}
