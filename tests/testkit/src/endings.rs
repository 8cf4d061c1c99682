//! Every kind of response, and clients that know the exact byte of its end.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, Response, header},
    routing::get,
};
use futures_util::future::join_all;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};
use tower_lock::{LockLayer, LockManager, key};

use crate::http::{Client, Cut, Reply, Version};

/// One kind of response, and how a client sees it.
#[derive(Clone, Copy, Debug)]
pub struct Ending {
    path: &'static str,
    make: fn() -> Response<Body>,
    sees: Sees,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sees {
    /// This many bytes, to the end.
    Bytes(usize),
    /// The same, and trailers.
    Trailers(usize),
    /// A head without a body.
    Head(u16),
    /// An early end.
    Cut,
}

/// The next step of a body.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// A frame of this many bytes.
    Data(usize),
    /// The trailer `x-end: 1`.
    Trailers,
    /// An error instead of a frame.
    Error,
    /// Panics with this message.
    Panic(&'static str),
}

/// The source of the size of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeSource {
    /// None: the size is unknown.
    Nobody,
    /// The size hint.
    Size,
    /// The size hint, and `is_end_stream` at the last frame.
    SizeAndEnd,
}

/// A body that takes its steps, with or without a pause before each and before its end.
#[derive(Debug)]
pub struct Steps {
    steps: VecDeque<Step>,
    size_source: SizeSource,
    left: usize,
    /// The number of steps without a pause.
    at_once: usize,
    pause: Option<Pin<Box<Sleep>>>,
}

/// A body longer than the frames and bytes that are read before its head is sent.
const LONG: [Step; 40] = [Step::Data(5000); 40];
const LONG_BYTES: usize = 200_000;
const SHORT: [Step; 3] = [Step::Data(10); 3];

/// Responses of each kind.
pub const ENDINGS: [Ending; 27] = [
    ending("/empty", Response::default, Sees::Head(200)),
    ending("/204", || with_status(204), Sees::Head(204)),
    ending("/304", || with_status(304), Sees::Head(304)),
    ending("/head/text", || Response::new("0123456789".into()), Sees::Head(200)),
    ending("/head/stream", endless, Sees::Head(200)),
    ending("/head/announced", || announced(1000, paused(SHORT, SizeSource::Nobody)), Sees::Head(200)),
    ending("/ten-bytes", || Response::new("0123456789".into()), Sees::Bytes(10)),
    ending("/large", || Response::new(vec![b'x'; 300_000].into()), Sees::Bytes(300_000)),
    ending("/header/paused", || announced(30, paused(SHORT, SizeSource::Nobody)), Sees::Bytes(30)),
    ending("/header/long", || announced(LONG_BYTES, ready_made(LONG, SizeSource::Nobody)), Sees::Bytes(LONG_BYTES)),
    ending("/header/paused-long", || announced(LONG_BYTES, paused(LONG, SizeSource::Nobody)), Sees::Bytes(LONG_BYTES)),
    ending("/header/at-once", || announced(10, then_a_pause()), Sees::Bytes(10)),
    ending("/both/paused", || announced(30, paused(SHORT, SizeSource::Size)), Sees::Bytes(30)),
    ending("/both/paused-knows", || announced(30, paused(SHORT, SizeSource::SizeAndEnd)), Sees::Bytes(30)),
    ending("/size/paused", || sized(SHORT, SizeSource::Size, true), Sees::Bytes(30)),
    ending("/size/long", || sized(LONG, SizeSource::Size, false), Sees::Bytes(LONG_BYTES)),
    ending("/size/paused-knows", || sized(SHORT, SizeSource::SizeAndEnd, true), Sees::Bytes(30)),
    ending("/size/long-knows", || sized(LONG, SizeSource::SizeAndEnd, false), Sees::Bytes(LONG_BYTES)),
    ending("/unsized/paused", || Response::new(paused(SHORT, SizeSource::Nobody)), Sees::Bytes(30)),
    ending("/unsized/long", || Response::new(ready_made(LONG, SizeSource::Nobody)), Sees::Bytes(LONG_BYTES)),
    ending("/unsized/nothing", || Response::new(paused([], SizeSource::Nobody)), Sees::Bytes(0)),
    ending("/trailers/ready", || with_trailers(false), Sees::Trailers(10)),
    ending("/trailers/paused", || with_trailers(true), Sees::Trailers(10)),
    ending("/error/ready", || Response::new(ready_made([Step::Data(10), Step::Error], SizeSource::Nobody)), Sees::Cut),
    ending("/error/first", || Response::new(paused([Step::Error], SizeSource::Nobody)), Sees::Cut),
    ending("/error/paused", || Response::new(paused([Step::Data(10), Step::Error], SizeSource::Nobody)), Sees::Cut),
    ending("/error/announced", || announced(30, paused([Step::Data(10), Step::Error], SizeSource::Nobody)), Sees::Cut),
];

/// They announce an empty body that has not ended: a body without a length is not polled.
pub const NOTHING: [Ending; 2] = [
    ending("/header/zero", || announced(0, paused([], SizeSource::Nobody)), Sees::Bytes(0)),
    ending("/size/zero", || sized([], SizeSource::Size, true), Sees::Bytes(0)),
];

/// The maximum delay of a complete response for its release.
const RELEASE_WAIT: Duration = Duration::from_millis(250);

/// Each ending has its own key, and they run concurrently. A client that has read the end sends a
/// request to another instance, which rejects busy keys at once: none is rejected.
pub async fn assert_next_request_is_served_elsewhere(
    endings: &[Ending],
    instances: [SocketAddr; 2],
    version: Version,
    rounds: usize,
) {
    let refused: Vec<_> = join_all(endings.iter().map(|ending| async move {
        let mut clients = instances.map(|address| Client::new(address, version));
        let (mut refused, mut took) = (0, Duration::ZERO);
        for round in 0..rounds {
            let began = Instant::now();
            let response = clients[round % 2].request(ending.method(), ending.path).await;
            let took_before = std::mem::replace(&mut took, began.elapsed());
            if matches!(response, Ok(Reply { status: 409, .. })) {
                // On an overloaded machine: after this time the response is sent before the
                // release.
                refused += usize::from(took_before < RELEASE_WAIT);
            } else {
                ending.is_seen(version, &response);
            }
        }
        (ending.path, refused)
    }))
    .await
    .into_iter()
    .filter(|(_, refused)| *refused > 0)
    .collect();
    assert!(refused.is_empty(), "refused by their own last request, in {rounds} rounds of {version:?}: {refused:?}");
}

/// A service with all endings, each under its own key.
pub fn service(locks: &LockManager) -> Router {
    let all = ENDINGS.iter().chain(&NOTHING);
    let router = all.fold(Router::new(), |router, ending| router.route(ending.path, get(async || (ending.make)())));
    router.route_layer(LockLayer::new(locks, key::from_parts(|parts| ("ending", parts.uri.path().to_owned()))))
}

const fn ending(path: &'static str, make: fn() -> Response<Body>, sees: Sees) -> Ending {
    Ending { path, make, sees }
}

fn paused<const N: usize>(steps: [Step; N], size_source: SizeSource) -> Body {
    Body::new(Steps::new(steps, size_source, true))
}

fn ready_made<const N: usize>(steps: [Step; N], size_source: SizeSource) -> Body {
    Body::new(Steps::new(steps, size_source, false))
}

/// All of it is ready, except for its end.
fn then_a_pause() -> Body {
    Body::new(Steps { at_once: 1, ..Steps::new([Step::Data(10)], SizeSource::Nobody, true) })
}

/// The size comes from the body, and Axum may set it in the head.
fn sized<const N: usize>(steps: [Step; N], size_source: SizeSource, paused: bool) -> Response<Body> {
    Response::new(Body::new(Steps::new(steps, size_source, paused)))
}

/// The size comes from the head.
fn announced(length: usize, body: Body) -> Response<Body> {
    Response::builder().header(header::CONTENT_LENGTH, length).body(body).expect("a response")
}

fn endless() -> Response<Body> {
    Response::new(paused([Step::Data(10); 10_000], SizeSource::Nobody))
}

/// With a body that is not polled and does not end.
fn with_status(status: u16) -> Response<Body> {
    let mut response = endless();
    *response.status_mut() = status.try_into().expect("a status");
    response
}

fn with_trailers(paused: bool) -> Response<Body> {
    let body = Steps::new([Step::Data(10), Step::Trailers], SizeSource::Nobody, paused);
    Response::builder().header(header::TRAILER, "x-end").body(Body::new(body)).expect("a response")
}

// === impl Ending ===

impl Ending {
    fn method(&self) -> &'static str {
        if self.path.starts_with("/head/") { "HEAD" } else { "GET" }
    }

    fn is_seen(&self, version: Version, response: &Result<Reply, Cut>) {
        let seen = match response {
            Ok(Reply { status: 200, has_trailers: true, len, .. }) => Sees::Trailers(*len),
            Ok(Reply { len: 0, status, .. }) if matches!(self.sees, Sees::Head(_)) => Sees::Head(*status),
            Ok(Reply { status: 200, len, .. }) => Sees::Bytes(*len),
            Ok(_) | Err(Cut) => Sees::Cut,
        };
        assert_eq!(seen, self.sees, "{} over {version:?}: {response:?}", self.path);
    }
}

// === impl Steps ===

impl Steps {
    /// A body that pauses before each step and before its end, if it is `paused`.
    pub fn new(steps: impl Into<VecDeque<Step>>, size_source: SizeSource, paused: bool) -> Self {
        let steps = steps.into();
        let left = steps.iter().map(|step| if let Step::Data(len) = step { *len } else { 0 }).sum();
        Self { steps, size_source, left, at_once: if paused { 0 } else { usize::MAX }, pause: None }
    }
}

impl HttpBody for Steps {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        if let Some(at_once) = self.at_once.checked_sub(1) {
            self.at_once = at_once;
        } else {
            let pause = self.pause.get_or_insert_with(|| Box::pin(sleep(Duration::from_millis(1))));
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        Poll::Ready(self.steps.pop_front().map(|step| match step {
            Step::Data(len) => {
                self.left -= len;
                Ok(Frame::data(Bytes::from(vec![b'x'; len])))
            }
            Step::Trailers => {
                let mut trailers = HeaderMap::new();
                trailers.insert("x-end", "1".parse().expect("a value"));
                Ok(Frame::trailers(trailers))
            }
            Step::Error => Err("broken"),
            Step::Panic(size_source) => panic!("{size_source}"),
        }))
    }

    fn size_hint(&self) -> SizeHint {
        if self.size_source == SizeSource::Nobody { SizeHint::new() } else { SizeHint::with_exact(self.left as u64) }
    }

    fn is_end_stream(&self) -> bool {
        self.size_source == SizeSource::SizeAndEnd && self.left == 0
    }
}
