//! Rejections as gRPC statuses: a Tonic client gets a `Status`, and knows whether it may retry.
//!
//! ```sh
//! cargo run --example grpc_status
//! ```
//!
//! One message each way, so the call is complete before its lock is acquired. A method that streams
//! messages to the server sets `.request_body(RequestBodyMode::Stream)`.
//!
//! The service responds as those of Tonic do: 200, and the result of the call in `grpc-status`. In
//! a Tonic server the same layer goes to `Server::builder().layer(..)`, or around one service.

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

/// The result of a call, as a gRPC status code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Ok = 0,
    Unknown = 2,
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Aborted = 10,
    Unavailable = 14,
}

/// For `LockLayer::on_reject`, or `LockManagerLayer::on_reject` for a whole server.
fn as_grpc(rejection: &Rejection) -> Response<Empty<Bytes>> {
    let code = match rejection {
        // Another call is changing the resource, so the data of the caller may be stale. It reads
        // again, then retries.
        Rejection::Busy { .. } | Rejection::TimedOut { .. } => Code::Aborted,
        Rejection::BodyTooLarge => Code::ResourceExhausted,
        Rejection::InvalidKey { .. } => Code::InvalidArgument,
        // Clients are often configured to retry UNAVAILABLE, so it is for calls that were not
        // started.
        not_started if not_started.outcome() == "not-started" => Code::Unavailable,
        // Lost or aborted: the call may have been partially processed, so it must not be retried
        // blindly. DEADLINE_EXCEEDED means the same, but clients are often configured to retry it.
        _ => Code::Unknown,
    };
    let mut response = trailers_only(code, &rejection.to_string());
    // When to retry; a negative value means never.
    let pushback = rejection.retry_after().map_or_else(|| HeaderValue::from_static("-1"), whole_milliseconds);
    response.headers_mut().insert("grpc-retry-pushback-ms", pushback);
    response
}

/// A response without a message: the trailers are in the head.
fn trailers_only(code: Code, message: &str) -> Response<Empty<Bytes>> {
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

/// Percent-encodes a gRPC message: printable ASCII except `%` stays as it is.
fn percent_encoded(text: &str) -> HeaderValue {
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

/// The key comes from the metadata; only the handler reads the message.
fn by_account(head: &http::request::Parts) -> impl IntoLockKey + use<> {
    let account = head.headers.get("x-account").and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    account.map(|id| ("account", id)).ok_or_else(|| trailers_only(Code::InvalidArgument, "x-account: a number"))
}

/// A message, followed by trailers.
async fn transfer(
    _: Request<RequestBody>,
) -> Result<Response<impl http_body::Body<Data = Bytes, Error = Infallible>>, Infallible> {
    sleep(Duration::from_millis(100)).await;
    // Not compressed, of length zero.
    let message = Full::new(Bytes::from_static(&[0; 5]));
    let mut response = Response::new(message.with_trailers(async { Some(Ok(trailers(Code::Ok, ""))) }));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    Ok(response)
}

// === a client ===

/// Makes a call, and prints the result as a client sees it.
async fn call<S, B>(name: &str, service: S, account: &str) -> Result<(), Failure>
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
    let header = |name| {
        head.headers.get(name).or_else(|| trailers.get(name)).and_then(|value| value.to_str().ok()).unwrap_or("-")
    };
    println!(
        "  {name:<38}   {}   {:<11}   {:<22}   {}",
        head.status.as_u16(),
        header("grpc-status"),
        header("grpc-retry-pushback-ms"),
        header("grpc-message"),
    );
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let locks = LockManager::in_memory();
    let layer = || LockLayer::new(&locks, key::from_parts(by_account)).route_name("transfer").on_reject(as_grpc);
    let service = ServiceBuilder::new().layer(layer()).service(service_fn(transfer));
    let waiting = ServiceBuilder::new().layer(layer().wait(Duration::from_millis(20))).service(service_fn(transfer));
    let short = ServiceBuilder::new().layer(layer().max_hold(Duration::from_millis(20))).service(service_fn(transfer));

    println!("  {:<38}   HTTP  grpc-status   grpc-retry-pushback-ms   grpc-message", "");
    let (first, second) = join!(
        call("the first of two", service.clone(), "7"),
        call("the second, rejected at once", service.clone(), "007"),
    );
    first.and(second)?;

    let other = locks.try_lock(("account", 8)).await?;
    call("wait timed out", waiting, "8").await?;
    other.release().await?;

    call("without a number", service.clone(), "eight").await?;
    call("longer than max_hold", short, "9").await?;

    let (aborted, revoked) = join!(call("revoked by an operator", service.clone(), "10"), async {
        // As soon as the call holds its lock.
        while locks.force_release(("account", 10)).await?.holder().is_none() {
            yield_now().await;
        }
        Ok::<_, Failure>(())
    });
    aborted?;
    revoked?;

    locks.shutdown(Duration::ZERO).await;
    call("instance is shutting down", service, "11").await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::StatusCode;
    use http_body::Body as _;
    use tower_lock::{
        lock::QueueBound,
        store::{StoreError, StoreErrorKind},
    };

    use super::*;

    /// Clients retry UNAVAILABLE automatically.
    #[test]
    fn grpc_client_does_not_retry_unknown_outcomes() {
        let retry_after = Duration::from_millis(187);
        let source = Arc::new(StoreError::new("shelf", "acquire", StoreErrorKind::Unavailable));
        for (rejection, status, pushback) in [
            (Rejection::Busy { retry_after }, "10", "187"),
            (Rejection::TimedOut { waited: Duration::ZERO, retry_after, status: StatusCode::CONFLICT }, "10", "187"),
            (Rejection::QueueFull { bound: QueueBound::Key, retry_after }, "14", "187"),
            (Rejection::StoreUnavailable { retry_after, source }, "14", "187"),
            (Rejection::ShuttingDown { retry_after }, "14", "187"),
            (Rejection::BodyTooLarge, "8", "-1"),
            (Rejection::BodyBufferFull { retry_after }, "14", "187"),
            (Rejection::InvalidKey { status: StatusCode::BAD_REQUEST, field: None, extractor: None }, "3", "-1"),
            (Rejection::Lost, "2", "-1"),
            (Rejection::HoldLimitReached, "2", "-1"),
        ] {
            let response = as_grpc(&rejection);
            assert_eq!(response.status(), StatusCode::OK, "{rejection}: gRPC has its own status");
            let header = |name: &str| response.headers()[name].to_str().expect("text");
            assert_eq!(header("content-type"), "application/grpc", "{rejection}");
            assert_eq!((header("grpc-status"), header("grpc-retry-pushback-ms")), (status, pushback), "{rejection}");
            assert_eq!(header("grpc-message"), rejection.to_string());
            assert!(response.body().is_end_stream(), "{rejection}: nothing behind the head");
        }
        for (text, encoded) in [("100 %", "100 %25"), ("für\n~", "f%C3%BCr%0A~"), ("", "")] {
            assert_eq!(percent_encoded(text), encoded);
        }
    }
}
