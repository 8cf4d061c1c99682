//! An agent with one turn a session: a new message of the user stops the turn before it.
//!
//! ```sh
//! cargo run --example agent               # a table, then a server for manual requests
//! cargo run --example agent -- --demo     # the table alone
//! cargo run --example agent -- --serve    # the server alone
//! ```
//!
//! Environment: `PORT` (0: any; default 3000) and `LOCK_URL` (`redis://localhost` or
//! `postgres://..`, with a feature of that name: one turn a session in all instances together;
//! default: in this process).
//!
//! The service is the part above "the table".

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
    Json, Router,
    body::Body,
    extract::{Path, State},
    http::{Method, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::{future::join_all, stream};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::sleep;
use tower_lock::{HeldLock, LockLayer, LockManager, key};

use support::{ClientResponse, Failure, Mode, Server, Table, send_at_once, worked};

/// The agent of this example: an answer has this many words, one after the other.
const WORDS: u32 = 10;
const WORD_TIME: Duration = Duration::from_millis(40);

/// A turn notes where it was stopped, which takes less than this.
const GRACE: Duration = Duration::from_secs(1);
const WAIT: Duration = Duration::from_secs(10);

#[derive(Clone, Default)]
struct App {
    /// The lines of each session.
    transcripts: Arc<Mutex<HashMap<u64, Vec<String>>>>,
    running: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

#[derive(Deserialize)]
struct Message {
    text: String,
}

fn app(locks: &LockManager, app: App) -> Router {
    // The key of a service names its user, too: otherwise a user could stop the turns of others.
    let session = || key::from_fn(|Path(session): Path<u64>| ("session", session));
    let one_turn = || LockLayer::new(locks, session());
    Router::new()
        .route("/sessions/{session}/turns", post(turn).route_layer(one_turn().newest_wins(GRACE)))
        .route("/sessions/{session}/turns-waiting", post(turn).route_layer(one_turn().wait(WAIT)))
        .route("/sessions/{session}/turns-rejected", post(turn).route_layer(one_turn()))
        .route("/sessions/{session}/turns-unlocked", post(turn_unlocked))
        .route("/sessions/{session}", get(transcript))
        .with_state(app)
}

/// Streams an answer, word by word. The response holds the lock to its end.
async fn turn(lock: HeldLock, state: State<App>, path: Path<u64>, message: Json<Message>) -> Response {
    answer(Some(lock), state, path, message)
}

async fn turn_unlocked(state: State<App>, path: Path<u64>, message: Json<Message>) -> Response {
    answer(None, state, path, message)
}

fn answer(
    lock: Option<HeldLock>,
    State(app): State<App>,
    Path(session): Path<u64>,
    Json(message): Json<Message>,
) -> Response {
    let turn = Turn::start(app, session, &message.text);
    let words = stream::unfold((turn, lock, 0), |(turn, lock, said)| async move {
        if said > WORDS {
            return None;
        }
        let is_stopped = match &lock {
            Some(lock) => tokio::select! {
                () = lock.superseded() => true,
                () = sleep(WORD_TIME) => false,
            },
            None => {
                sleep(WORD_TIME).await;
                false
            }
        };
        // The text is a JSON array. Its last element says how the turn has ended.
        let start = if said == 0 { "[" } else { "" };
        let (text, next) = match said + 1 {
            _ if is_stopped => (format!("{start}\"stopped\"]"), WORDS + 1),
            WORDS => (format!("{start}\"answered\"]"), WORDS + 1),
            word => (format!("{start}\"word {word}\",\n"), word),
        };
        turn.note(if is_stopped { "(stopped by the next message)".to_owned() } else { format!("word {}", said + 1) });
        Some((Ok::<_, Infallible>(text), (turn, lock, next)))
    });
    worked(WORDS * WORD_TIME, ([(CONTENT_TYPE, "application/json")], Body::from_stream(words)).into_response())
}

async fn transcript(State(app): State<App>, Path(session): Path<u64>) -> Json<Value> {
    let transcripts = app.transcripts.lock().unwrap_or_else(PoisonError::into_inner);
    Json(json!(transcripts.get(&session)))
}

// === a turn ===

/// A turn under way.
struct Turn {
    app: App,
    session: u64,
}

impl Turn {
    fn start(app: App, session: u64, message: &str) -> Self {
        let running = app.running.fetch_add(1, SeqCst) + 1;
        app.most.fetch_max(running, SeqCst);
        let turn = Self { app, session };
        turn.note(format!("User: {message}"));
        turn
    }

    fn note(&self, line: String) {
        let mut transcripts = self.app.transcripts.lock().unwrap_or_else(PoisonError::into_inner);
        transcripts.entry(self.session).or_default().push(line);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.app.running.fetch_sub(1, SeqCst);
    }
}

// === the table ===

const MESSAGES: [&str; 3] = ["A trip to Rome, please", "No, to Oslo", "In May"];
const PAUSE: Duration = Duration::from_millis(100);

/// Sends each message a while after the one before it.
async fn send(url: &str) -> Result<Vec<ClientResponse>, Failure> {
    let send = async |(n, text): (usize, &&str)| {
        sleep(PAUSE * u32::try_from(n)?).await;
        Ok(send_at_once(1, Method::POST, url, json!({ "text": text })).await?.remove(0))
    };
    join_all(MESSAGES.iter().enumerate().map(send)).await.into_iter().collect()
}

/// How a turn has ended.
fn end(response: &ClientResponse) -> &'static str {
    match response.body.as_array().and_then(|words| words.last()?.as_str()) {
        Some("answered") => "answered",
        Some("stopped") => "stopped",
        _ if response.status == StatusCode::CONFLICT => "rejected",
        _ => "",
    }
}

/// When the last message is answered.
fn last_answer(app: &App, last: &ClientResponse) -> &'static str {
    match app.most.swap(0, SeqCst) {
        2.. => "in a mix",
        _ if end(last) != "answered" => "never",
        _ if last.took > WORDS * WORD_TIME * 3 / 2 => "late",
        _ => "at once",
    }
}

/// Returns whether the last message is answered at once, alone, and only with the newest winning.
async fn demo(app: &App, url: &str) -> Result<bool, Failure> {
    println!("A user corrects a message two times, almost at the same time.\n");
    let mut table = Table::new("last answer");
    let mut results = Vec::new();
    for (session, (name, path)) in [
        ("no lock", "turns-unlocked"),
        ("the layer rejects", "turns-rejected"),
        ("the layer waits", "turns-waiting"),
        ("the newest wins", "turns"),
    ]
    .into_iter()
    .enumerate()
    {
        let responses = send(&format!("{url}/sessions/{session}/{path}")).await?;
        let result = responses.last().map_or("", |last| last_answer(app, last));
        table.row(name, result, &responses, end);
        results.push((result, responses.iter().map(end).collect::<Vec<_>>()));
    }
    table.print();
    let [mixed, rejected, late, newest] = &results[..] else { return Ok(false) };
    Ok(mixed.0 == "in a mix"
        && *rejected == ("never", vec!["answered", "rejected", "rejected"])
        && *late == ("late", vec!["answered"; 3])
        && *newest == ("at once", vec!["stopped", "stopped", "answered"]))
}

#[tokio::main]
async fn main() -> ExitCode {
    support::exit(run().await)
}

async fn run() -> Result<(), Failure> {
    let mode = Mode::from_args()?;
    let locks = support::locks().await?;
    let state = App::default();
    let server = Server::start(app(&locks, state.clone()), &locks, mode).await?;
    let url = server.url.clone();
    let Some(server) = server.after(mode, demo(&state, &url)).await? else { return Ok(()) };
    println!("Try it:\n");
    println!(
        "  say() {{ curl -sN -w ' -> %{{http_code}}\\n' -H 'content-type: application/json' {url}/sessions/7/turns -d \"{{\\\"text\\\":\\\"$1\\\"}}\"; }}\n"
    );
    println!("  # The second message stops the turn of the first one.");
    println!("  say 'To Rome' & sleep 0.2; say 'No, to Oslo'; wait\n");
    println!("  curl -s {url}/sessions/7");
    println!("\nCtrl-C stops.");
    server.run().await
}
