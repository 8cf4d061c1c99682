//! The stores of the services, and a database for them: a PostgreSQL, direct or behind a pooler, or
//! a MariaDB.

use std::{error::Error, path::Path, sync::Arc, time::Duration};

use mysql_async::{Conn, prelude::Queryable as _};
use tokio::{runtime::Handle, time::sleep};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};
use tower_lock::{HeldLock, MysqlStore, PostgresStore, RedisStore, store::LockStore};
use tower_lock_testkit::{MariaDb, PgBouncer, PostgresServer, limits, skipped, wait::until};

type Failure = Box<dyn Error + Send + Sync>;

/// The database of the services, and how they reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Each connection is a session of a PostgreSQL.
    Direct,
    /// The calls share a few sessions of a PostgreSQL behind PgBouncer, and messages have a session
    /// of their own.
    Pooled,
    /// Each connection is a session of a MariaDB.
    Mysql,
}

/// A database of one storm.
#[derive(Debug)]
pub struct Database(Server);

#[derive(Debug)]
enum Server {
    Postgres(PostgresServer, Option<PgBouncer>),
    Mysql(MariaDb),
}

/// A session of the superuser.
pub(crate) enum Session {
    Postgres(Client),
    Mysql(Conn),
}

/// Connects to the PostgreSQL, the MariaDB or the single Redis of a URL. A patient store has
/// timeouts that no busy machine reaches, for a service whose store does not fail.
///
/// # Errors
///
/// As the stores.
pub async fn connect(url: &str, is_patient: bool) -> Result<Arc<dyn LockStore>, Failure> {
    Ok(if url.starts_with("postgres:") {
        let builder = if is_patient { limits::postgres() } else { PostgresStore::builder() };
        Arc::new(builder.connect(url).await?)
    } else if url.starts_with("mysql:") {
        let builder = if is_patient { limits::mysql() } else { MysqlStore::builder() };
        Arc::new(builder.connect(url).await?)
    } else {
        let builder = if is_patient { limits::redis() } else { RedisStore::builder() };
        Arc::new(builder.connect(url).await?)
    })
}

// === impl Database ===

impl Database {
    /// Starts a server, and the pooler of the route. Returns `None`, with a note on stderr, if one
    /// of them is not installed.
    pub async fn start(test: &str, route: Route) -> Option<Self> {
        let (name, is_available) = match route {
            Route::Direct | Route::Pooled => ("postgres", PostgresServer::is_available()),
            Route::Mysql => ("mariadbd", MariaDb::is_available()),
        };
        if !is_available {
            skipped(test, name);
            return None;
        }
        if route == Route::Pooled && !PgBouncer::is_available() {
            skipped(test, "pgbouncer");
            return None;
        }
        Some(Self(if route == Route::Mysql {
            // A commit is in the files of the server when its reply arrives.
            Server::Mysql(MariaDb::installed(&["app"], &["--innodb-flush-log-at-trx-commit=1"]).await)
        } else {
            let server = PostgresServer::start(&["max_connections=100"]).await;
            let pooler = if route == Route::Pooled { Some(PgBouncer::start(&server).await) } else { None };
            Server::Postgres(server, pooler)
        }))
    }

    /// The folder of the server.
    #[must_use]
    pub fn folder(&self) -> &Path {
        match &self.0 {
            Server::Postgres(server, _) => server.folder(),
            Server::Mysql(server) => server.folder(),
        }
    }

    /// The URL of a store.
    #[must_use]
    pub fn url(&self) -> String {
        match &self.0 {
            Server::Postgres(server, Some(pooler)) => {
                format!("{}?migrate=true&events_url={}", pooler.url(), server.url())
            }
            _ => format!("{}?migrate=true", self.server_url()),
        }
    }

    fn server_url(&self) -> String {
        match &self.0 {
            Server::Postgres(server, _) => server.url(),
            Server::Mysql(server) => server.url("app"),
        }
    }

    /// The only value of a query, as text. `None`: it has no row, or the row no value.
    ///
    /// # Panics
    ///
    /// Panics if the server is down, or the query fails.
    pub async fn value(&self, query: &str) -> Option<String> {
        self.values(query).await.into_iter().next()?
    }

    /// The first values of the rows of a statement.
    async fn values(&self, statement: &str) -> Vec<Option<String>> {
        let mut session = Session::open(&self.server_url()).await.expect("it is up");
        session.values(statement).await.expect(statement)
    }

    /// The query of this kind of database.
    fn query<'a>(&self, postgres: &'a str, mysql: &'a str) -> &'a str {
        if matches!(self.0, Server::Postgres(..)) { postgres } else { mysql }
    }

    /// Ends all sessions but this one, those of the pooler included. Returns their number.
    ///
    /// # Panics
    ///
    /// Panics if the server is down.
    pub async fn kill_sessions(&self) -> u64 {
        const POSTGRES: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                                WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
        const MYSQL: &str = "SELECT CONCAT('KILL ', id) FROM information_schema.processlist \
                             WHERE user = 'root' AND id <> CONNECTION_ID()";
        let killed = self.values(self.query(POSTGRES, MYSQL)).await;
        if let Server::Mysql(_) = &self.0 {
            let mut session = Session::open(&self.server_url()).await.expect("it is up");
            for kill in killed.iter().flatten() {
                // A session may have ended by itself.
                let _ = session.values(kill).await;
            }
        }
        killed.len() as u64
    }

    /// Crashes the server, and starts it again.
    pub async fn crash(&self, down: Duration) {
        match &self.0 {
            Server::Postgres(server, _) => server.crash().await,
            Server::Mysql(server) => server.crash().await,
        }
        sleep(down).await;
        match &self.0 {
            Server::Postgres(server, _) => server.restart().await,
            Server::Mysql(server) => server.restart().await,
        }
    }

    /// Waits until no key is locked, and no waiter is left.
    ///
    /// # Panics
    ///
    /// Panics if the server is down.
    pub async fn is_left_clean(&self) {
        const POSTGRES: &str = "SELECT string_agg(key, ' ') FROM (
            SELECT key FROM tower_lock.locks WHERE until > clock_timestamp()
            UNION ALL SELECT key FROM tower_lock.waiters WHERE until > clock_timestamp()) AS left_over";
        const MYSQL: &str = "SELECT GROUP_CONCAT(lock_key SEPARATOR ' ') FROM (
            SELECT lock_key, until_us FROM tower_lock_locks
            UNION ALL SELECT lock_key, until_us FROM tower_lock_shares) AS left_over
            WHERE until_us > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
        let left = self.query(POSTGRES, MYSQL);
        until("free keys leave nothing", async || self.value(left).await.is_none()).await;
    }

    /// Waits until no session is left of services that have ended. A pooler keeps its sessions.
    pub async fn has_no_sessions(&self) {
        const POSTGRES: &str = "SELECT pid FROM pg_stat_activity WHERE application_name = 'tower-lock'";
        const MYSQL: &str =
            "SELECT id FROM information_schema.processlist WHERE user = 'root' AND id <> CONNECTION_ID()";
        if !matches!(self.0, Server::Postgres(_, Some(_))) {
            let open = self.query(POSTGRES, MYSQL);
            until("no connection is left", async || self.values(open).await.is_empty()).await;
        }
    }
}

// === impl Session ===

impl Session {
    /// Opens a session of the database of a store. The parameters of the store are not of it.
    pub(crate) async fn open(url: &str) -> Result<Self, Failure> {
        let url = url.split('?').next().unwrap_or(url);
        if url.starts_with("mysql:") {
            return Ok(Self::Mysql(Conn::from_url(url).await?));
        }
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        Handle::current().spawn(connection);
        Ok(Self::Postgres(client))
    }

    /// The first values of the rows of a statement, as text.
    pub(crate) async fn values(&mut self, statement: &str) -> Result<Vec<Option<String>>, Failure> {
        Ok(match self {
            Self::Postgres(client) => {
                let messages = client.simple_query(statement).await?;
                let value = |message| match message {
                    SimpleQueryMessage::Row(row) => Some(row.get(0).map(str::to_owned)),
                    _ => None,
                };
                messages.into_iter().filter_map(value).collect()
            }
            Self::Mysql(session) => session.query(statement).await?,
        })
    }

    /// The statement that checks the fence of a lock, in the transaction of this session.
    pub(crate) fn check_fence(&self, lock: &HeldLock) -> String {
        let call = if matches!(self, Self::Mysql(_)) { "CALL tower_lock_" } else { "SELECT tower_lock." };
        let (key, token, id) = (lock.key(), lock.fencing_token(), lock.acquisition_id());
        format!("{call}check_fence('{key}', {token}, '{id}')")
    }
}
