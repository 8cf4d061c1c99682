//! A PostgreSQL server, and several instances of a service in front of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::OnceCell;
use tokio_postgres::{Client, NoTls};
use tower_lock::{
    AcquisitionId, LockKey, LockManager, PostgresStore,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, IfBusy, LockStore, QueueConfig, ReleaseReply, ReleaseRequest,
        RenewReply, RenewRequest, StoreError,
    },
};
use tower_lock_testkit::{PostgresServer, skipped, store::StoreExt};

pub(crate) const LONG: Duration = Duration::from_secs(600);

/// A server, and a schema of this test.
pub(crate) struct Environment {
    own: Option<PostgresServer>,
    pub(crate) schema: String,
}

/// The server of all tests that do not stop it.
static SERVER: OnceCell<PostgresServer> = OnceCell::const_new();

const SETTINGS: [&str; 3] =
    ["max_connections=300", "shared_preload_libraries=pg_stat_statements", "pg_stat_statements.track_utility=off"];

fn is_skipped() -> bool {
    let is_skipped = !PostgresServer::is_available();
    if is_skipped {
        skipped(std::thread::current().name().unwrap_or("a test"), "postgres");
    }
    is_skipped
}

/// Returns `None`, with a note on stderr, if there is no `postgres`.
pub(crate) async fn environment() -> Option<Environment> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    if is_skipped() {
        return None;
    }
    SERVER.get_or_init(|| PostgresServer::start(&SETTINGS)).await;
    Some(Environment { own: None, schema: format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed)) })
}

/// The same with a server of its own, with more settings.
pub(crate) async fn own_environment(settings: &[&str]) -> Option<Environment> {
    if is_skipped() {
        return None;
    }
    let settings = [&SETTINGS, settings].concat();
    Some(Environment { own: Some(PostgresServer::start(&settings).await), schema: "tower_lock".to_owned() })
}

impl Environment {
    pub(crate) fn server(&self) -> &PostgresServer {
        self.own.as_ref().unwrap_or_else(|| SERVER.get().expect("started"))
    }

    pub(crate) async fn store(&self) -> Arc<PostgresStore> {
        let store = PostgresStore::builder().schema(&self.schema).migrate(true).connect(&self.server().url()).await;
        Arc::new(store.expect("it is up"))
    }

    /// A new instance of the service.
    pub(crate) async fn instance(&self, name: &str) -> LockManager {
        LockManager::builder(self.store().await).instance(name).build()
    }

    /// A session of the application.
    pub(crate) async fn client(&self) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.server().url(), NoTls).await.expect("it is up");
        tokio::spawn(connection);
        client
    }

    /// Executes statements as the superuser, with `{schema}` for the schema of this test.
    pub(crate) async fn execute(&self, statements: &str) {
        self.client().await.batch_execute(&statements.replace("{schema}", &self.schema)).await.expect(statements);
    }

    /// The only value of a query, with `{schema}` for the schema of this test.
    pub(crate) async fn value(&self, query: &str) -> i64 {
        let rows = self.client().await.query(&query.replace("{schema}", &self.schema), &[]).await.expect(query);
        rows[0].get(0)
    }
}

/// The calls of one process, of one key each.
pub(crate) struct Caller {
    store: Arc<PostgresStore>,
    ids: AcquisitionIds,
}

impl Caller {
    pub(crate) fn new(store: &Arc<PostgresStore>, name: &str) -> Self {
        Self { store: Arc::clone(store), ids: AcquisitionIds::new(name, fastrand::u64(..)) }
    }

    pub(crate) fn id(&self) -> AcquisitionId {
        self.ids.next()
    }

    pub(crate) async fn acquire(
        &self,
        key: &LockKey,
        id: &AcquisitionId,
        lease: Duration,
        if_busy: IfBusy,
    ) -> Result<AcquireReply, StoreError> {
        let valid_for = Duration::from_secs(5);
        self.store.acquire_one(AcquireRequest::new(key.clone(), id.clone(), lease, if_busy, terms(), valid_for)).await
    }

    /// The fence of a grant.
    pub(crate) async fn granted(&self, key: &LockKey, id: &AcquisitionId, lease: Duration) -> u64 {
        match self.acquire(key, id, lease, IfBusy::Fail).await.expect("a reply") {
            AcquireReply::Granted { fence } => fence,
            other => panic!("not granted, but {other:?}"),
        }
    }

    pub(crate) async fn release(&self, key: &LockKey, id: &AcquisitionId, block_for: Duration) -> ReleaseReply {
        let request = ReleaseRequest::new(key.clone(), id.clone(), block_for, terms());
        self.store.release_one(request).await.expect("a reply")
    }

    pub(crate) async fn renew(&self, key: &LockKey, id: &AcquisitionId) -> RenewReply {
        let request = RenewRequest::new(key.clone(), id.clone(), LONG);
        self.store.renew(vec![request]).await.expect("a reply").remove(0)
    }
}

pub(crate) fn terms() -> QueueConfig {
    QueueConfig::new(Duration::from_secs(3), Duration::from_secs(10), 100)
}
