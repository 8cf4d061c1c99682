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
        AcquireReply, AcquireRequest, AcquisitionIds, Demand, IfBusy, LockStore, PostgresStoreBuilder, QueueConfig,
        Record, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreError, YieldReply, YieldRequest,
    },
};
use tower_lock_testkit::{PgBouncer, PostgresServer, skipped, store::StoreExt};

pub(crate) const LONG: Duration = Duration::from_secs(600);

/// A busy machine is no outage.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// The same, where no outage is awaited.
const LONG_PATIENCE: Duration = Duration::from_secs(5);

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

/// A schema of this test, and a pooler in front of its server.
pub(crate) async fn pooled() -> Option<(Environment, PgBouncer)> {
    if !PgBouncer::is_available() {
        skipped(std::thread::current().name().unwrap_or("a test"), "pgbouncer");
        return None;
    }
    let environment = environment().await?;
    let pooler = PgBouncer::start(environment.server()).await;
    Some((environment, pooler))
}

impl Environment {
    pub(crate) fn server(&self) -> &PostgresServer {
        self.own.as_ref().unwrap_or_else(|| SERVER.get().expect("started"))
    }

    pub(crate) async fn store(&self) -> Arc<PostgresStore> {
        Arc::new(self.builder().migrate(true).connect(&self.server().url()).await.expect("it is up"))
    }

    /// A store in the schema of this test. Its calls may take long, where no outage is awaited.
    pub(crate) fn builder(&self) -> PostgresStoreBuilder {
        let patience = if self.own.is_some() { PATIENCE } else { LONG_PATIENCE };
        PostgresStore::builder().schema(&self.schema).call_timeout(patience)
    }

    /// A store whose calls go through a pooler, and whose messages come from the server.
    pub(crate) async fn store_behind(&self, pooler: &PgBouncer) -> Arc<PostgresStore> {
        let url = format!("{}?migrate=true&events_url={}", pooler.url(), self.server().url());
        Arc::new(self.builder().connect(&url).await.expect("it is up"))
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

    /// A session of the application, whose user has only the rights that the guide names.
    pub(crate) async fn application(&self) -> Client {
        let user = format!("app_{}", self.schema);
        let statements = "DO $$ BEGIN CREATE ROLE {user} LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
            GRANT USAGE ON SCHEMA {schema} TO {user};
            GRANT EXECUTE ON FUNCTION {schema}.check_fence, {schema}.leave_answer TO {user}";
        self.execute(&statements.replace("{user}", &user)).await;
        let client = self.client().await;
        client.batch_execute(&format!("SET SESSION AUTHORIZATION {user}")).await.expect("a role");
        client
    }

    /// Checks a fence in a transaction of the application. Returns the state of an error.
    pub(crate) async fn check_fence(&self, client: &Client, key: &LockKey, fence: u64) -> Result<(), String> {
        let check = format!("SELECT {}.check_fence($1, $2)", self.schema);
        done(client.execute(&check, &[&key.as_str(), &token(fence)]).await)
    }

    /// Leaves an answer in a transaction of the application. Returns the state of an error.
    pub(crate) async fn leave_answer(
        &self,
        client: &Client,
        key: &LockKey,
        fence: u64,
        record: &Record,
    ) -> Result<(), String> {
        let leave = format!("SELECT {}.leave_answer($1, $2, $3, 60000)", self.schema);
        let length = u32::try_from(record.head.len()).expect("small").to_be_bytes();
        let answer = [&length[..], &record.head, record.body.as_deref().unwrap_or_default()].concat();
        done(client.execute(&leave, &[&key.as_str(), &token(fence), &answer]).await)
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

/// The fencing token of the first section of a grant.
fn token(fence: u64) -> i64 {
    i64::try_from(fence << 10).expect("small")
}

fn done(result: Result<u64, tokio_postgres::Error>) -> Result<(), String> {
    result.map(drop).map_err(|error| error.code().expect("of the server").code().to_owned())
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

    pub(crate) async fn acquire_unless_recorded(&self, key: &LockKey, id: &AcquisitionId) -> AcquireReply {
        let valid_for = Duration::from_secs(5);
        let request = AcquireRequest::new(key.clone(), id.clone(), LONG, IfBusy::Enqueue, terms(), valid_for);
        self.store.acquire_one(request.demand(Demand::new().unless_recorded())).await.expect("a reply")
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

    pub(crate) async fn release_with(&self, key: &LockKey, id: &AcquisitionId, record: Record) -> ReleaseReply {
        self.try_release_with(key, id, record).await.expect("a reply")
    }

    pub(crate) async fn try_release_with(
        &self,
        key: &LockKey,
        id: &AcquisitionId,
        record: Record,
    ) -> Result<ReleaseReply, StoreError> {
        let request = ReleaseRequest::new(key.clone(), id.clone(), Duration::ZERO, terms());
        self.store.release_one(request.record(record, LONG)).await
    }

    /// The fence after a yield to no waiter.
    pub(crate) async fn extended(&self, key: &LockKey, id: &AcquisitionId, fence: u64) -> u64 {
        let valid_for = Duration::from_secs(5);
        let request = YieldRequest::new(key.clone(), id.clone(), fence, self.id(), LONG, terms(), valid_for);
        match self.store.yield_to_queue(request).await.expect("a reply") {
            YieldReply::Extended { fence } => fence,
            other => panic!("not extended, but {other:?}"),
        }
    }

    pub(crate) async fn renew(&self, key: &LockKey, id: &AcquisitionId) -> RenewReply {
        let request = RenewRequest::new(key.clone(), id.clone(), LONG);
        self.store.renew(vec![request]).await.expect("a reply").remove(0)
    }
}

pub(crate) fn terms() -> QueueConfig {
    QueueConfig::new(Duration::from_secs(3), Duration::from_secs(10), 100)
}
