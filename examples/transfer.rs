//! Five friends sit in a circle, and each pays 10 to the next one at the same time. A transfer
//! needs two accounts for itself.
//!
//! ```sh
//! cargo run --example transfer               # a table, then a server for manual requests
//! cargo run --example transfer -- --demo     # the table alone
//! cargo run --example transfer -- --serve    # the server alone
//! ```
//!
//! Environment: `PORT` (0: any; default 3000), `DATABASE_URL` (`sqlite://shop.db`, or
//! `mysql://..` or `postgres://..` with a feature of that name; default: SQLite in memory) and
//! `LOCK_URL` (`redis://localhost`, `mysql://..` or `postgres://..`, with such a feature: locks
//! that all instances share; default: locks within this process).
//!
//! The service is the part above "the table". From the crate `support` it needs `ApiError` and, of
//! `database`, `Dialect` and `check_fence`. Leave `timed`, `worked` and `THINK_TIME` out: they are
//! for the table.

#![allow(clippy::disallowed_methods, reason = "a program with a runtime of its own, timed by a real clock")]

use std::{
    process::ExitCode,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::{Method, StatusCode},
    response::Response,
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::AnyPool;
use tower_lock::{HeldLock, HeldLocks, LockGuard, LockLayer, LockManager, key};

use support::{
    ApiError, ClientResponse, Failure, Mode, Server, THINK_TIME, Table,
    database::{Dialect, check_fence},
    send_each, timed, worked,
};

const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS account (
    id BIGINT PRIMARY KEY,
    balance BIGINT NOT NULL
);
INSERT OR IGNORE INTO account (id, balance) VALUES (1, 100), (2, 100), (3, 100), (4, 100), (5, 100)";

/// Long enough for all five transfers of the demo.
const WAIT: Duration = Duration::from_secs(10);

/// The wait for a single lock. Requests that wait for each other do so until its end: it is short
/// for the demo.
const SHORT_WAIT: Duration = Duration::from_millis(600);

#[derive(Clone, Copy, Deserialize)]
struct Transfer {
    from: i64,
    to: i64,
    amount: i64,
}

#[derive(Clone)]
struct App {
    db: AnyPool,
    locks: LockManager,
}

const NO_SUCH_ACCOUNT: ApiError = ApiError::Status(StatusCode::NOT_FOUND, "there is no such account");
const INVALID: ApiError = ApiError::Status(
    StatusCode::UNPROCESSABLE_ENTITY,
    "the accounts must be different, and the amount must be positive",
);
/// A 409 of the bank: the request ran under its locks.
const TOO_LITTLE: ApiError = ApiError::Status(StatusCode::CONFLICT, "the balance is too small");

type Done = Result<Json<Value>, ApiError>;

fn app(app: App) -> Router {
    // The locks of both accounts, or neither. Their order in the list does not matter.
    let both_accounts = LockLayer::new(
        &app.locks,
        key::from_fn(|Json(t): Json<Transfer>| key::all([("account", t.from), ("account", t.to)])),
    )
    .wait(WAIT);

    Router::new()
        .route("/transfers", post(transfer).route_layer(both_accounts))
        .route("/transfers-unlocked", post(transfer_unlocked))
        .route("/transfers-one-by-one", post(transfer_one_by_one))
        .route("/accounts/{id}", get(account))
        .with_state(app)
}

/// Read both, compute, write both: alone for its accounts, because the layer is on the route.
async fn transfer(locks: HeldLocks, State(app): State<App>, Json(transfer): Json<Transfer>) -> Response {
    timed(async {
        transfer.check()?;
        let from = balance(&app.db, transfer.from).await?;
        let to = balance(&app.db, transfer.to).await?;
        tokio::time::sleep(THINK_TIME).await;
        write(&app.db, transfer, [from, to], &locks).await
    })
    .await
}

/// The same handler without a lock.
async fn transfer_unlocked(State(app): State<App>, Json(transfer): Json<Transfer>) -> Response {
    timed(async {
        transfer.check()?;
        let from = balance(&app.db, transfer.from).await?;
        let to = balance(&app.db, transfer.to).await?;
        tokio::time::sleep(THINK_TIME).await;
        write(&app.db, transfer, [from, to], []).await
    })
    .await
}

/// A mistake: each request holds the lock of the account that pays, and waits for that of the other
/// one. Requests in a circle wait for each other until a wait times out.
async fn transfer_one_by_one(State(app): State<App>, Json(transfer): Json<Transfer>) -> Response {
    let began = Instant::now();
    let mut waited = Duration::ZERO;
    let response = async {
        transfer.check()?;
        let first = app.lock(transfer.from, &mut waited).await?;
        let done = transfer_under(&app, transfer, &first, &mut waited).await;
        // Also after an error: a guard that is dropped blocks its key for the lock-delay.
        drop(first.release().await);
        done
    }
    .await;
    worked(began.elapsed() - waited, response)
}

/// The rest of it, under the lock of the account that pays.
async fn transfer_under(app: &App, transfer: Transfer, first: &LockGuard, waited: &mut Duration) -> Done {
    let from = balance(&app.db, transfer.from).await?;
    tokio::time::sleep(THINK_TIME).await;
    let second = app.lock(transfer.to, waited).await?;
    let done = async {
        let to = balance(&app.db, transfer.to).await?;
        tokio::time::sleep(THINK_TIME / 2).await;
        write(&app.db, transfer, [from, to], [&first.held_lock(), &second.held_lock()]).await
    }
    .await;
    drop(second.release().await);
    done
}

async fn account(State(app): State<App>, Path(id): Path<i64>) -> Done {
    let balance = balance(&app.db, id).await?;
    Ok(Json(json!({ "id": id, "balance": balance })))
}

impl App {
    /// Acquires the lock of one account, and adds the time of its wait.
    async fn lock(&self, account: i64, waited: &mut Duration) -> Result<LockGuard, ApiError> {
        let enqueued = Instant::now();
        let guard = self.locks.lock(("account", account)).wait(SHORT_WAIT).await;
        *waited += enqueued.elapsed();
        Ok(guard?)
    }
}

impl Transfer {
    fn check(&self) -> Result<(), ApiError> {
        if self.from != self.to && self.amount > 0 { Ok(()) } else { Err(INVALID) }
    }
}

// === database ===

async fn balance(db: &AnyPool, id: i64) -> Result<i64, ApiError> {
    let query = db.sql("SELECT balance FROM account WHERE id = ?");
    let row: Option<(i64,)> = sqlx::query_as(&query).bind(id).fetch_optional(db).await?;
    Ok(row.ok_or(NO_SUCH_ACCOUNT)?.0)
}

/// Writes both balances, unless a holder with a later token of one of the locks has written.
async fn write(
    db: &AnyPool,
    transfer: Transfer,
    [from, to]: [i64; 2],
    locks: impl IntoIterator<Item = &HeldLock>,
) -> Done {
    if from < transfer.amount {
        return Err(TOO_LITTLE);
    }
    let (from, to) = (from - transfer.amount, to + transfer.amount);
    let mut balances = [(transfer.from, from), (transfer.to, to)];
    // In one order: without a lock, MySQL would abort one of two transactions that write the same
    // rows in opposite orders.
    balances.sort_unstable();
    let mut transaction = db.begin().await?;
    for lock in locks {
        check_fence(&mut transaction, lock).await?;
    }
    for (id, balance) in balances {
        let update = db.sql("UPDATE account SET balance = ? WHERE id = ?");
        sqlx::query(&update).bind(balance).bind(id).execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    Ok(Json(json!({ "from": from, "to": to })))
}

// === the table ===

const FRIENDS: i64 = 5;

/// Five accounts with 100 each, from this id on.
async fn open_accounts(db: &AnyPool, first: i64) -> Result<(), Failure> {
    for id in first..first + FRIENDS {
        let insert = db.sql("INSERT INTO account (id, balance) VALUES (?, 100)");
        sqlx::query(&insert).bind(id).execute(db).await?;
    }
    Ok(())
}

/// Returns whether all transfers are done under the layer, some are not with single locks, and
/// money is lost or made without a lock.
async fn demo(db: &AnyPool, url: &str) -> Result<bool, Failure> {
    println!("Five friends sit in a circle. Each pays 10 to the next one at the same time.\n");
    // New accounts, because the database may be persistent.
    let first = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())? * 100;
    let mut table = Table::new("money of 500");
    let mut results = Vec::new();
    for (n, (name, path)) in [
        ("without a lock", "transfers-unlocked"),
        ("one lock after the other", "transfers-one-by-one"),
        ("under the layer", "transfers"),
    ]
    .into_iter()
    .enumerate()
    {
        let first = first + i64::try_from(n)? * FRIENDS;
        open_accounts(db, first).await?;
        let pay = |n| json!({ "from": first + n, "to": first + (n + 1) % FRIENDS, "amount": 10 });
        let responses = send_each(Method::POST, &format!("{url}/{path}"), (0..FRIENDS).map(pay).collect()).await?;
        let mut money = 0;
        for id in first..first + FRIENDS {
            money += support::get(&format!("{url}/accounts/{id}")).await?["balance"].as_i64().unwrap_or_default();
        }
        table.row(name, money, &responses, |response| match response.status.as_u16() {
            200 => "done",
            409 => "timed out",
            _ => "",
        });
        let is_done = |response: &&ClientResponse| response.status == StatusCode::OK;
        results.push((money, responses.iter().filter(is_done).count()));
    }
    table.print();
    Ok(matches!(results[..], [(unlocked, 5), (500, 0..5), (500, 5)] if unlocked != 500))
}

#[tokio::main]
async fn main() -> ExitCode {
    support::exit(run().await)
}

async fn run() -> Result<(), Failure> {
    let mode = Mode::from_args()?;
    let db = support::database::open(SCHEMA).await?;
    let locks = support::locks().await?;
    let server = Server::start(app(App { db: db.clone(), locks: locks.clone() }), &locks, mode).await?;
    let url = server.url.clone();
    let Some(server) = server.after(mode, demo(&db, &url)).await? else { return Ok(()) };
    println!("Try it:\n");
    println!(
        "  pay() {{ curl -s -w ' -> %{{http_code}}\\n' -H 'content-type: application/json' {url}/$1 -d \"{{\\\"from\\\":$2,\\\"to\\\":$3,\\\"amount\\\":10}}\"; }}\n"
    );
    println!("  # In both directions: both are done, one after the other.");
    println!("  pay transfers 1 2 & pay transfers 2 1 & wait\n");
    println!("  # With one lock after the other, one or both get 409.");
    println!("  pay transfers-one-by-one 1 2 & pay transfers-one-by-one 2 1 & wait\n");
    println!("  for n in 1 2 3 4 5; do curl -s {url}/accounts/$n; echo; done");
    println!("\nCtrl-C stops.");
    server.run().await
}
