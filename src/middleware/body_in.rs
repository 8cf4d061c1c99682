//! A body that is read for its key: once, within the route's limit, and given on as it came.

use std::{
    convert::Infallible,
    error::Error,
    mem,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use axum::{RequestExt, body::Body, extract::Request};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, request::Parts};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use super::rejection::Rejection;
use crate::{
    defaults::BODY_BYTES,
    lock::{NoRoom, Room, Share},
};

/// A body that was read, and the room that it takes up while its request waits.
#[derive(Debug)]
pub struct Buffered {
    content: Content,
    room: Share,
}

/// The bytes and trailers of a body, as the inner service gets them.
#[derive(Debug)]
struct Content {
    data: Bytes,
    trailers: Option<HeaderMap>,
    /// Whether the sender said how long it would be.
    announced: bool,
}

/// The bytes of a body, as they come.
#[derive(Debug)]
enum Gathered {
    /// The usual case: it is not copied.
    OneFrame(Bytes),
    /// Copied at once: a frame of one byte may keep a whole buffer of its connection alive.
    Frames(BytesMut),
}

/// Reads the body within the limit that the handler's extractors have: `DefaultBodyLimit`, 2 MB if nothing is set, and
/// 64 MiB where it was disabled; and only while there is room for it.
pub(super) async fn read(request: Request, room: &Arc<Room>) -> Result<(Parts, Buffered), Rejection> {
    let announced = request.body().size_hint();
    let (parts, body) = request.with_limited_body().into_parts();
    // Axum keeps the limit to itself; that it caps the size hint is how to learn it.
    let limit = body.size_hint().upper().unwrap_or(BODY_BYTES).min(BODY_BYTES);
    // Before the first poll: that is when hyper would ask for the body with `100 Continue`.
    if announced.lower() > limit {
        return Err(Rejection::BodyTooLarge);
    }
    if announced.lower() > room.left() {
        return Err(Rejection::bodies_full());
    }
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut body = pin!(Limited::new(body, limit));
    let mut room = room.share();
    let (mut data, mut trailers) = (Gathered::default(), None);
    while let Some(frame) = body.frame().await {
        match frame.map_err(|error| unreadable(&*error))?.into_data() {
            Ok(bytes) => {
                // What is counted is what has come: an announced length costs its sender nothing.
                room.grow(bytes.len()).map_err(|NoRoom| Rejection::bodies_full())?;
                data.push(bytes);
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    let data = data.into_bytes();
    Ok((parts, Buffered { content: Content { data, trailers, announced: announced.exact().is_some() }, room }))
}

/// A limit that a layer outside has set shows in the same error.
fn unreadable(error: &(dyn Error + 'static)) -> Rejection {
    let mut causes = std::iter::successors(Some(error), |&error| error.source());
    if causes.any(<dyn Error>::is::<LengthLimitError>) {
        Rejection::BodyTooLarge
    } else {
        Rejection::BadKey { status: StatusCode::BAD_REQUEST, field: None }
    }
}

impl Buffered {
    pub(super) fn data(&self) -> Bytes {
        self.content.data.clone()
    }

    /// For the inner service; the room is free when it is called.
    pub(super) fn give_on(self) -> (Body, Share) {
        (Body::new(self.content), self.room)
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

impl http_body::Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = if self.data.is_empty() {
            self.trailers.take().map(Frame::trailers)
        } else {
            Some(Frame::data(mem::take(&mut self.data)))
        };
        Poll::Ready(frame.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    /// Exact, but for trailers behind a body of unannounced size: a proxy that is told the size sends a
    /// `Content-Length`, and then no trailers.
    fn size_hint(&self) -> SizeHint {
        let len = self.data.len() as u64;
        if self.trailers.is_none() || self.announced {
            return SizeHint::with_exact(len);
        }
        let mut at_least = SizeHint::new();
        at_least.set_lower(len);
        at_least
    }
}
