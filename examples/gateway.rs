//! A gateway in front of a language model: completions are streams, each tenant may run as many at
//! a time as its plan has, and all tenants of an organization together as many as it has bought.
//!
//! ```sh
//! cargo run --example gateway               # a table, then a server for manual requests
//! cargo run --example gateway -- --demo     # the table alone
//! cargo run --example gateway -- --serve    # the server alone
//! ```
//!
//! Environment: `PORT` (0: any; default 3000) and `LOCK_URL` (`redis://localhost`,
//! `mysql://..` or `postgres://..`, with a feature of that name: limits of all instances together;
//! default: limits of this process).
//!
//! The service is the part above "the table". Of `support` it needs nothing but `worked`, which is
//! for the table.

#![allow(clippy::disallowed_methods, reason = "a program with a runtime of its own, timed by a real clock")]

use std::{
    collections::HashMap,
    convert::Infallible,
    process::ExitCode,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Extension, Json, Router,
    body::Body,
    extract::{Path, Request, State},
    http::{Method, StatusCode, header::CONTENT_TYPE, request::Parts},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{post, put},
};
use futures_util::stream;
use serde::Deserialize;
use serde_json::json;
use tokio::time::sleep;
use tower_lock::{HeldPermit, LockLayer, LockManager, key};

use support::{ClientResponse, Failure, Mode, Server, Table, send_as, worked};

/// How many completions the organization may run at a time.
const ORGANIZATION_LIMIT: u16 = 6;

const WAIT: Duration = Duration::from_secs(10);

/// The model of this example: a completion has this many frames, one after the other.
const FRAMES: u32 = 6;
const FRAME_TIME: Duration = Duration::from_millis(40);

/// The tenant of a request, from its API key. A client cannot choose its plan.
#[derive(Clone, Copy)]
struct Tenant {
    id: u64,
    organization: u64,
    /// How many completions it may run at a time.
    plan: u16,
}

#[derive(Clone)]
struct App {
    /// By API key.
    tenants: Arc<Mutex<HashMap<String, Tenant>>>,
    model: Arc<Model>,
}

#[derive(Default)]
struct Model {
    running: AtomicUsize,
    most: AtomicUsize,
}

#[derive(Deserialize)]
struct Prompt {
    prompt: String,
}

#[derive(Deserialize)]
struct Plan {
    completions: u16,
}

fn app(locks: &LockManager, app: App) -> Router {
    let tenant = || key::from_fn(|Extension(tenant): Extension<Tenant>| ("tenant", tenant.id));
    let organization = || key::from_fn(|Extension(tenant): Extension<Tenant>| ("organization", tenant.organization));
    let of_its_plan = || LockLayer::new(locks, tenant()).at_most_by(plan);
    let bought = || LockLayer::new(locks, organization()).at_most(ORGANIZATION_LIMIT);

    // The last layer is the outermost: the limit of the tenant is acquired first. A request that
    // waits for the organization then holds a place of its own tenant, and none of another one.
    Router::new()
        .route("/completions", post(complete).route_layer(bought()).route_layer(of_its_plan()))
        .route(
            "/completions-waiting",
            post(complete).route_layer(bought().wait(WAIT)).route_layer(of_its_plan().wait(WAIT)),
        )
        .route("/completions-of-tenant", post(complete).route_layer(of_its_plan()))
        .route("/completions-unlimited", post(complete_unlimited))
        .route_layer(from_fn_with_state(app.clone(), authenticate))
        .route("/plans/{key}", put(change_plan))
        .with_state(app)
}

/// Reads the plan for each request: a change counts from the next request on, without a restart. A
/// completion under a plan of 1 excludes the others of its tenant until it ends.
fn plan(head: &Parts) -> u16 {
    head.extensions.get::<Tenant>().map_or(0, |tenant| tenant.plan)
}

async fn authenticate(State(app): State<App>, mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let bearer = request.headers().get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let tenant = app.tenant(bearer.ok_or(StatusCode::UNAUTHORIZED)?).ok_or(StatusCode::UNAUTHORIZED)?;
    request.extensions_mut().insert(tenant);
    Ok(next.run(request).await)
}

/// Streams a completion. The response holds both permits to its last frame, or until its client
/// disconnects.
async fn complete(_permit: HeldPermit, State(app): State<App>, Json(prompt): Json<Prompt>) -> Response {
    app.model.complete(&prompt)
}

async fn complete_unlimited(State(app): State<App>, Json(prompt): Json<Prompt>) -> Response {
    app.model.complete(&prompt)
}

/// For an operator. A service would check for one.
async fn change_plan(State(app): State<App>, Path(key): Path<String>, Json(plan): Json<Plan>) -> StatusCode {
    let mut tenants = app.tenants.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(tenant) = tenants.get_mut(&key) else { return StatusCode::NOT_FOUND };
    tenant.plan = plan.completions;
    StatusCode::NO_CONTENT
}

impl App {
    /// Three tenants of one organization: two with a small plan, one with a large one.
    fn new() -> Self {
        let tenant = |(id, plan)| (format!("key-{id}"), Tenant { id, organization: 1, plan });
        let tenants = [(1, 2), (2, 2), (3, 4)].map(tenant).into();
        Self { tenants: Arc::new(Mutex::new(tenants)), model: Arc::default() }
    }

    fn tenant(&self, key: &str) -> Option<Tenant> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner).get(key).copied()
    }
}

// === the model ===

/// A completion under way.
struct Completion(Arc<Model>);

impl Model {
    fn complete(self: &Arc<Self>, Prompt { prompt }: &Prompt) -> Response {
        let completion = Completion::start(self);
        let words = format!("data: {} bytes\n\n", prompt.len());
        let frames = stream::unfold((completion, 0), move |(completion, number)| {
            let frame = words.clone();
            async move {
                (number < FRAMES).then_some(())?;
                sleep(FRAME_TIME).await;
                Some((Ok::<_, Infallible>(frame), (completion, number + 1)))
            }
        });
        let stream = ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(frames)).into_response();
        worked(FRAMES * FRAME_TIME, stream)
    }

    /// The largest number of completions since the last call.
    fn take_most(&self) -> usize {
        self.most.swap(0, SeqCst)
    }
}

impl Completion {
    fn start(model: &Arc<Model>) -> Self {
        let running = model.running.fetch_add(1, SeqCst) + 1;
        model.most.fetch_max(running, SeqCst);
        Self(Arc::clone(model))
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, SeqCst);
    }
}

// === the table ===

const TENANTS: u64 = 3;
const EACH: usize = 4;

/// Sends completions of these tenants at the same time.
async fn complete_all(url: &str, tenants: impl Iterator<Item = u64>) -> Result<Vec<ClientResponse>, Failure> {
    let body = json!({ "prompt": "Which limit?" });
    let requests = tenants.map(|id| (format!("Bearer key-{id}"), body.clone())).collect();
    send_as(Method::POST, url, requests).await
}

fn served(responses: &[ClientResponse]) -> usize {
    responses.iter().filter(|response| response.status == StatusCode::OK).count()
}

/// Returns whether the model never had more completions than the limits, and all were served that
/// had to be.
async fn demo(app: &App, url: &str) -> Result<bool, Failure> {
    println!("Three tenants of an organization send four completions each at the same time.\n");
    let mut table = Table::new("at the model");
    let mut results = Vec::new();
    let all = || (1..=TENANTS).flat_map(|id| [id; EACH]);
    for (name, path) in [
        ("no limit", "completions-unlimited"),
        ("limits of tenants: 2, 2, 4", "completions-of-tenant"),
        ("and 6 of the organization", "completions"),
        ("the same, and wait", "completions-waiting"),
    ] {
        let responses = complete_all(&format!("{url}/{path}"), all()).await?;
        let most = app.model.take_most();
        table.row(name, format!("{most} at once"), &responses, |response| match response.status.as_u16() {
            200 => "served",
            429 => "no permit",
            _ => "",
        });
        results.push((most, served(&responses)));
    }
    table.print();
    let (plan, larger) = (format!("{url}/plans/key-1"), json!({ "completions": 4 }));
    let status = send_as(Method::PUT, &plan, vec![(String::new(), larger)]).await?.remove(0).status;
    let responses = complete_all(&format!("{url}/completions"), [1; EACH].into_iter()).await?;
    let served = served(&responses);
    println!("After an upgrade of the first tenant from 2 to 4 ({status}), {served} of its 4 are served.\n");
    Ok(results == [(12, 12), (8, 8), (6, 6), (6, 12)] && served == EACH)
}

#[tokio::main]
async fn main() -> ExitCode {
    support::exit(run().await)
}

async fn run() -> Result<(), Failure> {
    let mode = Mode::from_args()?;
    let locks = support::locks().await?;
    let state = App::new();
    let server = Server::start(app(&locks, state.clone()), &locks, mode).await?;
    let url = server.url.clone();
    let Some(server) = server.after(mode, demo(&state, &url)).await? else { return Ok(()) };
    println!("Try it:\n");
    println!(
        "  complete() {{ curl -s -w ' -> %{{http_code}}\\n' -H 'content-type: application/json' -H \"authorization: Bearer key-$2\" {url}/$1 -d '{{\"prompt\":\"Hello\"}}'; }}\n"
    );
    println!("  # Two of three are served: the plan of the tenant has two.");
    println!("  complete completions 2 & complete completions 2 & complete completions 2 & wait\n");
    println!("  # All three, one after the other two.");
    println!("  for n in 1 2 3; do complete completions-waiting 2 & done; wait\n");
    println!("  # A larger plan counts from the next request on. A plan of 0 rejects each request.");
    println!("  curl -X PUT -H 'content-type: application/json' {url}/plans/key-2 -d '{{\"completions\":3}}'");
    println!("\nCtrl-C stops.");
    server.run().await
}
