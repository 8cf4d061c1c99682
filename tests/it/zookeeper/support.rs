//! Servers, and several instances of a service in front of them.

use std::{
    sync::{
        Arc, Once,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::sync::OnceCell;
use tower_lock::{LockManager, store::ZooKeeperStore};
use tower_lock_testkit::{ZooKeeper, limits, skipped};

/// Servers, with a root of this test.
pub(crate) struct Environment {
    own: Option<ZooKeeper>,
    pub(crate) root: String,
}

/// The server of all tests that do not stop it.
static SERVER: OnceCell<ZooKeeper> = OnceCell::const_new();

/// Returns `None`, with a note on stderr, if there is no server.
pub(crate) async fn environment() -> Option<Environment> {
    is_installed().then_some(())?;
    SERVER.get_or_init(|| ZooKeeper::start(1)).await;
    Some(Environment::new(None))
}

/// The same with so many servers of its own.
pub(crate) async fn own_environment(servers: usize) -> Option<Environment> {
    is_installed().then_some(())?;
    Some(Environment::new(Some(ZooKeeper::start(servers).await)))
}

pub(crate) fn is_installed() -> bool {
    static NOTE: Once = Once::new();
    if !ZooKeeper::is_available() {
        NOTE.call_once(|| skipped("the tests on ZooKeeper", "java or `ZOOKEEPER_JARS`"));
    }
    ZooKeeper::is_available()
}

impl Environment {
    fn new(own: Option<ZooKeeper>) -> Self {
        static TESTS: AtomicU32 = AtomicU32::new(0);
        Self { own, root: format!("/tests/t{:03}", TESTS.fetch_add(1, SeqCst)) }
    }

    pub(crate) fn servers(&self) -> &ZooKeeper {
        self.own.as_ref().unwrap_or_else(|| SERVER.get().expect("started"))
    }

    pub(crate) fn url(&self) -> String {
        format!("zookeeper://{}", self.servers().addresses())
    }

    /// A store whose calls fail only if the servers do.
    pub(crate) async fn store(&self, session: Duration) -> Arc<ZooKeeperStore> {
        let builder = ZooKeeperStore::builder().root(&self.root).session(session).call_timeout(limits::CALL);
        Arc::new(builder.connect_timeout(limits::CONNECT).connect(&self.url()).await.expect("it is up"))
    }

    pub(crate) async fn store_at(&self, servers: &str, session: Duration) -> Arc<ZooKeeperStore> {
        let builder = ZooKeeperStore::builder().root(&self.root).session(session).connect_timeout(limits::CONNECT);
        Arc::new(builder.connect(&format!("zookeeper://{servers}")).await.expect("it is up"))
    }

    /// Two instances, whose sessions last for the lease, the lock-delay and four seconds.
    pub(crate) async fn instances(&self, lease: Duration) -> [LockManager; 2] {
        let instance = async |name| {
            let store = self.store_at(&self.servers().addresses(), lease + Duration::from_secs(5)).await;
            LockManager::builder(store).instance(name).lease(lease).build()
        };
        [instance("a").await, instance("b").await]
    }
}
