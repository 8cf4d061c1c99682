//! A service that exports its traces: `<Redis> <collector> <route> <milliseconds of work>`. Sends
//! itself 12 requests for one key, three at a time.

use std::{env, error::Error, time::Duration};

use axum::{Router, body::Body, http::Request, routing::get};
use futures_util::{StreamExt, stream};
use open_telemetry::OpenTelemetry;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::time::sleep;
use tower::ServiceExt;
use tower_lock::{LockLayer, LockManager, RedisStore, key};
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};

mod open_telemetry;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let [redis, collector, route, work_ms] = &arguments[..] else { return Err("four arguments".into()) };
    let work = Duration::from_millis(work_ms.parse()?);
    let exporter = SpanExporter::builder().with_http().with_protocol(Protocol::HttpJson).with_endpoint(collector);
    let traces = SdkTracerProvider::builder().with_batch_exporter(exporter.build()?).build();
    tracing_subscriber::registry().with(tracing_opentelemetry::layer().with_tracer(traces.tracer("service"))).init();

    let store = RedisStore::connect(redis).await?;
    let locks = LockManager::builder(store).traces(OpenTelemetry).build();
    let layer = LockLayer::new(&locks, key::fixed(("report", 7))).wait(Duration::from_secs(30));
    let handler = get(async move || sleep(work).await).route_layer(layer);
    let app = Router::new().route(route, handler);
    let call = |_| async { app.clone().oneshot(Request::get(route).body(Body::empty()).expect("a path")).await };
    let replies = stream::iter(0..12).map(call).buffer_unordered(3).collect::<Vec<_>>().await;
    let is_right = replies.iter().flatten().all(|reply| reply.status() == 200);
    locks.shutdown(Duration::from_secs(5)).await;
    // The exporter blocks its thread.
    tokio::task::spawn_blocking(move || traces.shutdown()).await??;
    if is_right { Ok(()) } else { Err("a request has failed".into()) }
}
