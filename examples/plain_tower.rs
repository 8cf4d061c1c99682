//! A Tower service without Axum: keys from the head of the request. The body, of any type, is
//! complete before the lock is acquired.
//!
//! ```sh
//! cargo run --example plain_tower
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
    // Parsed, because `007` and `7` are one account.
    let by_account = key::from_parts(|head| {
        let account = head.headers.get("x-account").and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        account.map(|id| ("account", id)).ok_or(StatusCode::BAD_REQUEST)
    });
    let service = ServiceBuilder::new()
        .layer(LockLayer::new(&locks, by_account).route_name("transfer"))
        .service(service_fn(transfer));

    let send = |account: &'static str| {
        let service = service.clone();
        async move {
            let request = Request::post("/").header("x-account", account).body(Full::<Bytes>::default())?;
            let response = service.oneshot(request).await?;
            let status = response.status();
            let body = response.into_body().collect().await?.to_bytes();
            println!("account {account:>4}: {status} {}", String::from_utf8_lossy(&body));
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        }
    };
    println!("Four requests at the same time, two of them for one account:\n");
    tokio::try_join!(send("7"), send("007"), send("8"), send("nine"))?;
    Ok(())
}
