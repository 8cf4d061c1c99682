//! A document of two chapters: readers read both beside each other, a writer writes both alone.
//!
//! ```sh
//! cargo run --example document               # a table, then a server for manual requests
//! cargo run --example document -- --demo     # the table alone
//! cargo run --example document -- --serve    # the server alone
//! ```
//!
//! Environment: `PORT` (0: any; default 3000), `DATABASE_URL` (`sqlite://shop.db`, or
//! `mysql://..` or `postgres://..` with a feature of that name; default: SQLite in memory) and
//! `LOCK_URL` (`redis://localhost` or `postgres://..`, with such a feature: locks that all
//! instances share; default: locks within this process). MySQL has no readers.
//!
//! The service is the part above "the table". From the crate `support` it needs `ApiError` and, of
//! `database`, `Dialect` and `check_fence`. Leave `timed` and `THINK_TIME` out: they are for the
//! table.

#![allow(clippy::disallowed_methods, reason = "a program with a runtime of its own, timed by a real clock")]

use std::{
    process::ExitCode,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::{Method, StatusCode},
    response::Response,
    routing::get,
};
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::AnyPool;
use tower_lock::{HeldLock, HeldPermit, LockLayer, LockManager, key};

use support::{
    ApiError, ClientResponse, Failure, Mode, Server, THINK_TIME, Table,
    database::{Dialect, check_fence},
    send_at_once, timed,
};

const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS chapter (
    document BIGINT NOT NULL,
    number BIGINT NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (document, number)
)";

const WAIT: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
struct NewVersion {
    version: i64,
}

const NO_SUCH_DOCUMENT: ApiError = ApiError::Status(StatusCode::NOT_FOUND, "there is no such document");

type Done = Result<Json<Value>, ApiError>;

fn app(db: &AnyPool, locks: &LockManager) -> Router {
    let document = || key::from_fn(|Path(id): Path<i64>| ("document", id));
    // Requests with these methods share the key. All others have it alone.
    let readers_together = LockLayer::new(locks, document()).shared_for([Method::GET, Method::HEAD]).wait(WAIT);
    let one_at_a_time = LockLayer::new(locks, document()).wait(WAIT);

    Router::new()
        .route("/documents/{id}", get(read).put(write).route_layer(readers_together))
        .route("/documents-one-by-one/{id}", get(read_alone).put(write).route_layer(one_at_a_time))
        .route("/documents-unlocked/{id}", get(read_unlocked).put(write_unlocked))
        .with_state(db.clone())
}

/// Reads the chapters one after the other, beside other readers, and never beside a writer.
async fn read(_permit: HeldPermit, State(db): State<AnyPool>, Path(id): Path<i64>) -> Response {
    timed(chapters(&db, id)).await
}

/// The same under a lock of its own.
async fn read_alone(_lock: HeldLock, State(db): State<AnyPool>, Path(id): Path<i64>) -> Response {
    timed(chapters(&db, id)).await
}

/// The same handler without a lock: a writer may write between the two queries.
async fn read_unlocked(State(db): State<AnyPool>, Path(id): Path<i64>) -> Response {
    timed(chapters(&db, id)).await
}

/// Writes the chapters one after the other. The writer has the key alone, and a fencing token.
async fn write(lock: HeldLock, State(db): State<AnyPool>, Path(id): Path<i64>, new: Json<NewVersion>) -> Response {
    timed(write_chapters(&db, id, new.version, Some(&lock))).await
}

async fn write_unlocked(State(db): State<AnyPool>, Path(id): Path<i64>, new: Json<NewVersion>) -> Response {
    timed(write_chapters(&db, id, new.version, None)).await
}

// === database ===

async fn chapters(db: &AnyPool, id: i64) -> Done {
    let mut versions = Vec::new();
    for number in [1_i64, 2] {
        // Each chapter is in a transaction of its own, or in a file or service of its own.
        let query = db.sql("SELECT version FROM chapter WHERE document = ? AND number = ?");
        let row: Option<(i64,)> = sqlx::query_as(&query).bind(id).bind(number).fetch_optional(db).await?;
        versions.push(row.ok_or(NO_SUCH_DOCUMENT)?.0);
        if number == 1 {
            tokio::time::sleep(THINK_TIME).await;
        }
    }
    Ok(Json(json!(versions)))
}

async fn write_chapters(db: &AnyPool, id: i64, version: i64, lock: Option<&HeldLock>) -> Done {
    for number in [1_i64, 2] {
        let mut transaction = db.begin().await?;
        if let Some(lock) = lock {
            check_fence(&mut transaction, lock).await?;
        }
        let update = db.sql("UPDATE chapter SET version = ? WHERE document = ? AND number = ?");
        let query = sqlx::query(&update).bind(version).bind(id).bind(number);
        if query.execute(&mut *transaction).await?.rows_affected() == 0 {
            return Err(NO_SUCH_DOCUMENT);
        }
        transaction.commit().await?;
        tokio::time::sleep(THINK_TIME / 5).await;
    }
    Ok(Json(json!([version, version])))
}

// === the table ===

const READERS: usize = 8;

async fn open_document(db: &AnyPool, id: i64) -> Result<(), Failure> {
    for number in [1_i64, 2] {
        let insert = db.sql("INSERT INTO chapter (document, number, version) VALUES (?, ?, 1)");
        sqlx::query(&insert).bind(id).bind(number).execute(db).await?;
    }
    Ok(())
}

/// Returns whether readers under a layer never see a half of a write, and those that share their
/// key do not wait for each other.
async fn demo(db: &AnyPool, url: &str) -> Result<bool, Failure> {
    println!("Eight readers and a writer use one document at the same time.\n");
    // New documents, because the database may be persistent.
    let first = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())? * 10;
    let mut table = Table::new("torn reads");
    let mut results = Vec::new();
    for (n, (name, path)) in [
        ("without a lock", "documents-unlocked"),
        ("one at a time", "documents-one-by-one"),
        ("readers together", "documents"),
    ]
    .into_iter()
    .enumerate()
    {
        let id = first + i64::try_from(n)?;
        open_document(db, id).await?;
        let url = format!("{url}/{path}/{id}");
        let write = async {
            tokio::time::sleep(THINK_TIME / 10).await;
            send_at_once(1, Method::PUT, &url, json!({ "version": 2 })).await
        };
        let (read, written) = tokio::join!(send_at_once(READERS, Method::GET, &url, Value::Null), write);
        let (read, written) = (read?, written?);
        let torn = read.iter().filter(|response| response.body[0] != response.body[1]).count();
        let responses: Vec<_> = read.into_iter().chain(written).collect();
        table.row(name, torn, &responses, |_| "");
        let slowest = responses.iter().map(|response| response.took).max().unwrap_or_default();
        let is_done = |response: &ClientResponse| response.status == StatusCode::OK;
        results.push((torn, slowest, responses.iter().all(is_done)));
    }
    table.print();
    let [(unlocked, ..), (0, one_by_one, true), (0, together, true)] = results[..] else { return Ok(false) };
    Ok(unlocked > 0 && together < one_by_one)
}

#[tokio::main]
async fn main() -> ExitCode {
    support::exit(run().await)
}

async fn run() -> Result<(), Failure> {
    let mode = Mode::from_args()?;
    let db = support::database::open(SCHEMA).await?;
    let locks = support::locks().await?;
    let server = Server::start(app(&db, &locks), &locks, mode).await?;
    let url = server.url.clone();
    let Some(server) = server.after(mode, demo(&db, &url)).await? else { return Ok(()) };
    open_document(&db, 1).await?;
    println!("Try it:\n");
    println!("  get_doc() {{ curl -s -w ' -> %{{time_total}} s\\n' {url}/documents/1; }}");
    println!(
        "  put_doc() {{ curl -s -X PUT -w ' -> %{{time_total}} s\\n' -H 'content-type: application/json' {url}/documents/1 -d \"{{\\\"version\\\":$1}}\"; }}\n"
    );
    println!("  # The readers run together, and the writer after them.");
    println!("  get_doc & get_doc & get_doc & put_doc 2 & wait\n");
    println!("  # A reader that comes after a waiting writer waits for it.");
    println!("  get_doc & sleep 0.05; put_doc 3 & sleep 0.02; get_doc & wait");
    println!("\nCtrl-C stops.");
    server.run().await
}
