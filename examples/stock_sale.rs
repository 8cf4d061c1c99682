//! Five items, ten buyers. Here everybody waits their turn, and the late ones learn "sold out" from the shop.
//!
//! ```sh
//! cargo run --example stock_sale               # a table, then a server to try it by hand
//! cargo run --example stock_sale -- --demo     # the table alone
//! cargo run --example stock_sale -- --serve    # the server alone
//! ```
//!
//! Read from the environment: `PORT` (0: any; default 3000), `DATABASE_URL` (`sqlite://shop.db` or
//! `mysql://user:password@localhost/shop`; default: SQLite in memory) and `REDIS_URL` (`redis://localhost`: locks that all
//! instances share; default: locks within this process).

#![allow(clippy::disallowed_methods, reason = "a program with a runtime of its own, timed by a real clock")]

mod support;

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
use sqlx::{AnyConnection, AnyExecutor, AnyPool};
use tower_lock::{HeldLock, Lease, LockLayer, LockManager, key};

use self::support::{ApiError, Failure, Mode, Server, THINK_TIME, Table, database::check_fence, timed, volley};

const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS good (
    id BIGINT PRIMARY KEY,
    good_name VARCHAR(100) NOT NULL,
    good_counts INT NOT NULL
);
INSERT OR IGNORE INTO good (id, good_name, good_counts) VALUES (1, 'kettle', 5), (2, 'teapot', 5)";

/// Before the demo is done, ten buyers have each had their turn.
const PATIENCE: Duration = Duration::from_secs(10);

/// No sale takes longer: then it is broken off, whatever it waits for, and the next buyer has a turn.
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
    // The one line: buyers of one good come one after the other.
    let one_buyer_at_a_time =
        LockLayer::new(locks, key::from_fn(|Path(id): Path<i64>| ("good", id))).wait(PATIENCE).lease(SALE);

    Router::new()
        .route("/goods/{id}/sell", post(sell).route_layer(one_buyer_at_a_time))
        .route("/goods/{id}/sell-unlocked", post(sell_unlocked))
        .route("/goods/{id}", get(good))
        .with_state(app)
}

/// Check, think, act: alone, because the layer is on the route.
async fn sell(lock: HeldLock, State(app): State<App>, Path(id): Path<i64>) -> Response {
    timed(async {
        if count(&app.db, id).await? < 1 {
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
        if count(&app.db, id).await? < 1 {
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
    let (name, counts): (String, i32) = sqlx::query_as("SELECT good_name, good_counts FROM good WHERE id = ?")
        .bind(id)
        .fetch_optional(&app.db)
        .await?
        .ok_or(NO_SUCH_GOOD)?;
    Ok(Json(json!({ "id": id, "good_name": name, "good_counts": counts })))
}

impl IntoResponse for Sale {
    fn into_response(self) -> Response {
        match self {
            Self::Sold { left } => Json(json!({ "sold": 1, "good_counts": left })).into_response(),
            // The shop's own 409: the buyer had a turn, and it was too late.
            Self::SoldOut => (StatusCode::CONFLICT, Json(json!({ "error": "sold out" }))).into_response(),
        }
    }
}

// === database ===

async fn count(db: impl AnyExecutor<'_>, id: i64) -> Result<i32, ApiError> {
    let row: Option<(i32,)> =
        sqlx::query_as("SELECT good_counts FROM good WHERE id = ?").bind(id).fetch_optional(db).await?;
    Ok(row.ok_or(NO_SUCH_GOOD)?.0)
}

async fn take_one(db: &mut AnyConnection, id: i64) -> Result<i32, ApiError> {
    sqlx::query("UPDATE good SET good_counts = good_counts - 1 WHERE id = ?").bind(id).execute(&mut *db).await?;
    count(db, id).await
}

// === the table ===

/// Whether it went as promised: five sold and five told under the layer, below zero without.
async fn demo(db: &AnyPool, url: &str) -> Result<bool, Failure> {
    println!("Ten buyers, five items.\n");
    // Goods of its own, in a database that may last.
    let good = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())? * 10;
    let mut table = Table::new("items left of 5");
    let mut ends = Vec::new();
    for (n, (how, path)) in [("without a lock", "sell-unlocked"), ("under the layer", "sell")].into_iter().enumerate() {
        let good = good + i64::try_from(n)?;
        sqlx::query("INSERT INTO good (id, good_name, good_counts) VALUES (?, 'demo', 5)")
            .bind(good)
            .execute(db)
            .await?;
        let answers = volley(10, Method::POST, &format!("{url}/goods/{good}/{path}"), Value::Null).await?;
        let left = support::get(&format!("{url}/goods/{good}")).await?["good_counts"].clone();
        table.row(how, &left, &answers, |answer| match answer.status.as_u16() {
            200 => "sold",
            409 if answer.body["error"] == "sold out" => "sold out",
            _ => "",
        });
        let sold = answers.iter().filter(|answer| answer.status == StatusCode::OK).count();
        let told = answers.iter().filter(|answer| answer.body["error"] == "sold out").count();
        ends.push((left.as_i64().unwrap_or_default(), sold, told));
    }
    table.print();
    Ok(ends[0].0 < 0 && ends[1] == (0, 5, 5))
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
    if mode != Mode::Serve {
        let as_promised = demo(&db, &url).await?;
        if mode == Mode::Demo {
            server.stop().await?;
            return if as_promised { Ok(()) } else { Err("the table is not as promised".into()) };
        }
    }
    println!("Try it:\n");
    println!("  # Five are served one after the other, the sixth is told \"sold out\".");
    println!("  for n in 1 2 3 4 5 6; do curl -s -w '\\n' -X POST {url}/goods/1/sell & done; wait\n");
    println!("  # Without the layer all six are served.");
    println!("  for n in 1 2 3 4 5 6; do curl -s -w '\\n' -X POST {url}/goods/2/sell-unlocked & done; wait\n");
    println!("  curl {url}/goods/1; echo; curl {url}/goods/2; echo");
    println!("\nCtrl-C stops.");
    server.run().await
}
