//! When a client observes the release, with two instances of a service on one Redis.

use std::net::SocketAddr;

use axum::{Router, body::Body, http::Response, routing::get};
use tokio::time::{Instant, sleep};
use tower_lock::{LockLayer, LockManager};
use tower_lock_testkit::{
    app::serve,
    body::{ScriptedBody, Step, paused},
    endings::{self, ENDINGS, assert_next_request_is_served_elsewhere},
    http::{Client, Version},
    locks::one_key,
    panics::panics,
    wait::ms,
};

use crate::support::{Environment, environment};

async fn instances(environment: &Environment, service: impl Fn(&LockManager) -> Router) -> [SocketAddr; 2] {
    let (one, two) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    [serve(service(&one)).await, serve(service(&two)).await]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_with_a_response_is_served_at_another_instance() {
    let Some(environment) = environment().await else { return };
    let instances = instances(&environment, endings::service).await;
    for version in [Version::Http1, Version::Http2] {
        assert_next_request_is_served_elsewhere(&ENDINGS, instances, version, 4).await;
    }
    environment.wait_until_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn panic_in_a_body_blocks_both_instances_for_the_lock_delay() {
    const MESSAGE: &str = "planned: in a body over Redis";
    let Some(environment) = environment().await else { return };
    let delay = ms(1500);
    let instances = instances(&environment, |locks| {
        let layer = || LockLayer::new(locks, one_key()).lock_delay(delay);
        let panics =
            async || Response::new(Body::new(ScriptedBody::new(paused(&[Step::Data(10), Step::Panic(MESSAGE)]))));
        Router::new()
            .route("/panics", get(panics).route_layer(layer()))
            .route("/next", get(|| async { "next" }).route_layer(layer()))
    })
    .await;
    assert_eq!(panics(MESSAGE), 0);
    for (round, version) in [Version::Http1, Version::Http2].into_iter().enumerate() {
        let asked = Instant::now();
        Client::new(instances[0], version).request("GET", "/panics").await.expect_err("an incomplete response");
        for address in instances {
            let mut client = Client::new(address, Version::Http1);
            while client.request("GET", "/next").await.expect("a response").status == 409 {
                sleep(ms(50)).await;
            }
            assert!(asked.elapsed() >= delay, "{version:?}: {:?}", asked.elapsed());
        }
        assert_eq!(panics(MESSAGE), round + 1);
    }
    environment.wait_until_clean().await;
}
