//! Every kind of response, and clients that know the exact byte of its end.

use std::{net::SocketAddr, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{Response, header},
    routing::get,
};
use futures_util::future::join_all;
use tokio::time::Instant;
use tower_lock::{LockLayer, LockManager, key};

use crate::{
    body::{ScriptedBody, Step, paused},
    http::{Client, Cut, Reply, Version},
};

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

/// A body longer than the frames and bytes that are read before its head is sent.
const LONG: [Step; 40] = [Step::Data(5000); 40];
const LONG_BYTES: usize = 200_000;
const SHORT: [Step; 3] = [Step::Data(10); 3];
const BROKEN: [Step; 2] = [Step::Data(10), Step::Error("broken")];
const WITH_TRAILERS: [Step; 2] = [Step::Data(10), Step::Trailers];

/// Responses of each kind.
pub const ENDINGS: [Ending; 27] = [
    ending("/empty", Response::default, Sees::Head(200)),
    ending("/204", || with_status(204), Sees::Head(204)),
    ending("/304", || with_status(304), Sees::Head(304)),
    ending("/head/text", || Response::new("0123456789".into()), Sees::Head(200)),
    ending("/head/stream", endless, Sees::Head(200)),
    ending("/head/announced", || announced(1000, body(&paused(&SHORT))), Sees::Head(200)),
    ending("/ten-bytes", || Response::new("0123456789".into()), Sees::Bytes(10)),
    ending("/large", || Response::new(vec![b'x'; 300_000].into()), Sees::Bytes(300_000)),
    ending("/header/paused", || announced(30, body(&paused(&SHORT))), Sees::Bytes(30)),
    ending("/header/long", || announced(LONG_BYTES, body(&LONG)), Sees::Bytes(LONG_BYTES)),
    ending("/header/paused-long", || announced(LONG_BYTES, body(&paused(&LONG))), Sees::Bytes(LONG_BYTES)),
    ending("/header/at-once", || announced(10, body(&[Step::Data(10), Step::Pause])), Sees::Bytes(10)),
    ending("/both/paused", || announced(30, Body::new(sized(&paused(&SHORT)))), Sees::Bytes(30)),
    ending("/both/paused-knows", || announced(30, Body::new(sized(&paused(&SHORT)).know_end())), Sees::Bytes(30)),
    ending("/size/paused", || Response::new(Body::new(sized(&paused(&SHORT)))), Sees::Bytes(30)),
    ending("/size/long", || Response::new(Body::new(sized(&LONG))), Sees::Bytes(LONG_BYTES)),
    ending("/size/paused-knows", || Response::new(Body::new(sized(&paused(&SHORT)).know_end())), Sees::Bytes(30)),
    ending("/size/long-knows", || Response::new(Body::new(sized(&LONG).know_end())), Sees::Bytes(LONG_BYTES)),
    ending("/unsized/paused", || Response::new(body(&paused(&SHORT))), Sees::Bytes(30)),
    ending("/unsized/long", || Response::new(body(&LONG)), Sees::Bytes(LONG_BYTES)),
    ending("/unsized/nothing", || Response::new(body(&[Step::Pause])), Sees::Bytes(0)),
    ending("/trailers/ready", || with_trailers(&WITH_TRAILERS), Sees::Trailers(10)),
    ending("/trailers/paused", || with_trailers(&paused(&WITH_TRAILERS)), Sees::Trailers(10)),
    ending("/error/ready", || Response::new(body(&BROKEN)), Sees::Cut),
    ending("/error/first", || Response::new(body(&paused(&[Step::Error("broken")]))), Sees::Cut),
    ending("/error/paused", || Response::new(body(&paused(&BROKEN))), Sees::Cut),
    ending("/error/announced", || announced(30, body(&paused(&BROKEN))), Sees::Cut),
];

/// They announce an empty body that has not ended: a body without a length is not polled.
pub const NOTHING: [Ending; 2] = [
    ending("/header/zero", || announced(0, body(&[Step::Pause])), Sees::Bytes(0)),
    ending("/size/zero", || Response::new(Body::new(sized(&[Step::Pause]))), Sees::Bytes(0)),
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

fn body(steps: &[Step]) -> Body {
    Body::new(ScriptedBody::new(steps.to_vec()))
}

/// The size comes from the body, and Axum may set it in the head.
fn sized(steps: &[Step]) -> ScriptedBody {
    ScriptedBody::new(steps.to_vec()).announce_steps()
}

/// The size comes from the head.
fn announced(length: usize, body: Body) -> Response<Body> {
    Response::builder().header(header::CONTENT_LENGTH, length).body(body).expect("a response")
}

fn endless() -> Response<Body> {
    Response::new(body(&paused(&[Step::Data(10); 10_000])))
}

/// With a body that is not polled and does not end.
fn with_status(status: u16) -> Response<Body> {
    let mut response = endless();
    *response.status_mut() = status.try_into().expect("a status");
    response
}

fn with_trailers(steps: &[Step]) -> Response<Body> {
    Response::builder().header(header::TRAILER, "x-end").body(body(steps)).expect("a response")
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
