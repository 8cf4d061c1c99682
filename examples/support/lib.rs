//! Shared by several examples: locks, a database, a server with graceful shutdown, concurrent
//! requests, a table.

#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    reason = "a library of these programs"
)]
#![allow(clippy::disallowed_methods, reason = "for programs with a runtime of their own")]

use std::{
    env,
    error::Error,
    fmt::Display,
    process::ExitCode,
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    http::{Method, Request, StatusCode},
    response::{IntoResponse, Response},
};
use futures_util::future::join_all;
use http_body_util::BodyExt;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};
use tower_lock::{LockManager, LockManagerBuilder, store::ConnectError};

pub mod database;

pub type Failure = Box<dyn Error + Send + Sync>;

/// How long the requests that hold a lock may take to finish when the process is stopped.
const SHUTDOWN: Duration = Duration::from_secs(20);

/// The work of a handler between its check and its write: call another service, render a mail.
pub const THINK_TIME: Duration = Duration::from_millis(150);

// === arguments ===

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Table, then serve.
    Both,
    /// Table, then exit; the exit code is non-zero if the table is not as expected.
    Demo,
    /// No table.
    Serve,
}

impl Mode {
    pub fn from_args() -> Result<Self, Failure> {
        match env::args().skip(1).collect::<Vec<_>>().as_slice() {
            [] => Ok(Self::Both),
            [one] if one == "--demo" => Ok(Self::Demo),
            [one] if one == "--serve" => Ok(Self::Serve),
            _ => Err("usage: [--demo | --serve]".into()),
        }
    }
}

/// Returns the exit code, and prints an error to stderr.
pub fn exit(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

// === locks ===

/// Locks in the store of `LOCK_URL`. Without it, within this process.
pub async fn locks() -> Result<LockManager, Failure> {
    Ok(lock_builder().await?.build())
}

/// The same, for programs that set more.
pub async fn lock_builder() -> Result<LockManagerBuilder, Failure> {
    let (variable, url) = lock_url().unwrap_or(("LOCK_URL", "memory:".to_owned()));
    LockManager::connect(&url).await.map_err(|error| match error {
        ConnectError::MissingFeature { scheme, feature, .. } => {
            format!("{variable}: built without `{scheme}:`; add `--features {feature}` to `cargo run`").into()
        }
        // On one line, with its causes.
        error => format!("{variable}: {error:?}").into(),
    })
}

/// The variable that is set, and its URL: `LOCK_URL`, or `REDIS_URL`.
pub fn lock_url() -> Option<(&'static str, String)> {
    ["LOCK_URL", "REDIS_URL"].into_iter().find_map(|name| Some((name, env::var(name).ok()?)))
}

/// Whether other processes share the locks.
pub fn locks_are_shared() -> bool {
    lock_url().is_some_and(|(_, url)| !url.starts_with("memory:"))
}

// === responses ===

pub enum ApiError {
    Status(StatusCode, &'static str),
    Lock(tower_lock::LockError),
    Database(sqlx::Error),
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, text) = match self {
            Self::Status(status, text) => (status, text.into()),
            Self::Lock(error) => (StatusCode::CONFLICT, error.to_string()),
            Self::Database(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        };
        (status, Json(json!({ "error": text }))).into_response()
    }
}

impl From<sqlx::Error> for ApiError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

impl From<tower_lock::LockError> for ApiError {
    fn from(error: tower_lock::LockError) -> Self {
        Self::Lock(error)
    }
}

/// The run time of the handler, for the table of the demo.
const WORKED_US: &str = "x-worked-us";

/// Adds the run time of the handler in a header, also to an error: the request waited for the rest
/// of its time.
pub async fn timed<T: IntoResponse, E: IntoResponse>(work: impl Future<Output = Result<T, E>>) -> Response {
    let began = Instant::now();
    let response = work.await;
    worked(began.elapsed(), response)
}

pub fn worked(worked: Duration, response: impl IntoResponse) -> Response {
    let mut response = response.into_response();
    let worked = u64::try_from(worked.as_micros()).unwrap_or(u64::MAX);
    response.headers_mut().insert(WORKED_US, worked.into());
    response
}

// === server ===

pub struct Server {
    pub url: String,
    stop: oneshot::Sender<()>,
    running: JoinHandle<std::io::Result<()>>,
}

impl Server {
    /// Binds to `PORT`; 0, the default of the demo, is any free port.
    pub async fn start(app: Router, locks: &LockManager, mode: Mode) -> Result<Self, Failure> {
        let port = match env::var("PORT") {
            Ok(port) => port.parse::<u16>().map_err(|error| format!("PORT={port}: {error}"))?,
            Err(_) if mode == Mode::Demo => 0,
            Err(_) => 3000,
        };
        let listener = TcpListener::bind(("127.0.0.1", port))
            .await
            .map_err(|error| format!("port {port}: {error}; PORT chooses another"))?;
        let url = format!("http://{}", listener.local_addr()?);
        println!("listening on {url}\n");
        let (stop, stopped) = oneshot::channel();
        let signal = locks.shutdown_on_signal(SHUTDOWN);
        let serve = axum::serve(listener, app).with_graceful_shutdown(async {
            tokio::select! {
                () = signal => {}
                _ = stopped => {}
            }
        });
        Ok(Self { url, stop, running: tokio::spawn(serve.into_future()) })
    }

    /// Runs the demo, which returns whether its table is as expected. Returns `None` if the program
    /// ends after it.
    pub async fn after(
        self,
        mode: Mode,
        demo: impl Future<Output = Result<bool, Failure>>,
    ) -> Result<Option<Self>, Failure> {
        if mode == Mode::Serve {
            return Ok(Some(self));
        }
        let as_expected = demo.await?;
        if mode == Mode::Both {
            return Ok(Some(self));
        }
        drop(self.stop);
        self.running.await??;
        if as_expected { Ok(None) } else { Err("the table is not as expected".into()) }
    }

    /// Runs until Ctrl-C or SIGTERM, then finishes the requests in flight.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { stop: _not_before, running, .. } = self;
        Ok(running.await??)
    }
}

// === concurrent requests ===

/// The response to one request.
pub struct ClientResponse {
    pub status: StatusCode,
    pub body: Value,
    /// From sending to the end of the response.
    pub took: Duration,
    /// The part of it in which the handler did not run.
    pub waited: Duration,
    /// It is the response to an earlier attempt.
    pub is_replayed: bool,
}

/// Sends the same request several times at the same time.
pub async fn send_at_once(
    times: usize,
    method: Method,
    url: &str,
    body: Value,
) -> Result<Vec<ClientResponse>, Failure> {
    send_with_key(times, method, url, body, None).await
}

/// The same, with an `Idempotency-Key` in each request.
pub async fn send_with_key(
    times: usize,
    method: Method,
    url: &str,
    body: Value,
    idempotency_key: Option<&str>,
) -> Result<Vec<ClientResponse>, Failure> {
    let mut request = Request::builder().method(method).uri(url).header("content-type", "application/json");
    if let Some(key) = idempotency_key {
        request = request.header("idempotency-key", key);
    }
    send_all(vec![request.body(body.to_string())?; times]).await
}

/// Sends a request for each of these bodies at the same time.
pub async fn send_each(method: Method, url: &str, bodies: Vec<Value>) -> Result<Vec<ClientResponse>, Failure> {
    let request = |body: Value| {
        let request = Request::builder().method(method.clone()).uri(url).header("content-type", "application/json");
        request.body(body.to_string())
    };
    send_all(bodies.into_iter().map(request).collect::<Result<_, _>>()?).await
}

/// Sends a request for each of these `Authorization` headers and bodies at the same time.
pub async fn send_as(
    method: Method,
    url: &str,
    requests: Vec<(String, Value)>,
) -> Result<Vec<ClientResponse>, Failure> {
    let request = |(authorization, body): (String, Value)| {
        let request = Request::builder().method(method.clone()).uri(url).header("content-type", "application/json");
        request.header("authorization", authorization).body(body.to_string())
    };
    send_all(requests.into_iter().map(request).collect::<Result<_, _>>()?).await
}

async fn send_all(requests: Vec<Request<String>>) -> Result<Vec<ClientResponse>, Failure> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    let send = |request: Request<String>| {
        let (client, request) = (client.clone(), request.map(Body::from));
        async move {
            let sent = Instant::now();
            let response = client.request(request).await?;
            let status = response.status();
            let is_replayed = response.headers().contains_key("idempotency-replayed");
            let worked = response.headers().get(WORKED_US).and_then(|us| us.to_str().ok()?.parse().ok());
            let body: Bytes = response.into_body().collect().await?.to_bytes();
            let took = sent.elapsed();
            let waited = match worked {
                // The time in its header is that of the first attempt.
                _ if is_replayed => took,
                Some(us) => took.saturating_sub(Duration::from_micros(us)),
                // A rejected request has not waited.
                None => Duration::ZERO,
            };
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            Ok(ClientResponse { status, body, took, waited, is_replayed })
        }
    };
    join_all(requests.into_iter().map(send)).await.into_iter().collect()
}

pub async fn get(url: &str) -> Result<Value, Failure> {
    let response = send_at_once(1, Method::GET, url, Value::Null).await?.remove(0);
    if response.status.is_success() { Ok(response.body) } else { Err(format!("{url}: {}", response.status).into()) }
}

// === table ===

pub struct Table<const COLUMNS: usize = 5> {
    rows: Vec<[String; COLUMNS]>,
}

/// A table of responses.
impl Table {
    pub fn new(result: &str) -> Self {
        Self::of(["", result, "responses", "waited", "slowest response"])
    }

    pub fn row(
        &mut self,
        name: &str,
        result: impl Display,
        responses: &[ClientResponse],
        note: impl Fn(&ClientResponse) -> &'static str,
    ) {
        let mut statuses: Vec<(StatusCode, &str, usize)> = Vec::new();
        for response in responses {
            let note = note(response);
            match statuses.iter_mut().find(|(status, other, _)| (*status, *other) == (response.status, note)) {
                Some((.., count)) => *count += 1,
                None => statuses.push((response.status, note, 1)),
            }
        }
        statuses.sort();
        let statuses: Vec<_> =
            statuses.iter().map(|(status, note, count)| format!("{count} × {} {note}", status.as_u16())).collect();
        // Shorter times are network latency.
        let waited: Vec<_> = responses.iter().map(|a| a.waited).filter(|w| *w > THINK_TIME / 5).collect();
        let waited = match waited.iter().max() {
            None => "none".into(),
            Some(longest) => format!("{} of {}, up to {} ms", waited.len(), responses.len(), longest.as_millis()),
        };
        let slowest = responses.iter().map(|a| a.took).max().unwrap_or_default();
        self.line([
            name.into(),
            result.to_string(),
            statuses.join(", "),
            waited,
            format!("{} ms", slowest.as_millis()),
        ]);
    }
}

impl<const COLUMNS: usize> Table<COLUMNS> {
    pub fn of(heads: [&str; COLUMNS]) -> Self {
        Self { rows: vec![heads.map(Into::into)] }
    }

    pub fn line(&mut self, cells: [String; COLUMNS]) {
        self.rows.push(cells);
    }

    pub fn print(&self) {
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        for (n, row) in self.rows.iter().enumerate() {
            let cells: Vec<_> = row.iter().enumerate().map(|(c, cell)| format!("{cell:<0$}", width(c))).collect();
            println!("  {}", cells.join("   ").trim_end());
            if n == 0 {
                let rules: Vec<_> = (0..row.len()).map(|c| "─".repeat(width(c))).collect();
                println!("  {}", rules.join("   "));
            }
        }
        println!();
    }
}

/// Tests the examples of the pages that need a database or a session layer.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../docs/guarantees.md")]
    mod guarantees {}
    #[doc = include_str!("../../docs/guide/which-lock.md")]
    mod which_lock {}
    #[doc = include_str!("../../docs/guide/idempotency.md")]
    mod idempotency {}
    #[cfg(feature = "postgres")]
    #[doc = include_str!("../../docs/guide/locks-and-transactions.md")]
    mod locks_and_transactions {}
    #[cfg(feature = "sessions")]
    #[doc = include_str!("../../docs/guide/recipes.md")]
    mod recipes {}
}
