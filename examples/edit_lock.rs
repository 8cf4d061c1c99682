//! A document that one user edits at a time: "locked by Ann since 10:14".
//!
//! ```sh
//! cargo run --example edit_lock
//! ```
//!
//! Without arguments, two users edit one document, step by step. With `-- --serve` the service
//! runs: open it in two browsers, as two users.
//!
//! Environment: `PORT` (0: any; default 3000) and `LOCK_URL` (`redis://localhost`, `mysql://..` or
//! `postgres://..`, with a feature of that name: locks that all instances share; default: locks
//! within this process).

#![allow(clippy::disallowed_methods, reason = "a program with a runtime of its own, timed by a real clock")]

use std::{
    collections::HashMap,
    env,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    Router,
    body::Body,
    extract::{FromRequestParts, Path, Query, State},
    http::{
        Method, Request, StatusCode,
        header::{COOKIE, SET_COOKIE},
        request::Parts,
    },
    response::{Html, IntoResponse, Redirect},
    routing::{get, put},
};
use http_body_util::BodyExt;
use serde_json::Value;
use support::{Failure, Mode, Server};
use tower::ServiceExt;
use tower_lock::{
    HeldLock, LockLayer, LockManager, key,
    tickets::{self, Access, EDIT_WITHIN, RENEW_WITHIN},
};

/// The texts of the documents. A real service has a database, whose statements check the fencing
/// token.
#[derive(Clone, Default)]
struct Documents(Arc<Mutex<HashMap<u64, String>>>);

/// The user of a request. A real service has a login: here, the cookie is the name.
struct User(String);

impl<S: Sync> FromRequestParts<S> for User {
    type Rejection = Redirect;

    async fn from_request_parts(head: &mut Parts, _: &S) -> Result<Self, Redirect> {
        let cookies = head.headers.get(COOKIE).and_then(|cookies| cookies.to_str().ok()).unwrap_or_default();
        let name = cookies.split("; ").find_map(|cookie| cookie.strip_prefix("user="));
        name.map(|name| Self(name.to_owned())).ok_or_else(|| Redirect::to("/login?user=Ann"))
    }
}

// === service ===

fn document(id: u64) -> (&'static str, u64) {
    ("document", id)
}

/// Each user may edit, and Ann may take over.
fn access((Path(id), User(user)): (Path<u64>, User)) -> Access {
    let key = document(id).into();
    if user == "Ann" { Access::TakeOver { key, user } } else { Access::Edit { key, user } }
}

fn app(locks: &LockManager) -> Router {
    let of_document = key::from_fn(|Path(id): Path<u64>| document(id));
    let under_ticket = LockLayer::new(locks, of_document).tickets(RENEW_WITHIN, EDIT_WITHIN);
    let page = async |_: User| Html(include_str!("edit_lock.html"));
    Router::new()
        .route("/documents/{id}", put(save).route_layer(under_ticket).get(page))
        .route("/documents/{id}/text", get(text))
        .nest("/documents/{id}/lock", tickets::router(locks, access))
        .route("/", get(async || Redirect::to("/documents/7")))
        .route("/login", get(login))
        .with_state(Documents::default())
}

async fn login(Query(fields): Query<HashMap<String, String>>) -> impl IntoResponse {
    let name: String =
        fields.get("user").into_iter().flat_map(|name| name.chars()).filter(char::is_ascii_alphanumeric).collect();
    ([(SET_COOKIE, format!("user={name}; Path=/; HttpOnly; SameSite=Lax"))], Redirect::to("/documents/7"))
}

async fn text(State(Documents(texts)): State<Documents>, Path(id): Path<u64>) -> String {
    texts.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned().unwrap_or_default()
}

/// Runs under the lock of the editor, whose ticket is in the header `Lock-Ticket`, and keeps it. A
/// request without a ticket is refused, also if the key is free: another user may have saved
/// meanwhile.
async fn save(
    lock: HeldLock,
    State(Documents(texts)): State<Documents>,
    Path(id): Path<u64>,
    text: String,
) -> Result<String, StatusCode> {
    if !lock.is_redeemed() {
        return Err(StatusCode::CONFLICT);
    }
    texts.lock().unwrap_or_else(PoisonError::into_inner).insert(id, text);
    lock.keep(RENEW_WITHIN).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(format!("saved under {}", lock.fencing_token()))
}

// === demo ===

async fn send(
    app: &Router,
    method: Method,
    path: &str,
    user: &str,
    ticket: &str,
) -> Result<(StatusCode, Value), Failure> {
    let mut request = Request::builder().method(method).uri(format!("/documents/7{path}"));
    request = request.header(COOKIE, format!("user={user}")).header("sec-fetch-site", "same-origin");
    if !ticket.is_empty() {
        request = request.header("lock-ticket", ticket);
    }
    let response = app.clone().oneshot(request.body(Body::from("a new text"))?).await?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
    Ok((status, serde_json::from_slice(&body).unwrap_or_default()))
}

/// Whether each step is as expected.
async fn demo(app: &Router) -> Result<bool, Failure> {
    let mut is_right = true;
    let mut step = |what: &str, status: StatusCode, expected: u16, shown: &Value| {
        let is_expected = status.as_u16() == expected;
        let shown = if shown.is_null() { String::new() } else { format!(", by {shown}") };
        println!("  {what:<36} {status}{shown}{}", if is_expected { "" } else { "   <- not as expected" });
        is_right &= is_expected;
    };
    let (status, of_bob) = send(app, Method::POST, "/lock", "Bob", "").await?;
    let bob = of_bob["ticket"].as_str().unwrap_or_default();
    step("Bob opens the document", status, 201, &Value::Null);
    let (status, holder) = send(app, Method::POST, "/lock", "Cid", "").await?;
    step("Cid opens it, too", status, 409, &holder["by"]);
    let (status, _) = send(app, Method::PUT, "", "Cid", "").await?;
    step("Cid saves without a ticket", status, 409, &Value::Null);
    let (status, _) = send(app, Method::PUT, "", "Bob", bob).await?;
    step("Bob saves", status, 200, &Value::Null);
    let (status, _) = send(app, Method::PUT, "/lock", "Bob", bob).await?;
    step("Bob's page renews its ticket", status, 200, &Value::Null);
    let (status, holder) = send(app, Method::POST, "/lock/take-over", "Cid", "").await?;
    step("Cid takes it over", status, 403, &holder["by"]);
    let (status, of_ann) = send(app, Method::POST, "/lock/take-over", "Ann", "").await?;
    step("Ann, who may, takes it over", status, 201, &Value::Null);
    let (status, _) = send(app, Method::PUT, "", "Bob", bob).await?;
    step("Bob saves with the old ticket", status, 409, &Value::Null);
    let ann = of_ann["ticket"].as_str().unwrap_or_default();
    let (status, _) = send(app, Method::DELETE, "/lock", "Ann", ann).await?;
    step("Ann closes the document", status, 204, &Value::Null);
    let (status, _) = send(app, Method::PUT, "", "Cid", "").await?;
    step("Cid saves what nobody edits", status, 409, &Value::Null);
    Ok(is_right)
}

#[tokio::main]
async fn main() -> ExitCode {
    support::exit(run().await)
}

async fn run() -> Result<(), Failure> {
    let locks = support::locks().await?;
    let app = app(&locks);
    let arguments: Vec<_> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] | ["--demo"] if demo(&app).await? => Ok(()),
        [] | ["--demo"] => Err("a step is not as expected".into()),
        ["--serve"] => {
            let server = Server::start(app, &locks, Mode::Serve).await?;
            let url = &server.url;
            println!("Open {url}/login?user=Ann, and in another browser {url}/login?user=Bob.\nCtrl-C stops.");
            server.run().await
        }
        _ => Err("usage: [--demo | --serve]".into()),
    }
}
