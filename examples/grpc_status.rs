//! A gRPC service says no in the words of gRPC: a client of Tonic gets a `Status`, and knows whether it may call again.
//!
//! ```sh
//! cargo run --example grpc_status
//! ```
//!
//! One message each way, so the call is complete before its lock is taken. A method that streams its messages to the server says
//! `.request_body(RequestBodyMode::Stream)`.
//!
//! The service answers as Tonic's do: 200, and what became of the call in `grpc-status`. In a Tonic server the same layer stands in
//! `Server::builder().layer(..)`, or around one service.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body_util::{BodyExt, Empty, Full};
use tokio::{join, task::yield_now, time::sleep};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_lock::{
    LockLayer, LockManager, Rejection,
    key::{self, IntoLockKey},
    middleware::RequestBody,
};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What became of a call, in the numbers of gRPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    Ok = 0,
    Unknown = 2,
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Aborted = 10,
    Unavailable = 14,
}

/// The responder: for `LockLayer::on_reject`, or `LockManagerLayer::on_reject` for a whole server.
pub(crate) fn as_grpc(rejection: &Rejection) -> Response<Empty<Bytes>> {
    let code = match rejection {
        // Somebody else is changing it: what the caller knew of it may be old. It reads again, then calls again.
        Rejection::Busy { .. } | Rejection::TimedOut { .. } => Code::Aborted,
        Rejection::BodyTooLarge => Code::ResourceExhausted,
        Rejection::InvalidKey { .. } => Code::InvalidArgument,
        // Clients are set up to repeat UNAVAILABLE by themselves, so it is for calls that were not started.
        not_started if not_started.outcome() == "not-started" => Code::Unavailable,
        // Lost, or broken off: a part of it may be done, and nobody is to repeat that without a look. DEADLINE_EXCEEDED would say the same of
        // the work, but it is on the lists of what to repeat, too.
        _ => Code::Unknown,
    };
    let mut response = trailers_only(code, &rejection.to_string());
    // When to come back; less than zero: do not.
    let pushback = rejection.retry_after().map_or_else(|| HeaderValue::from_static("-1"), whole_milliseconds);
    response.headers_mut().insert("grpc-retry-pushback-ms", pushback);
    response
}

/// An answer without a message: what would be trailers stands in the head.
pub(crate) fn trailers_only(code: Code, message: &str) -> Response<Empty<Bytes>> {
    let mut response = Response::new(Empty::new());
    *response.headers_mut() = trailers(code, message);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

fn trailers(code: Code, message: &str) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", (code as u16).into());
    if !message.is_empty() {
        trailers.insert("grpc-message", percent_encoded(message));
    }
    trailers
}

/// As gRPC over HTTP/2 has its messages: what is printable in ASCII, but for `%`, stands as it is.
pub(crate) fn percent_encoded(text: &str) -> HeaderValue {
    let encoded: String = text
        .bytes()
        .map(|byte| match byte {
            b' '..=b'~' if byte != b'%' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect();
    HeaderValue::try_from(encoded).expect("printable ASCII")
}

fn whole_milliseconds(after: Duration) -> HeaderValue {
    u64::try_from(after.as_millis()).unwrap_or(u64::MAX).into()
}

// === the service ===

/// What a call is about is in its metadata; a message is read by the handler alone.
fn by_account(head: &http::request::Parts) -> impl IntoLockKey + use<> {
    let account = head.headers.get("x-account").and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    account.map(|id| ("account", id)).ok_or_else(|| trailers_only(Code::InvalidArgument, "x-account: a number"))
}

/// A message, and trailers behind it.
async fn transfer(
    _: Request<RequestBody>,
) -> Result<Response<impl http_body::Body<Data = Bytes, Error = Infallible>>, Infallible> {
    sleep(Duration::from_millis(100)).await;
    // Not compressed, no bytes long.
    let message = Full::new(Bytes::from_static(&[0; 5]));
    let mut response = Response::new(message.with_trailers(async { Some(Ok(trailers(Code::Ok, ""))) }));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    Ok(response)
}

// === a client ===

/// Calls, and prints what a client sees.
async fn call<S, B>(what: &str, service: S, account: &str) -> Result<(), Failure>
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
    B: http_body::Body<Error: Into<Failure>>,
{
    let request = Request::post("/shop.Accounts/Transfer")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("x-account", account)
        .body(Full::default())?;
    let (head, body) = service.oneshot(request).await?.into_parts();
    let body = body.collect().await.map_err(Into::into)?;
    let trailers = body.trailers().cloned().unwrap_or_default();
    let said = |name| {
        head.headers.get(name).or_else(|| trailers.get(name)).and_then(|value| value.to_str().ok()).unwrap_or("-")
    };
    println!(
        "  {what:<38}   {}   {:<11}   {:<22}   {}",
        head.status.as_u16(),
        said("grpc-status"),
        said("grpc-retry-pushback-ms"),
        said("grpc-message"),
    );
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let locks = LockManager::in_memory();
    let layer = || LockLayer::new(&locks, key::from_parts(by_account)).route_name("transfer").on_reject(as_grpc);
    let service = ServiceBuilder::new().layer(layer()).service(service_fn(transfer));
    let patient = ServiceBuilder::new().layer(layer().wait(Duration::from_millis(20))).service(service_fn(transfer));
    let hasty = ServiceBuilder::new().layer(layer().max_hold(Duration::from_millis(20))).service(service_fn(transfer));

    println!("  {:<38}   HTTP  grpc-status   grpc-retry-pushback-ms   grpc-message", "");
    let (first, second) = join!(
        call("the first of two", service.clone(), "7"),
        call("the second, refused at once", service.clone(), "007"),
    );
    first.and(second)?;

    let other = locks.try_lock(("account", 8)).await?;
    call("who waits, and another goes on", patient, "8").await?;
    other.release().await?;

    call("without a number", service.clone(), "eight").await?;
    call("what takes longer than it may", hasty, "9").await?;

    let (broken_off, thrown_out) = join!(call("what is thrown out by an operator", service.clone(), "10"), async {
        // As soon as it has its lock.
        while locks.force_release(("account", 10)).await?.holder().is_none() {
            yield_now().await;
        }
        Ok::<_, Failure>(())
    });
    broken_off?;
    thrown_out?;

    locks.shutdown(Duration::ZERO).await;
    call("an instance that is being shut down", service, "11").await
}
