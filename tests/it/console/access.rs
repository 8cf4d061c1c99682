//! Who may do what, and the headers of each response.

use axum::{
    body::Body,
    http::{Method, Request, StatusCode},
};
use tower_lock::{
    LockManager,
    console::Access,
    test_util::{StoreOp, TestStore},
};
use tower_lock_testkit::{
    app::{send, text},
    locks::{key, store_and_locks},
};

use super::{AT, app, operator};

const PATHS: [&str; 11] = [
    "",
    "/keys",
    "/key?name=k",
    "/revoke?name=k",
    "/style.css",
    "/api/holding",
    "/api/keys",
    "/api/key?name=k",
    "/api/revoke?name=k",
    "/nothing",
    "/api/nothing",
];

fn calls(store: &TestStore) -> usize {
    [StoreOp::Inspect, StoreOp::List, StoreOp::Force].iter().map(|op| store.on(*op).calls()).sum()
}

async fn status(locks: &LockManager, access: Access, method: Method, path: &str) -> (StatusCode, String) {
    let request = Request::builder().method(method).uri(format!("{AT}{path}")).header("x-tower-lock", "1");
    let response = send(&app(locks, access), request.body(Body::empty()).expect("a request")).await;
    (response.status(), text(response).await)
}

#[tokio::test]
async fn denied_client_gets_403_for_each_path_and_no_call() {
    let (store, locks) = store_and_locks();
    for path in PATHS {
        for method in [Method::GET, Method::HEAD, Method::POST, Method::DELETE, Method::OPTIONS] {
            let (status, text) = status(&locks, Access::Denied, method.clone(), path).await;
            assert_eq!(status, StatusCode::FORBIDDEN, "{method} {path}");
            assert!(!text.contains("name=k"), "{text}");
        }
    }
    assert_eq!(calls(&store), 0);
}

#[tokio::test]
async fn each_path_has_its_methods() {
    let (_, locks) = store_and_locks();
    for path in PATHS {
        for method in [Method::GET, Method::HEAD, Method::POST, Method::PUT] {
            let (status, _) = status(&locks, operator(), method.clone(), path).await;
            let expected = match (path.contains("nothing"), path.contains("revoke"), method.as_str()) {
                (true, _, _) => 404,
                (_, true, "POST") => {
                    if path.contains("api") {
                        200
                    } else {
                        303
                    }
                }
                (_, false, "GET" | "HEAD") => 200,
                _ => 405,
            };
            assert_eq!(status.as_u16(), expected, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn reader_sees_all_and_revokes_nothing() {
    let (store, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    for path in ["/revoke?name=k", "/api/revoke?name=k"] {
        assert_eq!(status(&locks, Access::Read, Method::POST, path).await.0, StatusCode::FORBIDDEN);
    }
    assert_eq!(calls(&store), 0);
    let (_, page) = status(&locks, Access::Read, Method::GET, "/key?name=k").await;
    assert!(page.contains("You may only read.") && !page.contains("<form method=\"post\""), "{page}");
    assert_eq!(guard.hold_count(), 1);
}

/// Only a page of this origin, or a program, can send what a revocation needs.
#[tokio::test]
async fn revocation_of_another_site_is_refused_before_a_call() {
    let (store, locks) = store_and_locks();
    let app = app(&locks, operator());
    for (name, value, is_accepted) in [
        ("sec-fetch-site", "same-origin", true),
        ("x-tower-lock", "1", true),
        ("sec-fetch-site", "same-site", false),
        ("sec-fetch-site", "cross-site", false),
        ("sec-fetch-site", "none", false),
        ("x-tower-lock", "0", false),
        ("origin", "https://example.org", false),
    ] {
        let before = calls(&store);
        let request = Request::post(format!("{AT}/api/revoke")).header(name, value).body(Body::from("name=k"));
        let response = send(&app, request.expect("a request")).await;
        assert_eq!(response.status().is_success(), is_accepted, "{name}: {value}");
        if !is_accepted {
            assert_eq!((response.status(), calls(&store)), (StatusCode::FORBIDDEN, before));
        }
    }
}

#[tokio::test]
async fn each_response_has_the_headers_of_a_private_page() {
    let (_, locks) = store_and_locks();
    for access in [Access::Denied, Access::Read, operator()] {
        let app = app(&locks, access);
        for path in PATHS {
            for method in [Method::GET, Method::POST] {
                let request = Request::builder().method(method).uri(format!("{AT}{path}"));
                let response = send(&app, request.body(Body::empty()).expect("a request")).await;
                let header = |name: &str| response.headers()[name].to_str().expect("text");
                assert_eq!(
                    header("content-security-policy"),
                    "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
                    "{path}"
                );
                assert_eq!(
                    (header("cache-control"), header("x-content-type-options"), header("referrer-policy")),
                    ("no-store", "nosniff", "no-referrer")
                );
            }
        }
    }
}
