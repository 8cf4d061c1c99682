//! Clients that do not read: how slow they are is their own matter, and nobody else's.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{Router, body::Body, extract::Path, http::Response, routing::post};
use tower_lock::{LockLayer, by};

use super::{
    Site,
    matrix::{Client, Version},
};
use crate::support::{
    soon,
    wire::{Http2, read},
};

/// The shop's answer is complete; that nobody takes it does not keep the good locked.
#[tokio::test]
async fn a_buyer_that_opens_no_window_keeps_nobody_from_buying() {
    let left = Arc::new(AtomicI64::new(5));
    let sell = post({
        let left = Arc::clone(&left);
        move || async move {
            let left = left.fetch_sub(1, SeqCst) - 1;
            Response::new(Body::from(format!("{left:05}").repeat(20_000)))
        }
    });
    let site = Site::of(|locks| {
        let by_good = LockLayer::new(locks, by(|Path(id): Path<u64>| ("good", id)));
        Router::new().route("/goods/{id}/sell", sell.clone().route_layer(by_good.wait(Duration::from_secs(60))))
    })
    .await;
    let mut unread = Vec::new();
    for instance in site.instances {
        let mut http2 = Http2::with_window(instance, 0).await;
        unread.push((http2.send("POST", "/goods/1/sell").await, http2));
    }
    let mut next = site.instances.map(|address| Client::new(address, Version::Http1));
    for client in &mut next {
        let reply = client.ask("POST", "/goods/1/sell").await.expect("an answer");
        assert_eq!((reply.status, reply.len), (200, 100_000));
    }
    // The heads are there, and nothing behind them.
    let mut bodies = Vec::new();
    for (answer, http2) in unread {
        let mut answer = soon("a head", answer).await.expect("a head");
        assert_eq!(answer.status(), 200);
        let first = futures_util::poll!(Box::pin(answer.body_mut().data()));
        assert!(first.is_pending(), "no window, no data: {first:?}");
        bodies.push((answer, http2));
    }
    assert_eq!((left.load(SeqCst), site.store.held()), (1, 0), "four were sold, and the key is free");
    for (answer, http2) in bodies {
        http2.open_window(1 << 20);
        assert_eq!(read(answer).await.expect("the rest").len, 100_000);
    }
}
