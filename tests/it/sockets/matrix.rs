//! Every kind of answer, and clients that know to the byte when it has ended.

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

use crate::support::wire::{Cut, Http2, Reply, Wire};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    Http1,
    Http2,
}

/// One kind of answer, and what a client sees of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ending {
    path: &'static str,
    make: fn() -> Response<Body>,
    sees: Sees,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sees {
    /// So many bytes, to the end.
    Bytes(usize),
    /// The same, and trailers.
    Trailers(usize),
    /// A head, and nothing to be read behind it.
    Head(u16),
    /// What ends before its end.
    Cut,
}

/// What a body does next.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Data(usize),
    Trailers,
    Error,
    /// Says this.
    Panic(&'static str),
}

/// Who says how long the body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Says {
    Nobody,
    /// Its size hint.
    Size,
    /// Its size hint, and it knows its last frame.
    SizeAndEnd,
}

/// A body that goes through its steps, with a pause before each and before its end, or with none.
pub(crate) struct Steps {
    steps: VecDeque<Step>,
    says: Says,
    left: usize,
    /// So many steps come without a pause.
    at_once: usize,
    pause: Option<Pin<Box<Sleep>>>,
}

/// A client of one instance, which stays connected as long as it is let.
pub(crate) struct Client {
    address: SocketAddr,
    version: Version,
    connection: Option<Connection>,
}

enum Connection {
    Http1(Wire),
    Http2(Http2),
}

/// A body longer than what is looked at before its head is sent, in frames and in bytes.
const LONG: [Step; 40] = [Step::Data(5000); 40];
const LONG_BYTES: usize = 200_000;
const SHORT: [Step; 3] = [Step::Data(10); 3];

pub(crate) const ENDINGS: [Ending; 27] = [
    ending("/empty", Response::default, Sees::Head(200)),
    ending("/204", || with_status(204), Sees::Head(204)),
    ending("/304", || with_status(304), Sees::Head(304)),
    ending("/head/text", || Response::new("0123456789".into()), Sees::Head(200)),
    ending("/head/stream", endless, Sees::Head(200)),
    ending("/head/announced", || announced(1000, paused(SHORT, Says::Nobody)), Sees::Head(200)),
    ending("/ten-bytes", || Response::new("0123456789".into()), Sees::Bytes(10)),
    ending("/large", || Response::new(vec![b'x'; 300_000].into()), Sees::Bytes(300_000)),
    ending("/header/paused", || announced(30, paused(SHORT, Says::Nobody)), Sees::Bytes(30)),
    ending("/header/long", || announced(LONG_BYTES, ready_made(LONG, Says::Nobody)), Sees::Bytes(LONG_BYTES)),
    ending("/header/paused-long", || announced(LONG_BYTES, paused(LONG, Says::Nobody)), Sees::Bytes(LONG_BYTES)),
    ending("/header/at-once", || announced(10, then_a_pause()), Sees::Bytes(10)),
    ending("/both/paused", || announced(30, paused(SHORT, Says::Size)), Sees::Bytes(30)),
    ending("/both/paused-knows", || announced(30, paused(SHORT, Says::SizeAndEnd)), Sees::Bytes(30)),
    ending("/size/paused", || sized(SHORT, Says::Size, true), Sees::Bytes(30)),
    ending("/size/long", || sized(LONG, Says::Size, false), Sees::Bytes(LONG_BYTES)),
    ending("/size/paused-knows", || sized(SHORT, Says::SizeAndEnd, true), Sees::Bytes(30)),
    ending("/size/long-knows", || sized(LONG, Says::SizeAndEnd, false), Sees::Bytes(LONG_BYTES)),
    ending("/unsized/paused", || Response::new(paused(SHORT, Says::Nobody)), Sees::Bytes(30)),
    ending("/unsized/long", || Response::new(ready_made(LONG, Says::Nobody)), Sees::Bytes(LONG_BYTES)),
    ending("/unsized/nothing", || Response::new(paused([], Says::Nobody)), Sees::Bytes(0)),
    ending("/trailers/ready", || with_trailers(false), Sees::Trailers(10)),
    ending("/trailers/paused", || with_trailers(true), Sees::Trailers(10)),
    ending("/error/ready", || Response::new(ready_made([Step::Data(10), Step::Error], Says::Nobody)), Sees::Cut),
    ending("/error/first", || Response::new(paused([Step::Error], Says::Nobody)), Sees::Cut),
    ending("/error/paused", || Response::new(paused([Step::Data(10), Step::Error], Says::Nobody)), Sees::Cut),
    ending("/error/announced", || announced(30, paused([Step::Data(10), Step::Error], Says::Nobody)), Sees::Cut),
];

/// They announce that nothing will come, and have not ended: nobody asks for a body of no length.
pub(crate) const NOTHING: [Ending; 2] = [
    ending("/header/zero", || announced(0, paused([], Says::Nobody)), Sees::Bytes(0)),
    ending("/size/zero", || sized([], Says::Size, true), Sees::Bytes(0)),
];

/// So long a finished answer is withheld for its lock to be released.
const RELEASE_WAIT: Duration = Duration::from_millis(250);

/// Each ending has a key of its own, and they are gone through side by side. Whoever has read the end asks another
/// instance at once, which refuses at once whoever cannot have the key: nobody is refused.
pub(crate) async fn whoever_read_the_end_is_served_elsewhere(
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
            let answer = clients[round % 2].ask(ending.method(), ending.path).await;
            let took_before = std::mem::replace(&mut took, began.elapsed());
            if matches!(answer, Ok(Reply { status: 409, .. })) {
                // A machine without time: after so long an answer goes out though its lock is not
                // released.
                refused += usize::from(took_before < RELEASE_WAIT);
            } else {
                ending.is_seen(version, &answer);
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

/// A service with all endings, each under a key of its own.
pub(crate) fn service(locks: &LockManager) -> Router {
    let all = ENDINGS.iter().chain(&NOTHING);
    let router = all.fold(Router::new(), |router, ending| router.route(ending.path, get(async || (ending.make)())));
    router.route_layer(LockLayer::new(locks, key::from_parts(|parts| ("ending", parts.uri.path().to_owned()))))
}

const fn ending(path: &'static str, make: fn() -> Response<Body>, sees: Sees) -> Ending {
    Ending { path, make, sees }
}

fn paused<const N: usize>(steps: [Step; N], says: Says) -> Body {
    Body::new(Steps::new(steps, says, true))
}

fn ready_made<const N: usize>(steps: [Step; N], says: Says) -> Body {
    Body::new(Steps::new(steps, says, false))
}

/// All of it is at hand, but that it ends.
fn then_a_pause() -> Body {
    Body::new(Steps { at_once: 1, ..Steps::new([Step::Data(10)], Says::Nobody, true) })
}

/// Its size is told by the body, and Axum may put it into the head.
fn sized<const N: usize>(steps: [Step; N], says: Says, paused: bool) -> Response<Body> {
    Response::new(Body::new(Steps::new(steps, says, paused)))
}

/// Its size is told by the head.
fn announced(length: usize, body: Body) -> Response<Body> {
    Response::builder().header(header::CONTENT_LENGTH, length).body(body).expect("a response")
}

fn endless() -> Response<Body> {
    Response::new(paused([Step::Data(10); 10_000], Says::Nobody))
}

/// With a body that nobody will ask for, and that does not end.
fn with_status(status: u16) -> Response<Body> {
    let mut response = endless();
    *response.status_mut() = status.try_into().expect("a status");
    response
}

fn with_trailers(paused: bool) -> Response<Body> {
    let body = Steps::new([Step::Data(10), Step::Trailers], Says::Nobody, paused);
    Response::builder().header(header::TRAILER, "x-end").body(Body::new(body)).expect("a response")
}

// === impl Ending ===

impl Ending {
    fn method(&self) -> &'static str {
        if self.path.starts_with("/head/") { "HEAD" } else { "GET" }
    }

    fn is_seen(&self, version: Version, answer: &Result<Reply, Cut>) {
        let seen = match answer {
            Ok(Reply { status: 200, has_trailers: true, len, .. }) => Sees::Trailers(*len),
            Ok(Reply { len: 0, status, .. }) if matches!(self.sees, Sees::Head(_)) => Sees::Head(*status),
            Ok(Reply { status: 200, len, .. }) => Sees::Bytes(*len),
            Ok(_) | Err(Cut) => Sees::Cut,
        };
        assert_eq!(seen, self.sees, "{} over {version:?}: {answer:?}", self.path);
    }
}

// === impl Steps ===

impl Steps {
    pub(crate) fn new(steps: impl Into<VecDeque<Step>>, says: Says, paused: bool) -> Self {
        let steps = steps.into();
        let left = steps.iter().map(|step| if let Step::Data(len) = step { *len } else { 0 }).sum();
        Self { steps, says, left, at_once: if paused { 0 } else { usize::MAX }, pause: None }
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
            Step::Panic(says) => panic!("{says}"),
        }))
    }

    fn size_hint(&self) -> SizeHint {
        if self.says == Says::Nobody { SizeHint::new() } else { SizeHint::with_exact(self.left as u64) }
    }

    fn is_end_stream(&self) -> bool {
        self.says == Says::SizeAndEnd && self.left == 0
    }
}

// === impl Client ===

impl Client {
    pub(crate) fn new(address: SocketAddr, version: Version) -> Self {
        Self { address, version, connection: None }
    }

    /// Asks, and reads the answer to its end.
    pub(crate) async fn ask(&mut self, method: &str, path: &str) -> Result<Reply, Cut> {
        let connection = match (&mut self.connection, self.version) {
            (Some(connection), _) => connection,
            (none, Version::Http1) => none.insert(Connection::Http1(Wire::connect(self.address).await)),
            (none, Version::Http2) => none.insert(Connection::Http2(Http2::connect(self.address).await)),
        };
        let answer = match connection {
            Connection::Http1(wire) => {
                wire.write(format!("{method} {path} HTTP/1.1\r\nhost: x\r\nte: trailers\r\n\r\n")).await;
                wire.answer(method == "HEAD").await
            }
            Connection::Http2(http2) => http2.answer(method, path).await,
        };
        // Of HTTP/2 only the stream is gone.
        if answer.is_err() && self.version == Version::Http1 {
            self.connection = None;
        }
        answer
    }
}
