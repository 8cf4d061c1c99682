//! One database, SQLite or MySQL and MariaDB, and the fence that keeps it from a holder who is late.

use std::env;

use axum::http::StatusCode;
use sqlx::{
    AnyConnection, AnyPool, ConnectOptions, Connection, Executor,
    any::{AnyConnectOptions, AnyPoolOptions, install_default_drivers},
};
use tower_lock::HeldLock;

use super::{ApiError, Failure};

/// What MySQL says in other words.
const IN_MYSQL: [(&str, &str); 2] =
    [("INTEGER PRIMARY KEY AUTOINCREMENT", "BIGINT PRIMARY KEY AUTO_INCREMENT"), ("INSERT OR IGNORE", "INSERT IGNORE")];

/// `DATABASE_URL`, or SQLite in memory; with these tables, which are written in the words of SQLite.
pub async fn open(schema: &str) -> Result<AnyPool, Failure> {
    open_url(&env::var("DATABASE_URL").unwrap_or_else(|_| "sqlite::memory:".into()), schema).await
}

pub async fn open_url(url: &str, schema: &str) -> Result<AnyPool, Failure> {
    // What is behind the scheme may be a password.
    let scheme = url.split(':').next().unwrap_or_default();
    let db = match scheme {
        "sqlite" => open_sqlite(url).await,
        "mysql" | "mariadb" => open_mysql(url).await,
        _ => {
            let speaks = "this example speaks SQLite, such as sqlite://shop.db, and MySQL or MariaDB, such as \
                          mysql://user:password@localhost/shop";
            return Err(format!("DATABASE_URL={scheme}:..: {speaks}").into());
        }
    }
    .map_err(|error| format!("DATABASE_URL={scheme}:..: {error}"))?;
    // Keys are compared byte for byte: MySQL takes `a` and `A` for the same text.
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
        // The database lives as long as its one connection.
        let one = AnyPoolOptions::new().max_connections(1).min_connections(1).idle_timeout(None).max_lifetime(None);
        return one.connect(url).await;
    }
    let created = if url.contains('?') { url.to_owned() } else { format!("{url}?mode=rwc") };
    // Writers, of other processes as well, wait for each other.
    let in_line = "PRAGMA busy_timeout = 10000; PRAGMA journal_mode = WAL";
    AnyPoolOptions::new()
        .max_connections(4)
        .after_connect(move |connection, _| Box::pin(async move { connection.execute(in_line).await.map(drop) }))
        .connect(&created)
        .await
}

async fn open_mysql(url: &str) -> Result<AnyPool, sqlx::Error> {
    install_default_drivers();
    let options: AnyConnectOptions = url.parse()?;
    // A pool asks again and again where nobody listens, and then says that it is out of connections.
    options.connect().await?.close().await?;
    AnyPoolOptions::new().max_connections(8).connect_with(options).await
}

fn is_mysql(connection: &AnyConnection) -> bool {
    connection.backend_name() == "MySQL"
}

/// Lets the transaction go on only if nobody with a later token has written: the first statement of whatever is written under
/// the lock. It also takes the row, so that two writers come one after the other.
pub async fn check_fence(transaction: &mut AnyConnection, lock: &HeldLock) -> Result<(), ApiError> {
    let (key, token) = (lock.key().as_str(), lock.fencing_token().as_i64());
    let passed = if is_mysql(transaction) {
        // How many rows it changed does not tell a token that stands there from a smaller one: what stands there now does.
        sqlx::query(
            "INSERT INTO lock_fence (lock_key, token) VALUES (?, ?)
             ON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token))",
        )
        .bind(key)
        .bind(token)
        .execute(&mut *transaction)
        .await?;
        let (stands,): (i64,) = sqlx::query_as("SELECT token FROM lock_fence WHERE lock_key = ? FOR UPDATE")
            .bind(key)
            .fetch_one(transaction)
            .await?;
        stands == token
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
        Err(ApiError::Status(StatusCode::SERVICE_UNAVAILABLE, "somebody with a later token has written"))
    }
}

/// The number that the last `INSERT` on this connection was given.
#[allow(dead_code, reason = "a module of three programs, and one of them asks")]
pub async fn last_id(connection: &mut AnyConnection) -> Result<i64, ApiError> {
    let ask =
        if is_mysql(connection) { "SELECT CAST(last_insert_id() AS SIGNED)" } else { "SELECT last_insert_rowid()" };
    let (id,) = sqlx::query_as(ask).fetch_one(connection).await?;
    Ok(id)
}
