//! The console of one process, another process that holds keys, and a browser.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Once,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{Router, extract::Path, http::StatusCode, routing::get};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    task::JoinHandle,
};
use tower_lock::{
    LockKey, LockLayer, LockManager, MemoryStore,
    console::{self, Access},
    key,
    store::LockStore,
};
use tower_lock_testkit::{
    app::{fetch, problem_type, serve, text},
    browser::Browser,
    log::Log,
    skipped,
    wait::{soon, until},
};

/// A lease that does not end in a test.
const LEASE: Duration = Duration::from_secs(60);

/// A Chromium uses more than a core while it starts.
static BROWSERS: Semaphore = Semaphore::const_new(2);

/// A browser, and the right to have one.
pub(crate) struct Window {
    pub(crate) browser: Browser,
    _turn: SemaphorePermit<'static>,
}

/// Two processes with the same store. The first one serves the console.
pub(crate) struct Fleet {
    pub(crate) first: LockManager,
    pub(crate) second: LockManager,
    server: SocketAddr,
    /// Handlers of the second process that were dropped before their end.
    aborted: Arc<AtomicUsize>,
    service: Router,
}

struct CountsDrop(Arc<AtomicUsize>);

impl Drop for CountsDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// Returns whether there is a browser. Notes on stderr that there is none.
pub(crate) fn is_installed() -> bool {
    static NOTE: Once = Once::new();
    if !Browser::is_available() {
        NOTE.call_once(|| skipped("the tests in a browser", "chromium or chromedriver"));
    }
    Browser::is_available()
}

/// A browser that runs scripts. `None` if there is none on this machine.
pub(crate) async fn window() -> Option<Window> {
    is_installed().then_some(())?;
    let turn = BROWSERS.acquire().await.expect("never closed");
    Some(Window { browser: Browser::start().await, _turn: turn })
}

/// Two browsers, with the right to have both: a test that had one would wait for another such test.
pub(crate) async fn windows() -> Option<[Window; 2]> {
    is_installed().then_some(())?;
    let mut both = BROWSERS.acquire_many(2).await.expect("never closed");
    let one = both.split(1).expect("two");
    let (first, second) = tokio::join!(Browser::start(), Browser::start());
    Some([Window { browser: first, _turn: one }, Window { browser: second, _turn: both }])
}

/// A browser in which scripts are switched off.
pub(crate) async fn window_without_scripts() -> Option<Window> {
    is_installed().then_some(())?;
    let turn = BROWSERS.acquire().await.expect("never closed");
    Some(Window { browser: Browser::without_scripts().await, _turn: turn })
}

impl Fleet {
    pub(crate) async fn in_memory() -> Self {
        let store = Arc::new(MemoryStore::new());
        Self::on(Arc::clone(&store), store).await
    }

    /// The store of each process.
    pub(crate) async fn on(first: impl LockStore, second: impl LockStore) -> Self {
        let first = LockManager::builder(first).instance("web-1").lease(LEASE).build();
        let second = LockManager::builder(second).instance("web-2").lease(LEASE).build();
        let access = |_: &_| Access::Revoke { operator: "ada".to_owned() };
        let server = serve(Router::new().nest("/ops/locks", console::router(&first, access))).await;
        let aborted = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&aborted);
        let handler = get(async move |Path(_): Path<u32>| {
            let _dropped = CountsDrop(counter);
            std::future::pending::<()>().await;
        });
        let layer = LockLayer::new(&second, key::from_fields("order", key::path_param("id")));
        let service = Router::new().route("/orders/{id}", handler.route_layer(layer));
        Self { first, second, server, aborted, service }
    }

    /// The address of a page of the console.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}/ops/locks{path}", self.server)
    }

    /// Starts a request to the second process, whose handler holds `order:<id>` until it is
    /// aborted.
    pub(crate) async fn order(&self, id: u32) -> JoinHandle<(StatusCode, String)> {
        let service = self.service.clone();
        let request = tokio::spawn(async move {
            let response = fetch(&service, &format!("/orders/{id}")).await;
            (response.status(), text(response).await)
        });
        let key = LockKey::from(("order", id));
        until("a held lock", async || self.is_held(&key).await).await;
        request
    }

    pub(crate) async fn is_held(&self, key: &LockKey) -> bool {
        self.first.inspect(key.clone()).await.expect("it is up").holder().is_some()
    }

    /// Asserts that the handler of the second process was aborted, and its client got the problem
    /// `lost`.
    pub(crate) async fn assert_lost(&self, request: JoinHandle<(StatusCode, String)>) {
        let (status, problem) = soon("the end of the request", request).await.expect("no panic");
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(problem.contains(&problem_type("lost")), "{problem}");
        assert_eq!(self.aborted.load(SeqCst), 1, "aborted handlers");
    }

    /// Asserts that the request still runs under its lock, and that no revocation was logged.
    pub(crate) async fn assert_untouched(&self, id: u32, log: &Log) {
        assert!(self.is_held(&LockKey::from(("order", id))).await, "the lock was revoked");
        assert_eq!(self.aborted.load(SeqCst), 0, "aborted handlers");
        assert_eq!(audits(log), Vec::<String>::new());
    }
}

/// The lines of the log about revocations.
pub(crate) fn audits(log: &Log) -> Vec<String> {
    log.text().lines().filter(|line| line.contains("tower_lock::audit")).map(str::to_owned).collect()
}
