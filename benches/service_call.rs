//! What the layer adds to a request: the whole `Service::call`, from the request to the end of the body, in memory, with one key.
//!
//! ```sh
//! cargo bench --bench service_call
//! ```
//!
//! Nanoseconds are of this machine; read them against `bare`, which is in the same run. Allocations are exact.

use std::{convert::Infallible, pin::pin, sync::LazyLock};

use bytes::Bytes;
use divan::{AllocProfiler, Bencher};
use futures_util::future::poll_fn;
use http::{Request, Response};
use http_body::Body;
use http_body_util::Full;
use tokio::runtime::Runtime;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_lock::{LockKey, LockLayer, Locks, by_parts};

#[global_allocator]
static ALLOCATOR: AllocProfiler = AllocProfiler::system();

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime"));

type In = Request<Full<Bytes>>;

fn main() {
    divan::main();
}

async fn hello(_: In) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(b"hello"))))
}

fn key() -> LockKey {
    LockKey::from(("reward", 42_u64, "gold"))
}

/// One request after the other, each answer read to its end.
fn requests<S, B>(bencher: Bencher<'_, '_>, service: &S)
where
    S: Service<In, Response = Response<B>, Error = Infallible> + Clone,
    B: Body<Data = Bytes>,
{
    let _runtime = RUNTIME.enter();
    bencher.bench_local(|| {
        RUNTIME.block_on(async {
            let Ok(response) = service.clone().oneshot(In::default()).await;
            let mut body = pin!(response.into_body());
            let mut bytes = 0;
            while let Some(Ok(frame)) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
                bytes += frame.data_ref().map_or(0, Bytes::len);
            }
            bytes
        })
    });
}

#[divan::bench]
fn bare(bencher: Bencher<'_, '_>) {
    requests(bencher, &service_fn(hello));
}

#[divan::bench]
fn skipped(bencher: Bencher<'_, '_>) {
    let layer = LockLayer::new(&Locks::in_memory(), by_parts(|_| key())).skip(|_| true);
    requests(bencher, &layer.layer(service_fn(hello)));
}

#[divan::bench]
fn no_key(bencher: Bencher<'_, '_>) {
    let layer = LockLayer::new(&Locks::in_memory(), by_parts(|_| None::<LockKey>));
    requests(bencher, &layer.layer(service_fn(hello)));
}

#[divan::bench]
fn locked(bencher: Bencher<'_, '_>) {
    let layer = LockLayer::new(&Locks::in_memory(), by_parts(|_| ("reward", 42_u64, "gold")));
    requests(bencher, &layer.layer(service_fn(hello)));
}

#[divan::bench]
fn refused(bencher: Bencher<'_, '_>) {
    let locks = Locks::in_memory();
    let _held = RUNTIME.block_on(async { locks.try_lock(key()).await }).expect("free");
    let layer = LockLayer::new(&locks, by_parts(|_| key()));
    requests(bencher, &layer.layer(service_fn(hello)));
}

#[divan::bench]
fn key_alone(bencher: Bencher<'_, '_>) {
    bencher.bench_local(key);
}

#[divan::bench]
fn try_lock_and_release_without_http(bencher: Bencher<'_, '_>) {
    let locks = Locks::in_memory();
    let key = key();
    bencher.bench_local(|| {
        RUNTIME.block_on(async { locks.try_lock(key.clone()).await.expect("free").release().await.expect("in memory") })
    });
}
