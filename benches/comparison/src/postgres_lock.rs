//! The locks on PostgreSQL that are compared, behind one interface.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_postgres::{Client, NoTls, Statement};
use tower_lock::{LockGuard, LockManager};

/// A lock on PostgreSQL, or ours on Redis beside it, with connections of its own.
pub enum PostgresLock {
    Ours(LockManager),
    ByHand { kind: Kind, pool: Arc<Pool> },
}

/// A lock as users write it by hand.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// The row is locked in a transaction, which also changes it: the section writes something.
    ForUpdate,
    /// A lock of a session.
    Advisory,
    /// Excludes nothing: of two sections with the same version one is repeated.
    Version,
    /// A row is there while the lock is held.
    UniqueRow,
}

/// A lock that is held.
pub enum PostgresGuard {
    Ours(LockGuard),
    /// The transaction or the lock belongs to the session.
    Pinned {
        session: Pooled,
        key: u64,
    },
    Version {
        key: String,
        version: i64,
    },
    UniqueRow {
        key: String,
        holder: i64,
    },
}

/// A fixed number of sessions.
pub struct Pool {
    idle: Mutex<Vec<Session>>,
    permits: Arc<Semaphore>,
}

/// A session of a pool, which returns to it.
pub struct Pooled {
    session: Option<Session>,
    pool: Arc<Pool>,
    _permit: OwnedSemaphorePermit,
}

/// A connection, and the statements that it has prepared.
struct Session {
    client: Client,
    acquire: Statement,
    release: Statement,
}

// === impl PostgresLock ===

impl PostgresLock {
    pub const OURS: &str = "tower-lock";
    pub const OURS_ON_REDIS: &str = "tower-lock on Redis";
    pub const FOR_UPDATE: &str = "SELECT FOR UPDATE";
    pub const ADVISORY: &str = "pg_advisory_lock";
    pub const VERSION: &str = "version column";
    pub const UNIQUE_ROW: &str = "unique row";

    /// The tables of the locks by hand.
    pub const TABLES: &str = "\
        CREATE TABLE orders (key text PRIMARY KEY, version bigint NOT NULL) WITH (fillfactor = 70);
        CREATE TABLE held_keys (key text PRIMARY KEY, holder bigint NOT NULL)";

    /// Those by hand have this number of connections.
    ///
    /// # Panics
    ///
    /// Panics if the name is none of the constants or the server does not respond.
    pub async fn connect(name: &str, url: &str, connections: usize) -> Self {
        let kind = match name {
            Self::OURS | Self::OURS_ON_REDIS => {
                return Self::Ours(LockManager::connect(url).await.expect("a server").build());
            }
            Self::FOR_UPDATE => Kind::ForUpdate,
            Self::ADVISORY => Kind::Advisory,
            Self::VERSION => Kind::Version,
            Self::UNIQUE_ROW => Kind::UniqueRow,
            name => panic!("no lock is named {name}"),
        };
        let mut idle = Vec::new();
        for _ in 0..connections {
            idle.push(Session::open(url, kind).await);
        }
        let pool = Pool { idle: Mutex::new(idle), permits: Arc::new(Semaphore::new(connections)) };
        Self::ByHand { kind, pool: Arc::new(pool) }
    }

    /// Waits for the key.
    ///
    /// # Panics
    ///
    /// Panics if a row is missing, or if the key of a unique row is held.
    pub async fn lock(&self, key: u64) -> PostgresGuard {
        let (kind, pool) = match self {
            Self::Ours(locks) => {
                let guard = locks.lock(("order", key)).wait(Duration::from_secs(60)).await.expect("a grant");
                return PostgresGuard::Ours(guard);
            }
            Self::ByHand { kind, pool } => (*kind, pool),
        };
        let session = pool.get().await;
        match kind {
            Kind::ForUpdate => {
                session.client().batch_execute("BEGIN").await.expect("a reply");
                let rows = session.client().query(session.acquire(), &[&text(key)]).await.expect("a reply");
                assert_eq!(rows.len(), 1, "the row is there");
                PostgresGuard::Pinned { session, key }
            }
            Kind::Advisory => {
                session.client().query(session.acquire(), &[&(key as i64)]).await.expect("a reply");
                PostgresGuard::Pinned { session, key }
            }
            Kind::Version => {
                let key = text(key);
                let version = session.version(&key).await;
                PostgresGuard::Version { key, version }
            }
            Kind::UniqueRow => {
                let (key, holder) = (text(key), fastrand::i64(..));
                let inserted = session.client().execute(session.acquire(), &[&key, &holder]).await.expect("a reply");
                assert_eq!(inserted, 1, "the key is free");
                PostgresGuard::UniqueRow { key, holder }
            }
        }
    }

    /// Returns after the reply of the server.
    ///
    /// # Panics
    ///
    /// Panics if the lock was lost, or is another one.
    pub async fn unlock(&self, guard: PostgresGuard) {
        match (self, guard) {
            (Self::Ours(_), PostgresGuard::Ours(guard)) => {
                guard.release().await.expect("a reply");
            }
            (Self::ByHand { kind: Kind::ForUpdate, .. }, PostgresGuard::Pinned { session, key }) => {
                session.client().execute(session.release(), &[&text(key)]).await.expect("a reply");
                session.client().batch_execute("COMMIT").await.expect("a reply");
            }
            (Self::ByHand { .. }, PostgresGuard::Pinned { session, key }) => {
                session.client().query(session.release(), &[&(key as i64)]).await.expect("a reply");
            }
            (Self::ByHand { pool, .. }, PostgresGuard::Version { key, mut version }) => {
                let session = pool.get().await;
                while session.client().execute(session.release(), &[&key, &version]).await.expect("a reply") == 0 {
                    version = session.version(&key).await;
                }
            }
            (Self::ByHand { pool, .. }, PostgresGuard::UniqueRow { key, holder }) => {
                let session = pool.get().await;
                let deleted = session.client().execute(session.release(), &[&key, &holder]).await.expect("a reply");
                assert_eq!(deleted, 1, "the key was not lost");
            }
            _ => panic!("the guard of another lock"),
        }
    }
}

fn text(key: u64) -> String {
    format!("order:{key}")
}

// === impl PostgresGuard ===

impl PostgresGuard {
    /// The fencing token, which the locks by hand do not have.
    pub fn token(&self) -> Option<u64> {
        match self {
            Self::Ours(guard) => Some(guard.fencing_token().as_u64()),
            _ => None,
        }
    }
}

// === impl Kind ===

impl Kind {
    const fn statements(self) -> [&'static str; 2] {
        match self {
            Self::ForUpdate => [
                "SELECT version FROM orders WHERE key = $1 FOR UPDATE",
                "UPDATE orders SET version = version + 1 WHERE key = $1",
            ],
            Self::Advisory => ["SELECT pg_advisory_lock($1)", "SELECT pg_advisory_unlock($1)"],
            Self::Version => [
                "SELECT version FROM orders WHERE key = $1",
                "UPDATE orders SET version = version + 1 WHERE key = $1 AND version = $2",
            ],
            Self::UniqueRow => [
                "INSERT INTO held_keys (key, holder) VALUES ($1, $2) ON CONFLICT DO NOTHING",
                "DELETE FROM held_keys WHERE key = $1 AND holder = $2",
            ],
        }
    }
}

// === impl Session ===

impl Session {
    async fn open(url: &str, kind: Kind) -> Self {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("a connection");
        tokio::spawn(connection);
        let [acquire, release] = kind.statements();
        let acquire = client.prepare(acquire).await.expect("a statement");
        let release = client.prepare(release).await.expect("a statement");
        Self { client, acquire, release }
    }
}

// === impl Pool ===

impl Pool {
    async fn get(self: &Arc<Self>) -> Pooled {
        let permit = Arc::clone(&self.permits).acquire_owned().await.expect("never closed");
        let session = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Pooled { session, pool: Arc::clone(self), _permit: permit }
    }
}

// === impl Pooled ===

impl Pooled {
    fn session(&self) -> &Session {
        self.session.as_ref().expect("until it is dropped")
    }

    fn client(&self) -> &Client {
        &self.session().client
    }

    fn acquire(&self) -> &Statement {
        &self.session().acquire
    }

    fn release(&self) -> &Statement {
        &self.session().release
    }

    async fn version(&self, key: &String) -> i64 {
        self.client().query_one(self.acquire(), &[key]).await.expect("a row").get(0)
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        // Before the permit.
        self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner).extend(self.session.take());
    }
}
