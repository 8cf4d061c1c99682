//! `LockLayer` around a handler that does nothing: one `Service::call` after the other, in memory.

use std::{convert::Infallible, fmt::Debug, sync::Arc};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header::HOST};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tokio::{runtime::Runtime, task::unconstrained};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_lock::{LockLayer, LockManager, key, middleware::RequestBody};

use super::{INSTRUCTIONS, Run, allocations, one_thread};
use crate::{
    chart::Chart,
    measure::{median, own_cpu},
    peers::MutexMap,
    report::{NO_LOCK, Table, Target::AtMost},
};

const LAYER: &str = "tower-lock, layer";
const REJECTED: &str = "tower-lock, layer, rejected";
const MUTEX_MAP: &str = "dashmap of mutexes, by hand";

const ADDED: &str = "added ns";
const TIME: &str = "ns a request";
const ALLOCATIONS: &str = "allocations";

/// A service that answers this many requests.
pub struct Variant {
    pub name: &'static str,
    pub answer: Box<dyn Fn(u64)>,
}

pub fn answer(run: &mut Run) {
    let runtime = Arc::new(one_thread());
    let variants = variants(&runtime);
    let columns = [(ADDED, 0), (TIME, 0), (INSTRUCTIONS, 0), (ALLOCATIONS, 0), ("allocated bytes", 0)];
    let mut table = Table::new("a handler that does nothing", LAYER, &columns);
    let count = (30_000.0 * run.scale) as u64;
    for at in run.turns(&[0, 1, 2, 3]) {
        let Variant { name, answer } = &variants[at];
        answer(count / 10);
        // One thread that never waits: its CPU time does not depend on other processes.
        let began = own_cpu();
        answer(count);
        table.push(name, TIME, (own_cpu() - began) as f64 / count as f64);
    }
    let counts = allocations("layer", &[]);
    for Variant { name, .. } in &variants {
        if let Some(count) = run.instructions("layer", name) {
            table.push(name, INSTRUCTIONS, count);
        }
        table.push(name, ALLOCATIONS, counts[*name].count);
        table.push(name, "allocated bytes", counts[*name].bytes);
        if *name != NO_LOCK {
            for added in table.differences(TIME, name, NO_LOCK) {
                table.push(name, ADDED, added);
            }
        }
    }
    table.print();
    let mut chart =
        Chart::new("layer", "The time that a lock adds to a request in memory, nanoseconds: less is better");
    chart.add("around a handler that does nothing", &table, ADDED, 0);
    run.write(&chart);

    let added = |variant, column| median(&table.differences(column, variant, NO_LOCK));
    run.goals.check("layer_added_us", added(LAYER, TIME) / 1e3, AtMost(1.5));
    run.goals.check("layer_allocations", added(LAYER, ALLOCATIONS), AtMost(6.0));
    run.goals.check("layer_rejected_us", added(REJECTED, TIME) / 1e3, AtMost(1.0));
    run.goals.check("layer_rejected_allocations", added(REJECTED, ALLOCATIONS), AtMost(6.0));
}

/// So many requests of one variant, to count their instructions.
pub fn count_requests(name: &str, count: u64) {
    let variants = variants(&Arc::new(one_thread()));
    let Variant { answer, .. } = variants.into_iter().find(|variant| variant.name == name).expect("a known name");
    answer(count);
}

pub fn variants(runtime: &Arc<Runtime>) -> Vec<Variant> {
    let locks = LockManager::in_memory();
    let layer = |reward: u64| LockLayer::new(&locks, key::from_parts(move |_| ("reward", reward, "gold")));
    let rejecting = layer(43).layer(service_fn(hello));
    let held = runtime.block_on(async { locks.try_lock(("reward", 43_u64, "gold")).await }).expect("a free key");
    // Held until the program ends.
    std::mem::forget(held);
    let map = Arc::<MutexMap>::default();
    let by_hand = service_fn(move |request| {
        let map = Arc::clone(&map);
        async move {
            let Some(guard) = map.try_lock(format!("reward:{}:gold", 42)) else {
                let mut rejected = Response::new(Full::default());
                *rejected.status_mut() = StatusCode::CONFLICT;
                return Ok(rejected);
            };
            let response = hello(request).await;
            drop(guard);
            response
        }
    });
    vec![
        variant(NO_LOCK, runtime, StatusCode::OK, service_fn(hello)),
        variant(LAYER, runtime, StatusCode::OK, layer(42).layer(service_fn(hello))),
        variant(MUTEX_MAP, runtime, StatusCode::OK, by_hand),
        variant(REJECTED, runtime, StatusCode::CONFLICT, rejecting),
    ]
}

/// Each response is read to its end.
fn variant<S, B>(name: &'static str, runtime: &Arc<Runtime>, status: StatusCode, service: S) -> Variant
where
    S: Service<Request<RequestBody>, Response = Response<B>, Error = Infallible> + Clone + 'static,
    B: Body<Data = Bytes, Error: Debug>,
{
    let runtime = Arc::clone(runtime);
    let answer = move |count| {
        runtime.block_on(unconstrained(async {
            for _ in 0..count {
                let Ok(response) = service.clone().oneshot(request()).await;
                assert_eq!(response.status(), status);
                response.into_body().collect().await.expect("a body");
            }
        }));
    };
    Variant { name, answer: Box::new(answer) }
}

/// A request has headers, and a server adds extensions.
fn request() -> Request<RequestBody> {
    let mut request = Request::default();
    request.headers_mut().insert(HOST, HeaderValue::from_static("localhost"));
    request.extensions_mut().insert(());
    request
}

async fn hello(_: Request<RequestBody>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(b"hello"))))
}
