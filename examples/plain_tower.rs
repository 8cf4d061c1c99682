//! A Tower service without Axum: keys from the head of the request. Its body, of whatever type, is complete when the lock is taken.
//!
//! ```sh
//! cargo run --example plain_tower --no-default-features --features memory
//! ```

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_lock::{HeldLock, LockLayer, LockManager, key, middleware::RequestBody};

async fn transfer(request: Request<RequestBody>) -> Result<Response<Full<Bytes>>, Infallible> {
    let token = request.extensions().get::<HeldLock>().map(|lock| lock.fencing_token().to_string());
    tokio::time::sleep(Duration::from_millis(50)).await;
    Ok(Response::new(Full::from(token.unwrap_or_default())))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let locks = LockManager::in_memory();
    // Parsed, not as text: `007` and `7` are one account.
    let by_account = key::from_parts(|head| {
        let account = head.headers.get("x-account").and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        account.map(|id| ("account", id)).ok_or(StatusCode::BAD_REQUEST)
    });
    let service = ServiceBuilder::new()
        .layer(LockLayer::new(&locks, by_account).route_name("transfer"))
        .service(service_fn(transfer));

    let ask = |account: &'static str| {
        let service = service.clone();
        async move {
            let request = Request::post("/").header("x-account", account).body(Full::<Bytes>::default())?;
            let answer = service.oneshot(request).await?;
            let status = answer.status();
            let body = answer.into_body().collect().await?.to_bytes();
            println!("account {account:>4}: {status} {}", String::from_utf8_lossy(&body));
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        }
    };
    println!("Four at the same moment, two of them for one account:\n");
    tokio::try_join!(ask("7"), ask("007"), ask("8"), ask("nine"))?;
    Ok(())
}
