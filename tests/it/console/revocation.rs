//! Revocations: their effect, their sentence, their event.

use axum::{
    body::Body,
    http::{Request, StatusCode},
};
use serde_json::Value;
use tower_lock::{
    LockKey, LockLost, LockManager,
    test_util::{Fault, StoreOp},
};
use tower_lock_testkit::{
    app::{fetch, send, text},
    locks::{key, store_and_locks},
    log::Log,
};

use super::{AT, app, operator, page, part, post, shown};

/// The events of revocations.
fn audit(log: &Log) -> Vec<String> {
    log.text().lines().filter(|line| line.contains("tower_lock::audit")).map(str::to_owned).collect()
}

#[tokio::test]
async fn one_of_several_permits_is_revoked() {
    let (_, locks) = store_and_locks();
    let one = locks.permit(key(), 4).await.expect("free");
    let two = locks.permit(key(), 4).await.expect("free");
    let app = app(&locks, operator());
    let first = shown(&app, "/key?name=k").await;
    let action = part(&first, "action=\"/ops/locks/revoke", "\"").replace("&amp;", "&");
    let response = send(&app, post(&format!("/revoke{action}")).body(Body::empty()).expect("a request")).await;
    assert_eq!(response.status(), StatusCode::SEE_OTHER);
    let location = response.headers()["location"].to_str().expect("text");
    assert_eq!(location, "/ops/locks/key?name=k&done=revoked-1");
    let after = shown(&app, location.strip_prefix(AT).expect("its prefix")).await;
    assert_eq!(
        part(&after, "<p id=\"done\" role=\"status\">", "</p>"),
        "Revoked from 1 holder. The place of each stays blocked for 1 s. A handler is aborted at its next await, and \
         its client gets 503 `lost`. A handler with `OnLost::Continue` goes on."
    );
    let lost = tokio::select! {
        why = async { one.held_permit().lost().await } => (why, 1),
        why = async { two.held_permit().lost().await } => (why, 2),
    };
    assert_eq!(lost, (LockLost::Revoked, 1), "the first one in the list");
    assert_eq!(two.hold_count(), 1);
}

#[tokio::test]
async fn result_is_shown_only_after_a_form_of_the_page() {
    let (_, locks) = store_and_locks();
    let app = app(&locks, operator());
    for (code, sentence) in [
        ("revoked-3", "Revoked from 3 holders."),
        ("unblocked", "Its block has ended"),
        ("free", "Nothing was revoked."),
    ] {
        assert!(shown(&app, &format!("/key?name=k&done={code}")).await.contains(sentence));
        let link = format!("{AT}/key?name=k&done={code}");
        assert!(!text(fetch(&app, &link).await).await.contains(sentence), "a link of another site");
        let request = Request::get(&link).header("sec-fetch-site", "cross-site").body(Body::empty());
        assert!(!text(send(&app, request.expect("a request")).await).await.contains(sentence));
    }
    for other in ["revoked", "revoked-x", "revoked-99999", "Call%20555", ""] {
        assert!(!shown(&app, &format!("/key?name=k&done={other}")).await.contains("id=\"done\""), "{other}");
    }
}

#[tokio::test]
async fn program_gets_the_reply_of_the_store() {
    let (_, locks) = store_and_locks();
    let app = app(&locks, operator());
    let revoke = async |body: &'static str| {
        let request = Request::post(format!("{AT}/api/revoke")).header("x-tower-lock", "1").body(Body::from(body));
        let response = send(&app, request.expect("a request")).await;
        assert_eq!(response.status(), StatusCode::OK);
        text(response).await
    };
    assert_eq!(revoke("name=k").await, r#"{"blocked_ms":null,"holders":[],"reply":"free"}"#);
    let guard = locks.lock(key()).await.expect("free");
    let id = guard.held_lock().acquisition_id().to_string();
    assert_eq!(revoke("name=k&holder=api-9%3A1%3A1").await, r#"{"blocked_ms":null,"holders":[],"reply":"free"}"#);
    assert_eq!(revoke("name=k").await, format!(r#"{{"blocked_ms":1000,"holders":["{id}"],"reply":"revoked"}}"#));
    let long = format!("name=k&holder={}", "x".repeat(9_000));
    let response = send(&app, post("/api/revoke").body(Body::from(long)).expect("a request")).await;
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert!(serde_json::from_str::<Value>(&text(response).await).expect("JSON")["error"].is_string());
}

#[tokio::test]
async fn each_revocation_writes_one_event_of_one_line() {
    let log = Log::default();
    let _listening = log.listen();
    let (store, locks) = store_and_locks();
    let operator = super::Access::Revoke { operator: "ann\nroot\u{202e}".to_owned() };
    let app = app(&locks, operator);
    let raw = LockKey::raw("a\nb").expect("valid");
    let guard = locks.lock(raw).await.expect("free");
    let name = "name=a%0Ab&raw=1";
    let revoke = async |path: &str| send(&app, post(path).body(Body::empty()).expect("a request")).await.status();
    assert_eq!(revoke(&format!("/revoke?{name}&holder=x%0Ay")).await, StatusCode::SEE_OTHER);
    assert_eq!(revoke(&format!("/revoke?{name}")).await, StatusCode::SEE_OTHER);
    store.on(StoreOp::Force).fault(Fault::Fail);
    assert_eq!(revoke(&format!("/api/revoke?{name}")).await, StatusCode::SERVICE_UNAVAILABLE);
    let events = audit(&log);
    let [free, revoked, failed] = &events[..] else { panic!("{}", log.text()) };
    for event in &events {
        assert!(
            event.contains(" INFO ") && event.contains("root") && event.contains("an operator revoked a lock"),
            "{event}"
        );
        assert!(!event.contains('\u{202e}'), "{event}");
    }
    assert!(free.contains("reply=\"free\"") && !free.contains("held_ms"), "{free}");
    assert!(
        revoked.contains("reply=\"revoked\"") && revoked.contains("held_ms=") && revoked.contains("holder=\"all\""),
        "{revoked}"
    );
    assert!(failed.contains("reply=\"failed: the ") && failed.contains("cannot be reached"), "{failed}");
    drop(guard);
}

#[tokio::test]
async fn page_of_a_failed_revocation_says_that_it_is_in_doubt() {
    let (store, locks) = store_and_locks();
    store.on(StoreOp::Force).fault(Fault::LoseReply);
    let app = app(&locks, operator());
    let response = send(&app, post("/revoke?name=k").body(Body::empty()).expect("a request")).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(text(response).await.contains("The lock may have been revoked."));
}

/// A client that disconnects during the call.
#[tokio::test(start_paused = true)]
async fn revocation_without_its_client_has_its_event() {
    let log = Log::default();
    let _listening = log.listen();
    let (store, locks) = store_and_locks();
    store.on(StoreOp::Force).fault(Fault::Hang);
    let app = app(&locks, operator());
    let request = post("/revoke?name=k").body(Body::empty()).expect("a request");
    let client = tokio::spawn(async move { send(&app, request).await });
    tower_lock_testkit::wait::settle().await;
    client.abort();
    let _ = client.await;
    let [event] = &audit(&log)[..] else { panic!("{}", log.text()) };
    assert!(event.contains("reply=\"not known: the client has disconnected\""), "{event}");
}

#[tokio::test]
async fn get_and_head_change_nothing() {
    let locks = LockManager::new(tower_lock::test_util::TestStore::new());
    let guard = locks.lock(key()).await.expect("free");
    let app = app(&locks, operator());
    for path in ["/revoke?name=k", "/api/revoke?name=k"] {
        assert_eq!(page(&app, path).await.0, StatusCode::METHOD_NOT_ALLOWED);
    }
    let head = Request::head(format!("{AT}/key?name=k&done=free")).body(Body::empty()).expect("a request");
    assert_eq!(text(send(&app, head).await).await, "");
    assert_eq!(guard.hold_count(), 1);
}
