//! The database, SQLite or MySQL and MariaDB, and the fence that rejects writes of late holders.

use std::env;

use axum::http::StatusCode;
use sqlx::{
    AnyConnection, AnyPool, ConnectOptions, Connection, Executor,
    any::{AnyConnectOptions, AnyPoolOptions, install_default_drivers},
};
use tower_lock::HeldLock;

use super::{ApiError, Failure};

/// SQL that differs between SQLite and MySQL.
const IN_MYSQL: [(&str, &str); 2] =
    [("INTEGER PRIMARY KEY AUTOINCREMENT", "BIGINT PRIMARY KEY AUTO_INCREMENT"), ("INSERT OR IGNORE", "INSERT IGNORE")];

/// Opens `DATABASE_URL`, or SQLite in memory, and creates tables. The schema is in the dialect of
/// SQLite.
pub async fn open(schema: &str) -> Result<AnyPool, Failure> {
    open_url(&env::var("DATABASE_URL").unwrap_or_else(|_| "sqlite::memory:".into()), schema).await
}

pub async fn open_url(url: &str, schema: &str) -> Result<AnyPool, Failure> {
    // The rest of the URL may contain a password.
    let scheme = url.split(':').next().unwrap_or_default();
    let db = match scheme {
        "sqlite" => open_sqlite(url).await,
        "mysql" | "mariadb" if cfg!(feature = "mysql") => open_mysql(url).await,
        "mysql" | "mariadb" => return Err(format!("DATABASE_URL={scheme}:..: add `--features mysql`").into()),
        _ => {
            let supported = "this example supports SQLite, such as sqlite://shop.db, and MySQL or MariaDB, such as \
                          mysql://user:password@localhost/shop";
            return Err(format!("DATABASE_URL={scheme}:..: {supported}").into());
        }
    }
    .map_err(|error| format!("DATABASE_URL={scheme}:..: {error}"))?;
    // Keys are compared byte for byte, but MySQL compares texts case-insensitively.
    let (lock_key, schema) = match scheme {
        "sqlite" => ("VARCHAR(256)", schema.into()),
        _ => {
            ("VARBINARY(256)", IN_MYSQL.iter().fold(schema.to_owned(), |sql, (ours, theirs)| sql.replace(ours, theirs)))
        }
    };
    let lock_fence =
        format!("CREATE TABLE IF NOT EXISTS lock_fence (lock_key {lock_key} PRIMARY KEY, token BIGINT NOT NULL)");
    sqlx::raw_sql(&lock_fence).execute(&db).await?;
    sqlx::raw_sql(&schema).execute(&db).await?;
    Ok(db)
}

async fn open_sqlite(url: &str) -> Result<AnyPool, sqlx::Error> {
    install_default_drivers();
    if url.contains(":memory:") {
        // The database exists as long as its only connection.
        let one = AnyPoolOptions::new().max_connections(1).min_connections(1).idle_timeout(None).max_lifetime(None);
        return one.connect(url).await;
    }
    let created = if url.contains('?') { url.to_owned() } else { format!("{url}?mode=rwc") };
    // Writers wait for each other, across processes.
    let pragmas = "PRAGMA busy_timeout = 10000; PRAGMA journal_mode = WAL";
    AnyPoolOptions::new()
        .max_connections(4)
        .after_connect(move |connection, _| Box::pin(async move { connection.execute(pragmas).await.map(drop) }))
        .connect(&created)
        .await
}

async fn open_mysql(url: &str) -> Result<AnyPool, sqlx::Error> {
    install_default_drivers();
    let options: AnyConnectOptions = url.parse()?;
    // A pool hides a refused connection: it retries, then reports that it has no connections.
    options.connect().await?.close().await?;
    AnyPoolOptions::new().max_connections(8).connect_with(options).await
}

fn is_mysql(connection: &AnyConnection) -> bool {
    connection.backend_name() == "MySQL"
}

/// Fails if a holder with a later token has written. It must be the first statement of a
/// transaction under the lock. It also locks the row, so that two writers run one after the other.
pub async fn check_fence(transaction: &mut AnyConnection, lock: &HeldLock) -> Result<(), ApiError> {
    let (key, token) = (lock.key().as_str(), lock.fencing_token().as_i64());
    let passed = if is_mysql(transaction) {
        // The number of changed rows does not distinguish an equal token from a smaller one; the
        // stored token does.
        sqlx::query(
            "INSERT INTO lock_fence (lock_key, token) VALUES (?, ?)
             ON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token))",
        )
        .bind(key)
        .bind(token)
        .execute(&mut *transaction)
        .await?;
        let (stored,): (i64,) = sqlx::query_as("SELECT token FROM lock_fence WHERE lock_key = ? FOR UPDATE")
            .bind(key)
            .fetch_one(transaction)
            .await?;
        stored == token
    } else {
        sqlx::query(
            "INSERT INTO lock_fence (lock_key, token) VALUES (?, ?)
             ON CONFLICT (lock_key) DO UPDATE SET token = excluded.token WHERE lock_fence.token <= excluded.token",
        )
        .bind(key)
        .bind(token)
        .execute(transaction)
        .await?
        .rows_affected()
            > 0
    };
    if passed {
        Ok(())
    } else {
        Err(ApiError::Status(StatusCode::SERVICE_UNAVAILABLE, "a holder with a later token has written"))
    }
}

/// Returns the id of the last `INSERT` on this connection.
pub async fn last_id(connection: &mut AnyConnection) -> Result<i64, ApiError> {
    let query =
        if is_mysql(connection) { "SELECT CAST(last_insert_id() AS SIGNED)" } else { "SELECT last_insert_rowid()" };
    let (id,) = sqlx::query_as(query).fetch_one(connection).await?;
    Ok(id)
}
