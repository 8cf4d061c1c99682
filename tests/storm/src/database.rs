//! The stores of the services, and a PostgreSQL for them, direct or behind a pooler.

use std::{error::Error, sync::Arc, time::Duration};

use tokio::{runtime::Handle, time::sleep};
use tokio_postgres::{Client, NoTls};
use tower_lock::{PostgresStore, RedisStore, store::LockStore};
use tower_lock_testkit::{PgBouncer, PostgresServer, limits, skipped, wait::until};

/// How the services reach their database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Each connection is a session of the server.
    Direct,
    /// The calls share a few sessions behind PgBouncer, and messages have a session of their own.
    Pooled,
}

/// A PostgreSQL of one storm.
#[derive(Debug)]
pub struct Database {
    server: PostgresServer,
    pooler: Option<PgBouncer>,
}

/// Connects to the PostgreSQL or the single Redis of a URL. A patient store has timeouts that no
/// busy machine reaches, for a service whose store does not fail.
///
/// # Errors
///
/// As the stores.
pub async fn connect(url: &str, is_patient: bool) -> Result<Arc<dyn LockStore>, Box<dyn Error + Send + Sync>> {
    Ok(if url.starts_with("postgres:") {
        let builder = if is_patient { limits::postgres() } else { PostgresStore::builder() };
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
        if !PostgresServer::is_available() {
            skipped(test, "postgres");
            return None;
        }
        if route == Route::Pooled && !PgBouncer::is_available() {
            skipped(test, "pgbouncer");
            return None;
        }
        let server = PostgresServer::start(&["max_connections=100"]).await;
        let pooler = if route == Route::Pooled { Some(PgBouncer::start(&server).await) } else { None };
        Some(Self { server, pooler })
    }

    /// The server.
    #[must_use]
    pub fn server(&self) -> &PostgresServer {
        &self.server
    }

    /// The URL of a store.
    #[must_use]
    pub fn url(&self) -> String {
        match &self.pooler {
            Some(pooler) => format!("{}?migrate=true&events_url={}", pooler.url(), self.server.url()),
            None => format!("{}?migrate=true", self.server.url()),
        }
    }

    /// The only value of a query, as text. `None`: it has no row, or the row no value.
    ///
    /// # Panics
    ///
    /// Panics if the query fails.
    pub async fn value(&self, query: &str) -> Option<String> {
        let rows = self.client().await.query(query, &[]).await.expect(query);
        rows.first()?.get(0)
    }

    /// A session of the superuser.
    ///
    /// # Panics
    ///
    /// Panics if the server is down.
    pub async fn client(&self) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.server.url(), NoTls).await.expect("it is up");
        Handle::current().spawn(connection);
        client
    }

    /// Ends all sessions but this one, those of the pooler included. Returns their number.
    ///
    /// # Panics
    ///
    /// Panics if the server is down.
    pub async fn kill_sessions(&self) -> u64 {
        let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
        self.client().await.execute(kill, &[]).await.expect("the superuser may")
    }

    /// Crashes the server, and starts it again.
    pub async fn crash(&self, down: Duration) {
        self.server.crash().await;
        sleep(down).await;
        self.server.restart().await;
    }

    /// Waits until no key is locked, and no waiter is left.
    ///
    /// # Panics
    ///
    /// Panics if the server is down.
    pub async fn is_left_clean(&self) {
        const LEFT: &str = "SELECT string_agg(key, ' ') FROM (
            SELECT key FROM tower_lock.locks WHERE until > clock_timestamp()
            UNION ALL SELECT key FROM tower_lock.waiters WHERE until > clock_timestamp()) AS left_over";
        let client = self.client().await;
        let left = async || client.query_one(LEFT, &[]).await.expect("it is up").get::<_, Option<String>>(0);
        until("free keys leave nothing", async || left().await.is_none()).await;
    }

    /// Waits until no session is left of services that have ended. A pooler keeps its sessions.
    pub async fn has_no_sessions(&self) {
        if self.pooler.is_none() {
            const OPEN: &str = "SELECT count(*)::text FROM pg_stat_activity WHERE application_name = 'tower-lock'";
            until("no connection is left", async || self.value(OPEN).await.as_deref() == Some("0")).await;
        }
    }
}
