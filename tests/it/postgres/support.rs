//! A PostgreSQL server, and several instances of a service in front of it.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering, Ordering::SeqCst},
};

use tokio::sync::OnceCell;
use tokio_postgres::{Client, NoTls};
use tower_lock::{
    AcquisitionId, LockKey, LockManager, PostgresStore,
    store::{PostgresStoreBuilder, Record},
};
use tower_lock_testkit::{PgBouncer, PostgresServer, limits, skipped, wait::until};
pub(crate) use tower_lock_testkit::{
    caller::{Caller, LONG, request, terms},
    sections::Sections,
};

/// A change of the migration: a call waits for a row as long as for its reply. On a busy machine
/// the session that has locked the row may get no CPU for longer than the lock timeout.
pub(crate) const PATIENT: (&str, &str) = ("lock_timeout = '200ms'", "lock_timeout = '1min'");

/// A server, with a user and a schema of this test.
pub(crate) struct Environment {
    own: Option<PostgresServer>,
    pub(crate) schema: String,
    user: String,
    /// A session of the superuser, which is none of the user.
    session: Mutex<Option<Arc<Client>>>,
    has_tables: AtomicBool,
}

/// The server of all tests that do not stop it.
static SERVER: OnceCell<PostgresServer> = OnceCell::const_new();

const SETTINGS: [&str; 3] =
    ["max_connections=300", "shared_preload_libraries=pg_stat_statements", "pg_stat_statements.track_utility=off"];

fn is_skipped(missing: &str, is_available: bool) -> bool {
    if !is_available {
        skipped(std::thread::current().name().unwrap_or("a test"), missing);
    }
    !is_available
}

/// Returns `None`, with a note on stderr, if there is no `postgres`.
pub(crate) async fn environment() -> Option<Environment> {
    if is_skipped("postgres", PostgresServer::is_available()) {
        return None;
    }
    SERVER.get_or_init(|| PostgresServer::start(&SETTINGS)).await;
    Some(Environment::new(None).await)
}

/// The same with a server of its own, with more settings.
pub(crate) async fn own_environment(settings: &[&str]) -> Option<Environment> {
    if is_skipped("postgres", PostgresServer::is_available()) {
        return None;
    }
    let server = PostgresServer::start(&[&SETTINGS, settings].concat()).await;
    Some(Environment::new(Some(server)).await)
}

/// A schema of this test, and a pooler in front of its server.
pub(crate) async fn pooled() -> Option<(Environment, PgBouncer)> {
    if is_skipped("pgbouncer", PgBouncer::is_available()) {
        return None;
    }
    let environment = environment().await?;
    let pooler = PgBouncer::start(environment.server()).await;
    Some((environment, pooler))
}

pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("it is up");
    tokio::spawn(connection);
    client
}

impl Environment {
    async fn new(own: Option<PostgresServer>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // With leading zeros: no name is the beginning of another.
        let (schema, user) = (format!("test_{number:03}"), format!("user_{number:03}"));
        let environment = Self { own, schema, user, session: Mutex::default(), has_tables: AtomicBool::new(false) };
        environment.execute("CREATE ROLE {user} LOGIN SUPERUSER").await;
        environment
    }

    pub(crate) fn server(&self) -> &PostgresServer {
        self.own.as_ref().unwrap_or_else(|| SERVER.get().expect("started"))
    }

    /// The URL of the database with the user of this test. That user is a superuser.
    pub(crate) fn url(&self) -> String {
        self.server().url_of(&self.user)
    }

    /// Makes the tables by the migration with these changes, in place of [`PATIENT`].
    pub(crate) async fn migrate(&self, changes: &[(&str, &str)]) {
        let mut migration = self.builder().migration().expect("a name");
        for (text, other) in changes {
            assert!(migration.contains(text), "{text}");
            migration = migration.replace(text, other);
        }
        self.execute(&migration).await;
        self.has_tables.store(true, SeqCst);
    }

    /// A store with the tables of this test, which are made if there are none.
    pub(crate) async fn connect(&self, builder: PostgresStoreBuilder, url: &str) -> Arc<PostgresStore> {
        if !self.has_tables.load(SeqCst) {
            self.migrate(&[PATIENT]).await;
        }
        Arc::new(builder.connect(url).await.expect("it is up"))
    }

    pub(crate) async fn store(&self) -> Arc<PostgresStore> {
        self.connect(self.builder(), &self.url()).await
    }

    /// A store in the schema of this test.
    pub(crate) fn builder(&self) -> PostgresStoreBuilder {
        limits::postgres().schema(&self.schema)
    }

    /// A new instance of the service.
    pub(crate) async fn instance(&self, name: &str) -> LockManager {
        LockManager::builder(self.store().await).instance(name).build()
    }

    pub(crate) async fn two_instances(&self) -> [LockManager; 2] {
        [self.instance("a").await, self.instance("b").await]
    }

    /// A session of the application.
    pub(crate) async fn client(&self) -> Client {
        connect(&self.url()).await
    }

    /// A session of the application, whose user has only the rights that the guide names.
    pub(crate) async fn application(&self) -> Client {
        let statements = "DO $$ BEGIN CREATE ROLE app_{user} LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
            GRANT USAGE ON SCHEMA {schema} TO app_{user};
            GRANT EXECUTE ON FUNCTION {schema}.check_fence, {schema}.leave_answer TO app_{user}";
        self.execute(statements).await;
        let client = self.client().await;
        self.run(&client, "SET SESSION AUTHORIZATION app_{user}").await;
        client
    }

    /// A session with an acquire that is not committed.
    pub(crate) async fn uncommitted_acquire(&self, key: &LockKey, id: &AcquisitionId) -> Client {
        let client = self.client().await;
        let acquire = format!(
            "BEGIN; SELECT * FROM {{schema}}.acquire(9000000000000000, 3000, 10000, 10, false, '{{{}}}', '{{{id}}}', \
             '{{60000}}', '{{true}}', '{{NULL}}')",
            key.as_str(),
        );
        self.run(&client, &acquire).await;
        client
    }

    /// Commits when a session of this test waits for the transaction.
    pub(crate) async fn commit_when_awaited(&self, client: &Client) {
        self.sessions_wait(1).await;
        self.run(client, "COMMIT").await;
    }

    /// Waits until this many sessions of this test wait for a lock.
    pub(crate) async fn sessions_wait(&self, sessions: i64) {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE usename = '{user}' AND wait_event_type = 'Lock'";
        until("calls that wait for a lock", async || self.value(waiting).await == sessions).await;
    }

    /// Checks a fence in a transaction of the application, as the holder of now. Returns the state
    /// of an error.
    pub(crate) async fn check_fence(&self, client: &Client, key: &LockKey, fence: u64) -> Result<(), String> {
        let holder = self.holder(key).await;
        self.check_fence_as(client, key, fence, &holder).await
    }

    /// The same as this holder.
    pub(crate) async fn check_fence_as(
        &self,
        client: &Client,
        key: &LockKey,
        fence: u64,
        holder: &str,
    ) -> Result<(), String> {
        let check = self.named("SELECT {schema}.check_fence($1, $2, $3)");
        done(client.execute(&check, &[&key.as_str(), &token(fence), &holder]).await)
    }

    /// The id of the holder. Empty if there is none.
    async fn holder(&self, key: &LockKey) -> String {
        let holder = self.named("SELECT coalesce(max(holder), '') FROM {schema}.locks WHERE key = $1");
        self.session().await.query_one(&holder, &[&key.as_str()]).await.expect("a row").get(0)
    }

    /// A transaction of the application that has checked its fence, as a handler does before it
    /// writes.
    pub(crate) async fn writer(&self, key: &LockKey, fence: u64) -> Client {
        let writer = self.application().await;
        self.run(&writer, "BEGIN").await;
        assert_eq!(self.check_fence(&writer, key, fence).await, Ok(()), "it holds the key");
        writer
    }

    /// Leaves an answer in a transaction of the application. Returns the state of an error.
    pub(crate) async fn leave_answer(
        &self,
        client: &Client,
        key: &LockKey,
        fence: u64,
        record: &Record,
    ) -> Result<(), String> {
        let (leave, holder) =
            (self.named("SELECT {schema}.leave_answer($1, $2, $3, $4, 60000)"), self.holder(key).await);
        let length = u32::try_from(record.head.len()).expect("small").to_be_bytes();
        let answer = [&length[..], &record.head, record.body.as_deref().unwrap_or_default()].concat();
        done(client.execute(&leave, &[&key.as_str(), &token(fence), &holder, &answer]).await)
    }

    /// A text with the names of this test for `{schema}` and `{user}`.
    pub(crate) fn named(&self, text: &str) -> String {
        text.replace("{schema}", &self.schema).replace("{user}", &self.user)
    }

    /// Executes statements in a session. See [`Self::named`].
    pub(crate) async fn run(&self, client: &Client, statements: &str) {
        client.batch_execute(&self.named(statements)).await.expect(statements);
    }

    /// Executes statements as the superuser. See [`Self::named`].
    pub(crate) async fn execute(&self, statements: &str) {
        self.run(&*self.session().await, statements).await;
    }

    /// The only value of a query. See [`Self::named`].
    pub(crate) async fn value(&self, query: &str) -> i64 {
        self.session().await.query_one(&self.named(query), &[]).await.expect(query).get(0)
    }

    async fn session(&self) -> Arc<Client> {
        let opened = || self.session.lock().unwrap_or_else(PoisonError::into_inner);
        let open = opened().as_ref().filter(|client| !client.is_closed()).map(Arc::clone);
        if let Some(client) = open {
            return client;
        }
        let client = Arc::new(connect(&self.server().url()).await);
        Arc::clone(opened().insert(client))
    }

    /// The server of this test crashes, and starts again.
    pub(crate) async fn crash(&self) {
        let server = self.own.as_ref().expect("a server of its own");
        server.crash().await;
        server.restart().await;
    }

    /// Ends the sessions of the stores of this test, or those of them with this condition, and
    /// waits for their end.
    pub(crate) async fn kill_sessions(&self, condition: &str) {
        let now = self.value("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8").await;
        // A session that is not idle ends later. One that has begun since is another.
        let terminated = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{{user}}' \
             AND application_name = 'tower-lock' AND extract(epoch FROM backend_start) * 1000000 < {now} AND {condition}"
        );
        until("they have ended", async || self.value(&terminated).await == 0).await;
    }
}

/// The fencing token of the first section of a grant.
fn token(fence: u64) -> i64 {
    i64::try_from(fence << 10).expect("small")
}

fn done(result: Result<u64, tokio_postgres::Error>) -> Result<(), String> {
    result.map(drop).map_err(|error| error.code().expect("of the server").code().to_owned())
}
