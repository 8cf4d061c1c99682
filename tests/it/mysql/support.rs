//! A server, and several instances of a service in front of it.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use mysql_async::{
    Conn, Error,
    prelude::{FromValue, Queryable},
};
use tokio::sync::OnceCell;
use tower_lock::{LockKey, LockManager, MysqlStore, store::MysqlStoreBuilder};
use tower_lock_testkit::{MariaDb, limits, skipped};

/// A server, with a prefix and a user of this test, which have the same name.
pub(crate) struct Environment {
    own: Option<MariaDb>,
    pub(crate) prefix: String,
}

/// The server of all tests that do not stop it.
static SERVER: OnceCell<MariaDb> = OnceCell::const_new();

/// Returns `None`, with a note on stderr, if there is no server.
pub(crate) async fn environment() -> Option<Environment> {
    is_installed().then_some(())?;
    SERVER.get_or_init(|| MariaDb::installed(&["app"], &[])).await;
    Some(Environment::new(None).await)
}

/// The same with a server of its own, with more settings.
pub(crate) async fn own_environment(settings: &[&str]) -> Option<Environment> {
    is_installed().then_some(())?;
    Some(Environment::new(Some(MariaDb::installed(&["app"], settings).await)).await)
}

fn is_installed() -> bool {
    if !MariaDb::is_available() {
        skipped(std::thread::current().name().unwrap_or("a test"), "mariadbd");
    }
    MariaDb::is_available()
}

impl Environment {
    async fn new(own: Option<MariaDb>) -> Self {
        static TESTS: AtomicU32 = AtomicU32::new(0);
        let environment = Self { own, prefix: format!("t{:03}", TESTS.fetch_add(1, SeqCst)) };
        environment.admin("CREATE USER {p}@'127.0.0.1'").await;
        environment.admin("GRANT ALL ON app.* TO {p}@'127.0.0.1'").await;
        environment
    }

    pub(crate) fn server(&self) -> &MariaDb {
        self.own.as_ref().unwrap_or_else(|| SERVER.get().expect("started"))
    }

    pub(crate) fn url(&self) -> String {
        self.url_of(&self.prefix)
    }

    pub(crate) fn url_of(&self, user: &str) -> String {
        self.server().url("app").replace("root@", &format!("{user}@"))
    }

    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.server().port()))
    }

    /// The same at another address, which leads to the server.
    pub(crate) fn url_at(&self, address: SocketAddr) -> String {
        self.url().replace(&format!("127.0.0.1:{}", self.server().port()), &address.to_string())
    }

    /// A store with the tables of this test, and timeouts that no busy machine reaches.
    pub(crate) fn builder(&self) -> MysqlStoreBuilder {
        MysqlStore::builder()
            .prefix(&self.prefix)
            .migrate(true)
            .call_timeout(limits::CALL)
            .connect_timeout(limits::CONNECT)
    }

    pub(crate) async fn store(&self) -> Arc<MysqlStore> {
        Arc::new(self.builder().connect(&self.url()).await.expect("it is up"))
    }

    pub(crate) async fn instance(&self, name: &str) -> LockManager {
        LockManager::builder(self.store().await).instance(name).build()
    }

    pub(crate) async fn instances(&self, lease: Duration) -> [LockManager; 2] {
        let instance = async |name| LockManager::builder(self.store().await).instance(name).lease(lease).build();
        [instance("a").await, instance("b").await]
    }

    /// A session of the application.
    pub(crate) async fn session(&self) -> Conn {
        Conn::from_url(self.server().url("app")).await.expect("it is up")
    }

    /// Executes a statement with the names of this test for `{p}`.
    pub(crate) async fn run(&self, session: &mut Conn, statement: &str) {
        let statement = statement.replace("{p}", &self.prefix);
        session.query_drop(&statement).await.unwrap_or_else(|error| panic!("{statement}: {error}"));
    }

    /// The same in a session of its own.
    pub(crate) async fn admin(&self, statement: &str) {
        self.run(&mut self.session().await, statement).await;
    }

    /// The value at this column of the first row.
    pub(crate) async fn value<T: FromValue>(&self, query: &str, column: usize) -> T {
        let row = self.session().await.query_first(query.replace("{p}", &self.prefix)).await.expect("a reply");
        row.and_then(|mut row: mysql_async::Row| row.take(column)).unwrap_or_else(|| panic!("{query}: no value"))
    }

    /// Ends the sessions of the stores of this test.
    pub(crate) async fn kill_sessions(&self) {
        self.kill("CONNECTION").await;
    }

    /// Ends their sessions, or the statements that they execute: `QUERY`.
    pub(crate) async fn kill(&self, what: &str) {
        let mut session = self.session().await;
        let all = format!("SELECT id FROM information_schema.processlist WHERE user = '{}'", self.prefix);
        for id in session.query::<u64, _>(all).await.expect("a list") {
            // It may have ended.
            let _ = session.query_drop(format!("KILL {what} {id}")).await;
        }
    }

    /// The server of this test crashes, and starts again.
    pub(crate) async fn crash(&self) {
        self.server().crash().await;
        self.server().restart().await;
    }

    /// Calls a procedure of the application.
    pub(crate) async fn check(&self, session: &mut Conn, key: &LockKey, token: u64, id: &str) -> Result<(), Error> {
        let statement = format!("CALL {}_check_fence(?, ?, ?)", self.prefix);
        session.exec_drop(statement, (key.as_str(), token, id)).await
    }
}
