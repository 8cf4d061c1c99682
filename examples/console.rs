//! The console of an operator, beside a service with busy routes.
//!
//! ```sh
//! cargo run --features console --example console
//! ```
//!
//! Without arguments, a client pays slowly, and an operator finds its lock and revokes it. With
//! `-- --serve` the service runs under a load: open `/ops/locks` in a browser, as `ann`, who may
//! revoke, or as `bob`, who may read. The password is that of `CONSOLE_PASSWORD`, or `demo`.

#![allow(clippy::disallowed_methods, reason = "a program with a runtime of its own, timed by a real clock")]

use std::{env, iter, process::ExitCode, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Path, Request},
    http::{
        HeaderMap, Method, StatusCode,
        header::{AUTHORIZATION, WWW_AUTHENTICATE},
        request::Parts,
    },
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post,
};
use http_body_util::BodyExt;
use serde_json::Value;
use support::{Failure, Mode, Server};
use tokio::time::sleep;
use tower::ServiceExt;
use tower_lock::{
    HeldLock, LockLayer, LockManager,
    console::{self, Access},
    key,
};

/// How long a payment takes. The load of `--serve` has more of them than a key allows.
const PAYMENT: Duration = Duration::from_secs(2);

// === who may do what ===

/// Operators, and the `Authorization` header of each. Basic, so that a browser asks for it, and
/// Bearer for programs. Over a network, both need TLS.
#[derive(Clone)]
struct Operators(Vec<(Access, [String; 2])>);

impl Operators {
    fn new(password: &str) -> Self {
        let headers = |user: &str| {
            let user = format!("{user}:{password}");
            [format!("Basic {}", base64(user.as_bytes())), format!("Bearer {user}")]
        };
        let ann = Access::Revoke { operator: "ann".to_owned() };
        Self(vec![(ann, headers("ann")), (Access::Read, headers("bob"))])
    }

    fn access(&self, headers: &HeaderMap) -> Access {
        let sent = headers.get(AUTHORIZATION).map_or(&[][..], |header| header.as_bytes());
        let mut access = Access::Denied;
        for (allowed, headers) in &self.0 {
            // All are compared, each in a time that depends on its length alone.
            if headers.iter().fold(false, |found, header| found | is_same(header.as_bytes(), sent)) {
                access = allowed.clone();
            }
        }
        access
    }
}

fn is_same(secret: &[u8], sent: &[u8]) -> bool {
    let differ = secret.iter().zip(sent).fold(0, |differ, (a, b)| differ | (a ^ b));
    secret.len() == sent.len() && std::hint::black_box(differ) == 0
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().chain(&[0, 0]).take(3).fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
        let digit = |n: usize| char::from(DIGITS[(bits >> (18 - 6 * n)) as usize & 63]);
        text.extend((0..=chunk.len()).map(digit).chain(iter::repeat_n('=', 3 - chunk.len())));
    }
    text
}

/// A browser asks for a password after a 401. The console itself sends 403.
async fn ask_for_a_password(operators: Operators, request: Request, next: Next) -> Response {
    if operators.access(request.headers()) == Access::Denied {
        return (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Basic realm=\"locks\"")]).into_response();
    }
    next.run(request).await
}

// === service ===

async fn pay(Path(order): Path<u64>, lock: HeldLock) -> String {
    sleep(PAYMENT).await;
    format!("order {order} is paid under {}\n", lock.fencing_token())
}

fn app(locks: &LockManager, operators: &Operators) -> Router {
    let order = key::from_fn(|Path(order): Path<u64>| ("order", order));
    let layer = LockLayer::new(locks, order).wait(Duration::from_secs(10));
    let (for_access, for_login) = (operators.clone(), operators.clone());
    let console = console::router(locks, move |head: &Parts| for_access.access(&head.headers))
        .layer(middleware::from_fn(move |request, next| ask_for_a_password(for_login.clone(), request, next)));
    Router::new().route("/orders/{order}/pay", post(pay).route_layer(layer)).nest("/ops/locks", console)
}

async fn send(app: &Router, method: Method, path: &str, user: &str) -> Result<(StatusCode, Value), Failure> {
    let request = Request::builder().method(method).uri(path).header("x-tower-lock", "1");
    let request = request.header(AUTHORIZATION, user).body(Body::empty())?;
    let response = app.clone().oneshot(request).await?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
    Ok((status, serde_json::from_slice(&body).unwrap_or_default()))
}

// === demo ===

/// Whether each step is as expected.
async fn demo(app: &Router, password: &str) -> Result<bool, Failure> {
    let (ann, bob) = (format!("Bearer ann:{password}"), format!("Bearer bob:{password}"));
    let mut is_right = true;
    let mut step = |what: &str, shown: String, is_expected: bool| {
        println!("  {what:<40} {shown}{}", if is_expected { "" } else { "   <- not as expected" });
        is_right &= is_expected;
    };
    let paying = tokio::spawn({
        let app = app.clone();
        async move { send(&app, Method::POST, "/orders/7/pay", "").await }
    });
    let key = "/ops/locks/api/key?name=order%3A7";
    let (mut status, mut page) = (StatusCode::OK, Value::Null);
    while page["status"]["holding"] != 1 && status == StatusCode::OK && !paying.is_finished() {
        sleep(Duration::from_millis(1)).await;
        (status, page) = send(app, Method::GET, key, &bob).await?;
    }
    let holder = page["status"]["holders"][0]["id"].as_str().unwrap_or("none").to_owned();
    step("bob asks who holds order:7", format!("{status}, {holder}"), page["status"]["holding"] == 1);
    let (status, _) = send(app, Method::GET, key, "Bearer ann:guess").await?;
    step("a client with a wrong password", status.to_string(), status == StatusCode::UNAUTHORIZED);
    let revoke = "/ops/locks/api/revoke?name=order%3A7";
    let (status, _) = send(app, Method::POST, revoke, &bob).await?;
    step("bob, who may read, revokes", status.to_string(), status == StatusCode::FORBIDDEN);
    let (status, reply) = send(app, Method::POST, revoke, &ann).await?;
    step("ann revokes", format!("{status}, {}", reply["reply"]), reply["reply"] == "revoked");
    let (status, problem) = paying.await??;
    let outcome = &problem["outcome"];
    step("the client that paid", format!("{status}, outcome {outcome}"), status == StatusCode::SERVICE_UNAVAILABLE);
    Ok(is_right)
}

/// Clients that pay for a few orders, so that the pages have something to show.
fn start_load(app: &Router) {
    for order in [1, 1, 1, 1, 2, 2, 3, 4] {
        let app = app.clone();
        tokio::spawn(async move {
            loop {
                let _ = send(&app, Method::POST, &format!("/orders/{order}/pay"), "").await;
            }
        });
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    support::exit(run().await)
}

async fn run() -> Result<(), Failure> {
    let password = env::var("CONSOLE_PASSWORD").unwrap_or_else(|_| "demo".to_owned());
    let locks = support::locks().await?;
    let app = app(&locks, &Operators::new(&password));
    let arguments: Vec<_> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] | ["--demo"] if demo(&app, &password).await? => Ok(()),
        [] | ["--demo"] => Err("a step is not as expected".into()),
        ["--serve"] => {
            start_load(&app);
            let server = Server::start(app, &locks, Mode::Serve).await?;
            println!("Open {}/ops/locks in a browser, as ann or bob.\nCtrl-C stops.", server.url);
            server.run().await
        }
        _ => Err("usage: [--demo | --serve]".into()),
    }
}
