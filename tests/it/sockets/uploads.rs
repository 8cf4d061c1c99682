//! Requests that come slowly, or not to their end: nothing is locked for them.

use axum::{
    Router,
    body::Bytes,
    http::{Request, StatusCode},
    routing::post,
};
use tower_lock::{LockLayer, by, test_util::Verb};

use super::Site;
use crate::support::{
    settle, soon,
    wire::{Http2, Wire, read},
};

#[tokio::test]
async fn while_a_client_sends_what_the_key_is_made_of_nothing_is_locked() {
    let site = Site::of(|locks| {
        let layer = LockLayer::new(locks, by(|_: Bytes| ("k",)));
        Router::new().route("/", post(|body: Bytes| async { body }).route_layer(layer))
    })
    .await;
    let head = "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n";
    let mut slow = Wire::connect(site.instances[0]).await;
    slow.write(format!("{head}ab")).await;
    let mut gone = Wire::connect(site.instances[0]).await;
    gone.write(format!("{head}ab")).await;
    let mut slow_http2 = Http2::connect(site.instances[0]).await;
    let request = || Request::post(format!("http://{}/", site.instances[0])).body(()).expect("a request");
    let (answer, mut body) = slow_http2.request(request(), false).await;
    body.send_data(Bytes::from_static(b"ab"), false).expect("an open stream");
    let (gone_http2, mut gone_body) = slow_http2.request(request(), false).await;
    gone_body.send_data(Bytes::from_static(b"ab"), false).expect("an open stream");

    // Those that are complete are served meanwhile, wherever they come.
    for _ in 0..10 {
        for instance in site.instances {
            let mut quick = Wire::connect(instance).await;
            quick.write(format!("{head}abcd")).await;
            assert_eq!(quick.reply(false).await.status, 200);
        }
    }
    drop((gone, gone_http2, gone_body));
    slow.write("cd").await;
    assert_eq!(slow.reply(false).await.body, b"abcd");
    body.send_data(Bytes::from_static(b"cd"), true).expect("an open stream");
    let answer = soon("a head", answer).await.expect("a head");
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(read(answer).await.expect("the rest").body, b"abcd");
    settle().await;
    assert_eq!(site.store.on(Verb::Acquire).calls(), 22, "for those that came to their end");
    assert_eq!(site.store.held(), 0);
}
