//! The locks on PostgreSQL and on MySQL that are compared, behind one interface.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use mysql_async::{Conn, Opts, OptsBuilder, Params, Row, prelude::Queryable};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_postgres::{Client, NoTls, types::ToSql};
use tower_lock::{LockGuard, LockManager};

use crate::questions::redis_cycles::KEYS_PER_TASK;

/// A lock on a database, or ours on another server beside it, with connections of its own.
pub enum DatabaseLock {
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
pub enum DatabaseGuard {
    Ours(LockGuard),
    /// The transaction or the lock belongs to the session.
    Pinned {
        session: Pooled,
        key: String,
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

/// A connection, and the statements that it has prepared: of an acquire and of a release.
enum Session {
    Postgres(Client, [tokio_postgres::Statement; 2]),
    Mysql(Conn, [mysql_async::Statement; 2]),
}

const ACQUIRE: usize = 0;
const RELEASE: usize = 1;

// === impl DatabaseLock ===

impl DatabaseLock {
    pub const OURS: &str = "tower-lock";
    pub const OURS_ON_REDIS: &str = "tower-lock on Redis";
    pub const OURS_ON_POSTGRES: &str = "tower-lock on PostgreSQL";
    pub const FOR_UPDATE: &str = "SELECT FOR UPDATE";
    pub const ADVISORY: &str = "pg_advisory_lock";
    pub const GET_LOCK: &str = "GET_LOCK";
    pub const VERSION: &str = "version column";
    pub const UNIQUE_ROW: &str = "unique row";

    /// The statements that make the tables of the locks by hand, and the rows of some tasks.
    /// Further options of the table of the rows may follow the first one.
    pub fn tables(tasks: u64) -> [String; 3] {
        const ROWS: &str = "WITH RECURSIVE n (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < 999)";
        [
            "CREATE TABLE orders (id varchar(40) PRIMARY KEY, version bigint NOT NULL)".to_owned(),
            "CREATE TABLE held_keys (id varchar(40) PRIMARY KEY, holder bigint NOT NULL)".to_owned(),
            format!(
                "INSERT INTO orders {ROWS} SELECT concat('order:', t.n * {KEYS_PER_TASK} + k.n), 0 \
                 FROM n t CROSS JOIN n k WHERE t.n < {tasks} AND k.n < {KEYS_PER_TASK}"
            ),
        ]
    }

    /// Those by hand have this number of connections.
    ///
    /// # Panics
    ///
    /// Panics if the name is none of the constants or the server does not respond.
    pub async fn connect(name: &str, url: &str, connections: usize) -> Self {
        let kind = match name {
            Self::OURS | Self::OURS_ON_REDIS | Self::OURS_ON_POSTGRES => {
                return Self::Ours(LockManager::connect(url).await.expect("a server").build());
            }
            Self::FOR_UPDATE => Kind::ForUpdate,
            Self::ADVISORY | Self::GET_LOCK => Kind::Advisory,
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
    pub async fn lock(&self, key: u64) -> DatabaseGuard {
        let (kind, pool) = match self {
            Self::Ours(locks) => {
                let guard = locks.lock(("order", key)).wait(Duration::from_secs(60)).await.expect("a grant");
                return DatabaseGuard::Ours(guard);
            }
            Self::ByHand { kind, pool } => (*kind, pool),
        };
        let (mut session, key) = (pool.get().await, format!("order:{key}"));
        match kind {
            Kind::ForUpdate => {
                session.get().run("BEGIN").await;
                assert_eq!(session.get().execute(ACQUIRE, &key, None).await, 1, "the row is there");
                DatabaseGuard::Pinned { session, key }
            }
            Kind::Advisory => {
                session.get().execute(ACQUIRE, &key, None).await;
                DatabaseGuard::Pinned { session, key }
            }
            Kind::Version => {
                let version = session.get().version(&key).await;
                DatabaseGuard::Version { key, version }
            }
            Kind::UniqueRow => {
                let holder = fastrand::i64(..);
                assert_eq!(session.get().execute(ACQUIRE, &key, Some(holder)).await, 1, "the key is free");
                DatabaseGuard::UniqueRow { key, holder }
            }
        }
    }

    /// Returns after the reply of the server.
    ///
    /// # Panics
    ///
    /// Panics if the lock was lost, or is another one.
    pub async fn unlock(&self, guard: DatabaseGuard) {
        match (self, guard) {
            (Self::Ours(_), DatabaseGuard::Ours(guard)) => {
                guard.release().await.expect("a reply");
            }
            (Self::ByHand { kind, .. }, DatabaseGuard::Pinned { mut session, key }) => {
                session.get().execute(RELEASE, &key, None).await;
                if let Kind::ForUpdate = kind {
                    session.get().run("COMMIT").await;
                }
            }
            (Self::ByHand { pool, .. }, DatabaseGuard::Version { key, mut version }) => {
                let mut session = pool.get().await;
                while session.get().execute(RELEASE, &key, Some(version)).await == 0 {
                    version = session.get().version(&key).await;
                }
            }
            (Self::ByHand { pool, .. }, DatabaseGuard::UniqueRow { key, holder }) => {
                let deleted = pool.get().await.get().execute(RELEASE, &key, Some(holder)).await;
                assert_eq!(deleted, 1, "the key was not lost");
            }
            _ => panic!("the guard of another lock"),
        }
    }
}

// === impl DatabaseGuard ===

impl DatabaseGuard {
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
                "SELECT version FROM orders WHERE id = $1 FOR UPDATE",
                "UPDATE orders SET version = version + 1 WHERE id = $1",
            ],
            Self::Advisory => [
                "SELECT pg_advisory_lock(hashtextextended($1, 0))",
                "SELECT pg_advisory_unlock(hashtextextended($1, 0))",
            ],
            Self::Version => [
                "SELECT version FROM orders WHERE id = $1",
                "UPDATE orders SET version = version + 1 WHERE id = $1 AND version = $2",
            ],
            Self::UniqueRow => [
                "INSERT INTO held_keys (id, holder) VALUES ($1, $2) ON CONFLICT DO NOTHING",
                "DELETE FROM held_keys WHERE id = $1 AND holder = $2",
            ],
        }
    }

    fn mysql_statements(self) -> [String; 2] {
        match self {
            Self::Advisory => ["SELECT GET_LOCK($1, 60)", "SELECT RELEASE_LOCK($1)"],
            Self::UniqueRow => {
                ["INSERT IGNORE INTO held_keys (id, holder) VALUES ($1, $2)", self.statements()[RELEASE]]
            }
            _ => self.statements(),
        }
        .map(|statement| statement.replace("$1", "?").replace("$2", "?"))
    }
}

// === impl Session ===

impl Session {
    async fn open(url: &str, kind: Kind) -> Self {
        if url.starts_with("mysql://") {
            let mut connection = mysql(url).await;
            let [acquire, release] = kind.mysql_statements();
            let acquire = connection.prep(acquire).await.expect("a statement");
            let release = connection.prep(release).await.expect("a statement");
            return Self::Mysql(connection, [acquire, release]);
        }
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("a connection");
        tokio::spawn(connection);
        let [acquire, release] = kind.statements();
        let acquire = client.prepare(acquire).await.expect("a statement");
        let release = client.prepare(release).await.expect("a statement");
        Self::Postgres(client, [acquire, release])
    }

    async fn run(&mut self, statement: &str) {
        match self {
            Self::Postgres(client, _) => client.batch_execute(statement).await.expect("a reply"),
            Self::Mysql(connection, _) => connection.query_drop(statement).await.expect("a reply"),
        }
    }

    /// Returns the number of rows that are found or changed.
    async fn execute(&mut self, statement: usize, key: &str, number: Option<i64>) -> u64 {
        match self {
            Self::Postgres(client, statements) => {
                let mut values: Vec<&(dyn ToSql + Sync)> = vec![&key];
                values.extend(number.as_ref().map(|number| number as &(dyn ToSql + Sync)));
                client.execute(&statements[statement], &values).await.expect("a reply")
            }
            Self::Mysql(connection, statements) => {
                let values = [Some(key.into()), number.map(Into::into)].into_iter().flatten().collect();
                let values = Params::Positional(values);
                let rows: Vec<Row> = connection.exec(&statements[statement], values).await.expect("a reply");
                if rows.is_empty() { connection.affected_rows() } else { rows.len() as u64 }
            }
        }
    }

    async fn version(&mut self, key: &str) -> i64 {
        match self {
            Self::Postgres(client, [acquire, _]) => client.query_one(acquire, &[&key]).await.expect("a row").get(0),
            Self::Mysql(connection, [acquire, _]) => {
                connection.exec_first(&*acquire, (key,)).await.expect("a reply").expect("a row")
            }
        }
    }
}

/// A session of MySQL over TCP, as that of a client on another machine.
pub async fn mysql(url: &str) -> Conn {
    let options = Opts::from_url(url).expect("a URL");
    Conn::new(OptsBuilder::from_opts(options).prefer_socket(false)).await.expect("a connection")
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
    fn get(&mut self) -> &mut Session {
        self.session.as_mut().expect("until it is dropped")
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        // Before the permit.
        self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner).extend(self.session.take());
    }
}
