//! Ten buyers of five items. All requests wait, and the late ones get "sold out" from the shop.
//!
//! ```sh
//! cargo run --example stock_sale               # a table, then a server for manual requests
//! cargo run --example stock_sale -- --demo     # the table alone
//! cargo run --example stock_sale -- --serve    # the server alone
//! ```
//!
//! Environment: `PORT` (0: any; default 3000), `DATABASE_URL` (`sqlite://shop.db`, or
//! `mysql://..` or `postgres://..` with a feature of that name; default: SQLite in memory) and
//! `LOCK_URL` (`redis://localhost`, `mysql://..` or `postgres://..`, with such a feature: locks
//! that all instances share; default: locks within this process).
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
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use sqlx::{AnyConnection, AnyPool};
use tower_lock::{HeldLock, Lease, LockLayer, LockManager, key};

use support::{
    ApiError, Failure, Mode, Server, THINK_TIME, Table,
    database::{Dialect, check_fence},
    send_at_once, timed,
};

const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS good (
    id BIGINT PRIMARY KEY,
    good_name VARCHAR(100) NOT NULL,
    good_counts INT NOT NULL
);
INSERT OR IGNORE INTO good (id, good_name, good_counts) VALUES (1, 'kettle', 5), (2, 'teapot', 5)";

/// Long enough for all ten buyers of the demo.
const WAIT: Duration = Duration::from_secs(10);

/// A sale that takes longer is aborted, and the next buyer's request runs.
const SALE: Lease = Lease::Fixed(Duration::from_secs(60));

#[derive(Clone)]
struct App {
    db: AnyPool,
}

const NO_SUCH_GOOD: ApiError = ApiError::Status(StatusCode::NOT_FOUND, "there is no such good");

enum Sale {
    Sold { left: i32 },
    SoldOut,
}

fn app(app: App, locks: &LockManager) -> Router {
    // The buyers of one good are served one after the other.
    let one_buyer_at_a_time =
        LockLayer::new(locks, key::from_fn(|Path(id): Path<i64>| ("good", id))).wait(WAIT).lease(SALE);

    Router::new()
        .route("/goods/{id}/sell", post(sell).route_layer(one_buyer_at_a_time))
        .route("/goods/{id}/sell-unlocked", post(sell_unlocked))
        .route("/goods/{id}", get(good))
        .with_state(app)
}

/// Check, compute, write: alone for its key, because the layer is on the route.
async fn sell(lock: HeldLock, State(app): State<App>, Path(id): Path<i64>) -> Response {
    timed(async {
        if count(&mut *app.db.acquire().await?, id).await? < 1 {
            return Ok(Sale::SoldOut);
        }
        tokio::time::sleep(THINK_TIME).await;
        let mut transaction = app.db.begin().await?;
        check_fence(&mut transaction, &lock).await?;
        let left = take_one(&mut transaction, id).await?;
        transaction.commit().await?;
        Ok::<_, ApiError>(Sale::Sold { left })
    })
    .await
}

/// The same handler without a lock.
async fn sell_unlocked(State(app): State<App>, Path(id): Path<i64>) -> Response {
    timed(async {
        if count(&mut *app.db.acquire().await?, id).await? < 1 {
            return Ok(Sale::SoldOut);
        }
        tokio::time::sleep(THINK_TIME).await;
        let mut transaction = app.db.begin().await?;
        let left = take_one(&mut transaction, id).await?;
        transaction.commit().await?;
        Ok::<_, ApiError>(Sale::Sold { left })
    })
    .await
}

async fn good(State(app): State<App>, Path(id): Path<i64>) -> Result<Json<Value>, ApiError> {
    let query = app.db.sql("SELECT good_name, good_counts FROM good WHERE id = ?");
    let (name, counts): (String, i32) =
        sqlx::query_as(&query).bind(id).fetch_optional(&app.db).await?.ok_or(NO_SUCH_GOOD)?;
    Ok(Json(json!({ "id": id, "good_name": name, "good_counts": counts })))
}

impl IntoResponse for Sale {
    fn into_response(self) -> Response {
        match self {
            Self::Sold { left } => Json(json!({ "sold": 1, "good_counts": left })).into_response(),
            // A 409 of the shop: the request ran under its lock, and no item was left.
            Self::SoldOut => (StatusCode::CONFLICT, Json(json!({ "error": "sold out" }))).into_response(),
        }
    }
}

// === database ===

async fn count(db: &mut AnyConnection, id: i64) -> Result<i32, ApiError> {
    let query = db.sql("SELECT good_counts FROM good WHERE id = ?");
    let row: Option<(i32,)> = sqlx::query_as(&query).bind(id).fetch_optional(db).await?;
    Ok(row.ok_or(NO_SUCH_GOOD)?.0)
}

async fn take_one(db: &mut AnyConnection, id: i64) -> Result<i32, ApiError> {
    let update = db.sql("UPDATE good SET good_counts = good_counts - 1 WHERE id = ?");
    sqlx::query(&update).bind(id).execute(&mut *db).await?;
    count(db, id).await
}

// === the table ===

/// Returns whether five are sold and five rejected under the layer, and more are sold without it.
async fn demo(db: &AnyPool, url: &str) -> Result<bool, Failure> {
    println!("Ten buyers, five items.\n");
    // New goods, because the database may be persistent.
    let good = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())? * 10;
    let mut table = Table::new("items left of 5");
    let mut results = Vec::new();
    for (n, (name, path)) in [("without a lock", "sell-unlocked"), ("under the layer", "sell")].into_iter().enumerate()
    {
        let good = good + i64::try_from(n)?;
        let insert = db.sql("INSERT INTO good (id, good_name, good_counts) VALUES (?, 'demo', 5)");
        sqlx::query(&insert).bind(good).execute(db).await?;
        let responses = send_at_once(10, Method::POST, &format!("{url}/goods/{good}/{path}"), Value::Null).await?;
        let left = support::get(&format!("{url}/goods/{good}")).await?["good_counts"].clone();
        table.row(name, &left, &responses, |response| match response.status.as_u16() {
            200 => "sold",
            409 if response.body["error"] == "sold out" => "sold out",
            _ => "",
        });
        let sold = responses.iter().filter(|response| response.status == StatusCode::OK).count();
        let rejected = responses.iter().filter(|response| response.body["error"] == "sold out").count();
        results.push((left.as_i64().unwrap_or_default(), sold, rejected));
    }
    table.print();
    Ok(results[0].0 < 0 && results[1] == (0, 5, 5))
}

#[tokio::main]
async fn main() -> ExitCode {
    support::exit(run().await)
}

async fn run() -> Result<(), Failure> {
    let mode = Mode::from_args()?;
    let db = support::database::open(SCHEMA).await?;
    let locks = support::locks().await?;
    let server = Server::start(app(App { db: db.clone() }, &locks), &locks, mode).await?;
    let url = server.url.clone();
    let Some(server) = server.after(mode, demo(&db, &url)).await? else { return Ok(()) };
    println!("Try it:\n");
    println!("  # Five are served one after the other, the sixth gets \"sold out\".");
    println!("  for n in 1 2 3 4 5 6; do curl -s -w '\\n' -X POST {url}/goods/1/sell & done; wait\n");
    println!("  # Without the layer all six are served.");
    println!("  for n in 1 2 3 4 5 6; do curl -s -w '\\n' -X POST {url}/goods/2/sell-unlocked & done; wait\n");
    println!("  curl {url}/goods/1; echo; curl {url}/goods/2; echo");
    println!("\nCtrl-C stops.");
    server.run().await
}
