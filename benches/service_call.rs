//! The cost that the layer adds to a request: the whole `Service::call`, from the request to the
//! end of the body, in memory, with one key.
//!
//! ```sh
//! cargo bench -p tower-lock-benches --bench service_call
//! ```
//!
//! Times depend on the machine: compare them with `bare` of the same run. The other benches are the
//! layer, and the same lock acquired and released by hand in the handler, in memory and in a Redis
//! of its own (if `redis-server` is installed). Allocations are exact.

use std::{convert::Infallible, pin::pin, sync::LazyLock};

use bytes::Bytes;
use divan::{AllocProfiler, Bencher};
use futures_util::future::poll_fn;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use tokio::runtime::Runtime;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_lock::{LockKey, LockLayer, LockManager, key, middleware::RequestBody};

#[global_allocator]
static ALLOCATOR: AllocProfiler = AllocProfiler::system();

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime"));

type In = Request<RequestBody>;

fn main() {
    divan::main();
}

async fn hello(_: In) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(b"hello"))))
}

fn key() -> LockKey {
    LockKey::from(("reward", 42_u64, "gold"))
}

/// One request after the other, each response read to its end.
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
    let layer = LockLayer::new(&LockManager::in_memory(), key::from_parts(|_| key())).skip(|_| true);
    requests(bencher, &layer.layer(service_fn(hello)));
}

#[divan::bench]
fn no_key(bencher: Bencher<'_, '_>) {
    let layer = LockLayer::new(&LockManager::in_memory(), key::from_parts(|_| None::<LockKey>));
    requests(bencher, &layer.layer(service_fn(hello)));
}

#[divan::bench]
fn locked(bencher: Bencher<'_, '_>) {
    let layer = LockLayer::new(&LockManager::in_memory(), key::from_parts(|_| ("reward", 42_u64, "gold")));
    requests(bencher, &layer.layer(service_fn(hello)));
}

/// The work of the layer, written by hand in a handler.
fn by_hand(
    locks: &LockManager,
) -> impl Service<In, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send> + Clone {
    let locks = locks.clone();
    service_fn(move |request: In| {
        let locks = locks.clone();
        async move {
            let Ok(guard) = locks.try_lock(("reward", 42_u64, "gold")).await else {
                let mut rejected = Response::new(Full::default());
                *rejected.status_mut() = StatusCode::CONFLICT;
                return Ok(rejected);
            };
            let response = hello(request).await;
            // Its result does not change the response.
            let _ = guard.release().await;
            response
        }
    })
}

#[divan::bench]
fn locked_by_hand(bencher: Bencher<'_, '_>) {
    requests(bencher, &by_hand(&LockManager::in_memory()));
}

#[cfg(feature = "redis")]
mod redis {
    use std::sync::LazyLock;

    use divan::Bencher;
    use tower::{Layer, service_fn};
    use tower_lock::{LockLayer, LockManager, RedisStore, key};
    use tower_lock_testkit::RedisServer;

    use super::{RUNTIME, by_hand, hello, requests};

    static SERVER: LazyLock<Option<(RedisServer, LockManager)>> = LazyLock::new(|| {
        RedisServer::is_available().then(|| {
            RUNTIME.block_on(async {
                let server = RedisServer::start().await;
                let store = RedisStore::connect(&server.url()).await.expect("a Redis");
                (server, LockManager::new(store))
            })
        })
    });

    #[divan::bench]
    fn locked(bencher: Bencher<'_, '_>) {
        let Some((_, locks)) = &*SERVER else { return };
        let layer = LockLayer::new(locks, key::from_parts(|_| ("reward", 42_u64, "gold")));
        requests(bencher, &layer.layer(service_fn(hello)));
    }

    #[divan::bench]
    fn locked_by_hand(bencher: Bencher<'_, '_>) {
        let Some((_, locks)) = &*SERVER else { return };
        requests(bencher, &by_hand(locks));
    }
}

#[divan::bench]
fn rejected(bencher: Bencher<'_, '_>) {
    let locks = LockManager::in_memory();
    let _held = RUNTIME.block_on(async { locks.try_lock(key()).await }).expect("free");
    let layer = LockLayer::new(&locks, key::from_parts(|_| key()));
    requests(bencher, &layer.layer(service_fn(hello)));
}

#[divan::bench]
fn key_alone(bencher: Bencher<'_, '_>) {
    bencher.bench_local(key);
}

#[divan::bench]
fn try_lock_and_release_without_http(bencher: Bencher<'_, '_>) {
    let locks = LockManager::in_memory();
    let key = key();
    bencher.bench_local(|| {
        RUNTIME.block_on(async { locks.try_lock(key.clone()).await.expect("free").release().await.expect("in memory") })
    });
}
