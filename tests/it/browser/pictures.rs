//! The pictures of the page `console` of the guide.

use std::{future::pending, time::Duration};

use axum::{Router, extract::Path, routing::get};
use tokio::time::sleep;
use tower_lock::{LockLayer, key};
use tower_lock_testkit::{app::fetch, wait::until};

use super::support::{Fleet, window};

/// Prints a line for each picture: its name, and a PNG in Base64.
#[tokio::test]
#[ignore = "for scripts/screenshots.py"]
async fn each_view_has_a_picture() {
    let Some(window) = window().await else { return };
    let (browser, fleet) = (&window.browser, Fleet::in_memory().await);
    let locks = &fleet.first;
    let order = key::from_fields("order", key::path_param("id"));
    let layer = LockLayer::new(locks, order).wait(Duration::from_secs(600));
    let pay = get(
        async |Path(id): Path<u64>| if id == 41 { pending().await } else { sleep(Duration::from_millis(700)).await },
    );
    let service = Router::new().route("/orders/{id}/pay", pay.route_layer(layer));
    let send = |id: u64| {
        let service = service.clone();
        tokio::spawn(async move { fetch(&service, &format!("/orders/{id}/pay")).await })
    };

    let _import = locks.lock(("import", "nightly")).await.expect("free");
    let _model = locks.permit(("model", "large"), 4).await.expect("free");
    let _document = locks.read(("document", 7)).await.expect("free");
    let _other_reader = fleet.second.read(("document", 7)).await.expect("shared");
    let _account = fleet.second.lock(("account", 1042)).await.expect("free");
    for request in [52, 52, 52, 17, 17].map(send) {
        request.await.expect("no panic");
    }
    let _orders: Vec<_> = [41, 41, 41].map(send).into();
    let _waiter = tokio::spawn(locks.lock(("account", 1042)).wait(Duration::from_secs(600)).into_future());
    let waiting = async |key: (&'static str, u64)| fleet.first.inspect(key).await.expect("up").waiting_locally;
    until("waiters", async || waiting(("order", 41)).await == 2 && waiting(("account", 1042)).await == 1).await;

    for (name, path) in [("process", ""), ("keys", "/keys"), ("key", "/key?name=account%3A1042")] {
        browser.resize(1000, 300).await;
        browser.open(&fleet.url(path)).await;
        browser.resize(1000, browser.content_size().await.1.try_into().expect("a page")).await;
        println!("picture {name} {}", browser.screenshot().await);
    }
}
