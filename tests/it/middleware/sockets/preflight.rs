//! Responses from in front of the lock make no store call.

use axum::{Router, http::Request, routing::post};
use tower_http::cors::CorsLayer;
use tower_lock::{LockLayer, test_util::StoreOp};
use tower_lock_testkit::http::{Client, Version};
use tower_lock_testkit::{
    http::{Http1, Http2},
    locks::one_key,
};

use super::{Cluster, VERSIONS};

#[tokio::test]
async fn preflight_404_and_405_make_no_store_call() {
    let cluster = Cluster::start(|locks| {
        let layer = LockLayer::new(locks, one_key());
        Router::new().route("/order", post(|| async { "ran" }).route_layer(layer)).layer(CorsLayer::permissive())
    })
    .await;
    let [server, _] = cluster.instances;
    let asks = [("origin", "https://example.org"), ("access-control-request-method", "POST")];

    let mut wire = Http1::connect(server).await;
    let headers: String = asks.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    wire.write(format!("OPTIONS /order HTTP/1.1\r\nhost: x\r\n{headers}\r\n")).await;
    let preflight = wire.reply(false).await;
    assert!(preflight.status == 200 && preflight.head.contains("access-control-allow-methods: *"), "{preflight:?}");

    let mut http2 = Http2::connect(server).await;
    let request = asks.iter().fold(Request::options(format!("http://{server}/order")), |request, (name, value)| {
        request.header(*name, *value)
    });
    let (response, _) = http2.request(request.body(()).expect("a request"), true).await;
    assert_eq!(response.await.expect("a head").headers()["access-control-allow-methods"], "*");

    for version in VERSIONS {
        let mut client = Client::new(server, version);
        for (method, path, status) in [("GET", "/nowhere", 404), ("GET", "/order", 405), ("DELETE", "/order", 405)] {
            assert_eq!(client.request(method, path).await.expect("a response").status, status, "{method} {path}");
        }
        assert_eq!(cluster.store.on(StoreOp::Acquire).calls(), 0);
    }
    // The same server, the same route.
    let reply = Client::new(server, Version::Http1).request("POST", "/order").await.expect("a response");
    assert_eq!((reply.status, cluster.store.on(StoreOp::Acquire).calls()), (200, 1));
}
