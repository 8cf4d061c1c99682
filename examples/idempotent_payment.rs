//! A payment is made exactly once, although its process crashes before the client has a response.
//!
//! ```sh
//! cargo run --example idempotent_payment               # a table
//! cargo run --example idempotent_payment -- --serve    # the server, on port 3000
//! ```
//!
//! Environment: `PORT` (0: any), `DATABASE_URL` (`sqlite://shop.db`, or
//! `mysql://..` or `postgres://..` with a feature of that name; default: SQLite in a temporary
//! file, or in memory for the server) and `LOCK_URL` (`redis://localhost`, `mysql://..` or
//! `postgres://..`, with such a feature: locks and records that all instances share; default:
//! within this process).
//!
//! The service is the part above "the table". From the crate `support` it needs `ApiError` and, of
//! `database`, `Dialect`, `check_fence`, `has_locks`, `is_mysql` and `last_id`.

#![allow(clippy::disallowed_methods, reason = "a program with a runtime of its own, timed by a real clock")]

use std::{
    env,
    process::{self, ExitCode, Stdio},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    extract::State,
    http::{Method, StatusCode},
    response::{IntoResponse, Response},
    routing::post,
};
use serde::Deserialize;
use serde_json::json;
use sqlx::{AnyConnection, AnyPool};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};
use tower_lock::{LockKey, LockManager, Once, ReplayLayer, key, replay::OnceAnswer};

use support::{
    ApiError, Failure, Mode, Server, Table,
    database::{Dialect, check_fence, has_locks, is_mysql, last_id, open, open_url},
    send_with_key,
};

// Answers that are older than the retries of all clients can be deleted.
const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS payment (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    account_id BIGINT NOT NULL,
    cents BIGINT NOT NULL
);
CREATE TABLE IF NOT EXISTS payment_answer (
    idempotency_key VARCHAR(256) PRIMARY KEY,
    answer MEDIUMBLOB NOT NULL
)";

/// After a crash a retry waits for the lease and the lock-delay, which is one second. The lease is
/// short for the table, and the layer warns of it.
const LEASE: Duration = Duration::from_secs(2);

/// Longer than that.
const WAIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Deserialize)]
struct Payment {
    account_id: i64,
    cents: i64,
}

#[derive(Clone)]
struct App {
    db: AnyPool,
    crashes_after_commit: bool,
}

fn app(app: App, locks: &LockManager) -> Router {
    // These requests have no authentication. A real service takes the scope from it, not from the
    // body: otherwise one client can read the answers of another one.
    let account = key::from_fn(|Json(payment): Json<Payment>| ("account", payment.account_id));
    let layer = ReplayLayer::new(locks, account).required().wait(WAIT);
    let db = app.db.clone();
    // Called under the lock of the key, before a handler runs.
    let exactly_once = layer.clone().find_answer(move |key| find_answer(db.clone(), key));

    Router::new()
        .route("/payments", post(pay).route_layer(exactly_once))
        .route("/payments-with-a-record-alone", post(pay_with_a_record_alone).route_layer(layer))
        .with_state(app)
}

/// The payment and its answer are in one transaction: both exist, or none of them.
async fn pay(once: Once, State(app): State<App>, Json(payment): Json<Payment>) -> Result<Response, ApiError> {
    let mut transaction = app.db.begin().await?;
    check_fence(&mut transaction, once.held_lock()).await?;
    let receipt = insert(&mut transaction, payment).await?;
    let answer = once.answer(receipt).await.map_err(|_| TOO_LARGE)?;
    leave_answer(&mut transaction, &once, &answer).await?;
    transaction.commit().await?;
    app.crash_if_asked();
    Ok(answer.into_response())
}

/// Leaves the answer in the transaction: as a record, if the locks are in this database.
async fn leave_answer(db: &mut AnyConnection, once: &Once, answer: &OnceAnswer) -> Result<(), ApiError> {
    if has_locks(db) {
        let call = if is_mysql(db) {
            "CALL tower_lock_leave_answer(?, ?, ?, ?, ?)"
        } else {
            "SELECT tower_lock.leave_answer($1, $2, $3, $4, $5)"
        };
        sqlx::query(call)
            .bind(once.key().as_str())
            .bind(once.fencing_token().as_i64())
            .bind(once.held_lock().acquisition_id().to_string())
            .bind(answer.as_bytes())
            .bind(answer.keep_for_ms())
            .execute(db)
            .await?;
        return Ok(());
    }
    let insert = db.sql("INSERT INTO payment_answer (idempotency_key, answer) VALUES (?, ?)");
    sqlx::query(&insert).bind(once.key().as_str()).bind(answer.as_bytes()).execute(db).await?;
    Ok(())
}

/// The same handler without its answer. A retry is replayed if the layer has left its record.
async fn pay_with_a_record_alone(
    once: Once,
    State(app): State<App>,
    Json(payment): Json<Payment>,
) -> Result<Response, ApiError> {
    let mut transaction = app.db.begin().await?;
    check_fence(&mut transaction, once.held_lock()).await?;
    let receipt = insert(&mut transaction, payment).await?;
    transaction.commit().await?;
    app.crash_if_asked();
    Ok(receipt)
}

impl App {
    /// At the worst moment: the client has no response, and the layer has not left its record.
    fn crash_if_asked(&self) {
        if self.crashes_after_commit {
            process::abort();
        }
    }
}

async fn insert(db: &mut AnyConnection, payment: Payment) -> Result<Response, ApiError> {
    let insert = db.sql("INSERT INTO payment (account_id, cents) VALUES (?, ?)");
    sqlx::query(&insert).bind(payment.account_id).bind(payment.cents).execute(&mut *db).await?;
    let receipt = json!({ "payment": last_id(db).await?, "cents": payment.cents });
    Ok((StatusCode::CREATED, Json(receipt)).into_response())
}

const TOO_LARGE: ApiError = ApiError::Status(StatusCode::INTERNAL_SERVER_ERROR, "the answer is too large to be kept");

async fn find_answer(db: AnyPool, key: LockKey) -> Result<Option<Vec<u8>>, sqlx::Error> {
    let query = db.sql("SELECT answer FROM payment_answer WHERE idempotency_key = ?");
    sqlx::query_scalar(&query).bind(key.as_str().to_owned()).fetch_optional(&db).await
}

async fn serve() -> Result<(), Failure> {
    let app_state = App { db: open(SCHEMA).await?, crashes_after_commit: env::var_os("CRASH_AFTER_COMMIT").is_some() };
    let locks = support::lock_builder().await?.lease(LEASE).build();
    Server::start(app(app_state, &locks), &locks, Mode::Serve).await?.run().await
}

// === the table ===

/// The server as a process of its own, because it crashes.
struct Service {
    child: Child,
    url: String,
}

impl Service {
    async fn start(database: &str, crashes_after_commit: bool) -> Result<Self, Failure> {
        let mut command = Command::new(env::current_exe()?);
        command.arg("--serve").env("PORT", "0").env("DATABASE_URL", database);
        if crashes_after_commit {
            command.env("CRASH_AFTER_COMMIT", "1");
        }
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let output = child.stdout.take().ok_or("no output")?;
        let line = BufReader::new(output).lines().next_line().await?.unwrap_or_default();
        let url = line.strip_prefix("listening on ").ok_or("the server does not start")?.to_owned();
        Ok(Self { child, url })
    }
}

/// Pays, crashes, and retries. Adds a row to the table, and returns the number of payments.
async fn pay_and_retry(
    table: &mut Table<4>,
    name: &str,
    path: &str,
    db: &AnyPool,
    database: &str,
) -> Result<i64, Failure> {
    // A new account, because the database may be persistent.
    let account = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros())?;
    let payment = json!({ "account_id": account, "cents": 1999 });
    let attempt = async |service: &Service| {
        send_with_key(1, Method::POST, &format!("{}{path}", service.url), payment.clone(), Some("order-7")).await
    };

    let mut service = Service::start(database, true).await?;
    let first = match attempt(&service).await {
        Ok(_) => "a response",
        Err(_) => "none",
    };
    // It has crashed.
    service.child.kill().await?;

    let service = Service::start(database, false).await?;
    let retry = attempt(&service).await?.remove(0);
    let count = db.sql("SELECT COUNT(*) FROM payment WHERE account_id = ?");
    let payments: i64 = sqlx::query_scalar(&count).bind(account).fetch_one(db).await?;
    let replayed = if retry.is_replayed { " replayed" } else { "" };
    table.line([name.into(), payments.to_string(), first.into(), format!("{}{replayed}", retry.status.as_u16())]);
    Ok(payments)
}

/// Returns whether there is one payment with the answer in its transaction, and two without it.
async fn demo(database: &str) -> Result<bool, Failure> {
    println!("The process crashes after the commit of a payment. The client sends the request again.\n");
    let db = open_url(database, SCHEMA).await?;
    let mut table = Table::of(["", "payments", "first response", "response to the retry"]);
    let alone = pay_and_retry(&mut table, "a record alone", "/payments-with-a-record-alone", &db, database).await?;
    let both = pay_and_retry(&mut table, "the answer in the transaction", "/payments", &db, database).await?;
    table.print();
    db.close().await;
    Ok((alone, both) == (2, 1))
}

#[tokio::main]
async fn main() -> ExitCode {
    support::exit(run().await)
}

async fn run() -> Result<(), Failure> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let as_expected = match arguments[..] {
        [] | ["--demo"] => match env::var("DATABASE_URL") {
            Ok(database) => demo(&database).await?,
            Err(_) => {
                let folder = env::temp_dir().join(format!("idempotent_payment-{}", process::id()));
                std::fs::create_dir(&folder)?;
                let result = demo(&format!("sqlite://{}/shop.db", folder.display())).await;
                std::fs::remove_dir_all(&folder)?;
                result?
            }
        },
        ["--serve"] => return serve().await,
        _ => return Err("usage: [--demo | --serve]".into()),
    };
    if as_expected { Ok(()) } else { Err("the table is not as expected".into()) }
}
