//! A reward for a family is paid once. Five members tap "claim" at the same time.
//!
//! ```sh
//! cargo run --example reward_claim               # a table, then a server for manual requests
//! cargo run --example reward_claim -- --demo     # the table alone
//! cargo run --example reward_claim -- --serve    # the server alone
//! ```
//!
//! Environment: `PORT` (0: any; default 3000), `DATABASE_URL` (`sqlite://shop.db`, or
//! `mysql://..` or `postgres://..` with a feature of that name; default: SQLite in memory) and
//! `LOCK_URL` (`redis://localhost`, `mysql://..` or `postgres://..`, with such a feature: locks
//! that all instances share; default: locks within this process).
//!
//! The service is the part above "the table". From the crate `support` it needs `ApiError` and, of
//! `database`, `Dialect`, `check_fence` and `last_id`. Leave `timed` and `THINK_TIME` out: they are
//! for the table.

#![allow(clippy::disallowed_methods, reason = "a program with a runtime of its own, timed by a real clock")]

use std::{
    process::ExitCode,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    extract::{Query, State},
    http::{Method, StatusCode},
    response::Response,
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::{AnyConnection, AnyPool};
use tower_lock::{HeldLock, LockLayer, LockManager, ReplayLayer, key};

use support::{
    ApiError, Failure, Mode, Server, THINK_TIME, Table,
    database::{Dialect, check_fence, last_id},
    send_at_once, send_with_key, timed, worked,
};

/// Longer than a claim takes.
const WAIT: Duration = Duration::from_secs(10);

const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS family_reward_record (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    family_id BIGINT NOT NULL,
    reward_type INT NOT NULL,
    state INT NOT NULL DEFAULT 1,
    create_time TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
    update_time TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP
)";

#[derive(Clone, Copy, Deserialize)]
struct Claim {
    family_id: i64,
    reward_type: i32,
}

#[derive(Serialize, PartialEq)]
struct Record {
    id: i64,
    family_id: i64,
    reward_type: i32,
    state: i32,
}

type Claimed = Result<(StatusCode, Json<Record>), ApiError>;

#[derive(Clone)]
struct App {
    db: AnyPool,
    locks: LockManager,
}

fn app(app: App) -> Router {
    // One request at a time for a family and a reward; the others get 409 at once.
    let one_claim_at_a_time =
        LockLayer::new(&app.locks, key::from_fn(|Json(c): Json<Claim>| ("reward", c.family_id, c.reward_type)));

    // All requests with one `Idempotency-Key` get the answer of the first one, also later. These
    // requests have no authentication. A real service takes the scope from it, not from the body:
    // otherwise one client can read the answers of another one.
    let one_answer_per_key =
        ReplayLayer::new(&app.locks, key::from_fn(|Json(c): Json<Claim>| ("family", c.family_id))).wait(WAIT);

    Router::new()
        // The last `route_layer` is the outermost: an answer that is kept needs no lock.
        .route("/rewards/claim", post(claim).route_layer(one_claim_at_a_time).route_layer(one_answer_per_key))
        .route("/rewards/claim-unlocked", post(claim_unlocked))
        .route("/rewards/claim-checked-outside", post(claim_checked_outside))
        .route("/rewards", get(rewards))
        .with_state(app)
}

/// Check, compute, write: alone for its key, because the layer is on the route.
async fn claim(lock: HeldLock, State(app): State<App>, Json(claim): Json<Claim>) -> Response {
    timed(async {
        if let Some(record) = find(&app.db, claim).await? {
            return Ok((StatusCode::OK, Json(record)));
        }
        tokio::time::sleep(THINK_TIME).await;
        let mut transaction = app.db.begin().await?;
        check_fence(&mut transaction, &lock).await?;
        let record = insert(&mut transaction, claim).await?;
        transaction.commit().await?;
        Claimed::Ok((StatusCode::CREATED, Json(record)))
    })
    .await
}

/// The same handler without a lock.
async fn claim_unlocked(State(app): State<App>, Json(claim): Json<Claim>) -> Response {
    timed(async {
        if let Some(record) = find(&app.db, claim).await? {
            return Ok((StatusCode::OK, Json(record)));
        }
        tokio::time::sleep(THINK_TIME).await;
        Claimed::Ok((StatusCode::CREATED, Json(insert(&mut *app.db.acquire().await?, claim).await?)))
    })
    .await
}

/// A subtle mistake: the check runs before the lock is acquired, so its result is stale.
async fn claim_checked_outside(State(app): State<App>, Json(claim): Json<Claim>) -> Response {
    let began = Instant::now();
    let mut waited = Duration::ZERO;
    let response = async {
        if let Some(record) = find(&app.db, claim).await? {
            return Ok((StatusCode::OK, Json(record)));
        }
        tokio::time::sleep(THINK_TIME / 2).await;
        let enqueued = Instant::now();
        let guard = app.locks.lock(("reward", claim.family_id, claim.reward_type)).await?;
        waited = enqueued.elapsed();
        tokio::time::sleep(THINK_TIME / 2).await;
        let record = insert(&mut *app.db.acquire().await?, claim).await?;
        // The record is written, whether the release succeeds or not.
        drop(guard.release().await);
        Claimed::Ok((StatusCode::CREATED, Json(record)))
    }
    .await;
    worked(began.elapsed() - waited, response)
}

#[derive(Deserialize)]
struct OfFamily {
    family_id: i64,
}

async fn rewards(State(app): State<App>, Query(of): Query<OfFamily>) -> Result<Json<Vec<Record>>, ApiError> {
    let query = "SELECT id, family_id, reward_type, state FROM family_reward_record WHERE family_id = ? ORDER BY id";
    let rows: Vec<Row> = sqlx::query_as(&app.db.sql(query)).bind(of.family_id).fetch_all(&app.db).await?;
    Ok(Json(rows.into_iter().map(Record::from).collect()))
}

// === database ===

type Row = (i64, i64, i32, i32);

impl From<Row> for Record {
    fn from((id, family_id, reward_type, state): Row) -> Self {
        Self { id, family_id, reward_type, state }
    }
}

async fn find(db: &AnyPool, claim: Claim) -> Result<Option<Record>, ApiError> {
    let query = db.sql(
        "SELECT id, family_id, reward_type, state FROM family_reward_record
         WHERE family_id = ? AND reward_type = ? ORDER BY id LIMIT 1",
    );
    let row: Option<Row> =
        sqlx::query_as(&query).bind(claim.family_id).bind(claim.reward_type).fetch_optional(db).await?;
    Ok(row.map(Record::from))
}

async fn insert(db: &mut AnyConnection, claim: Claim) -> Result<Record, ApiError> {
    let insert = db.sql("INSERT INTO family_reward_record (family_id, reward_type) VALUES (?, ?)");
    sqlx::query(&insert).bind(claim.family_id).bind(claim.reward_type).execute(&mut *db).await?;
    Ok((last_id(db).await?, claim.family_id, claim.reward_type, 1).into())
}

// === the table ===

/// Returns whether there is exactly one record under the layers, and more without them.
async fn demo(url: &str) -> Result<bool, Failure> {
    println!("Five members of a family claim one reward at the same time.\n");
    // New families, because the database may be persistent.
    let family = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())? * 10;
    let mut table = Table::new("records inserted");
    let mut inserted = Vec::new();
    for (n, (name, path, key)) in [
        ("without a lock", "/rewards/claim-unlocked", None),
        ("lock acquired after the check", "/rewards/claim-checked-outside", None),
        ("under the layer", "/rewards/claim", None),
        ("with one Idempotency-Key", "/rewards/claim", Some("one-tap")),
    ]
    .into_iter()
    .enumerate()
    {
        let family = family + i64::try_from(n)?;
        let claim = json!({ "family_id": family, "reward_type": 1 });
        let responses = send_with_key(5, Method::POST, &format!("{url}{path}"), claim, key).await?;
        let records = support::get(&format!("{url}/rewards?family_id={family}")).await?;
        let records = records.as_array().map_or(0, Vec::len);
        table.row(name, records, &responses, |response| match response.status.as_u16() {
            201 if response.is_replayed => "replayed",
            201 => "claimed",
            409 => "rejected at once",
            _ => "",
        });
        inserted.push(records);
    }
    table.print();
    let claim = json!({ "family_id": family + 2, "reward_type": 1 });
    let later = send_at_once(1, Method::POST, &format!("{url}/rewards/claim"), claim).await?.remove(0);
    println!("  A sixth claim, later, gets the existing record: {} {}\n", later.status.as_u16(), later.body);
    Ok(matches!(inserted[..], [unlocked, _, 1, 1] if unlocked > 1) && later.status == StatusCode::OK)
}

#[tokio::main]
async fn main() -> ExitCode {
    support::exit(run().await)
}

async fn run() -> Result<(), Failure> {
    let mode = Mode::from_args()?;
    let db = support::database::open(SCHEMA).await?;
    let locks = support::locks().await?;
    let server = Server::start(app(App { db, locks: locks.clone() }), &locks, mode).await?;
    let url = server.url.clone();
    let Some(server) = server.after(mode, demo(&url)).await? else { return Ok(()) };
    println!("Try it:\n");
    println!(
        "  claim() {{ curl -s -w ' -> %{{http_code}}\\n' -H 'content-type: application/json' {url}/rewards/$1 -d \"$2\"; }}\n"
    );
    println!("  # One gets 201, the other one 409. A later repeat gets 200 and the same record.");
    println!("  family='{{\"family_id\":1,\"reward_type\":1}}'; claim claim $family & claim claim $family & wait\n");
    println!("  # Without the layer both get 201.");
    println!(
        "  family='{{\"family_id\":2,\"reward_type\":1}}'; claim claim-unlocked $family & claim claim-unlocked $family & wait\n"
    );
    println!("  curl '{url}/rewards?family_id=1'; echo; curl '{url}/rewards?family_id=2'; echo");
    println!("\nCtrl-C stops.");
    server.run().await
}
