//! Keys and lock managers of the tests.

use std::time::Duration;

use tokio::time::sleep;
use tower_lock::{
    LockKey, LockManager, LockManagerBuilder,
    key::{self, KeySource},
    test_util::TestStore,
};

use crate::{log::Log, wait::until};

/// The shortest one.
const LEASE: Duration = Duration::from_secs(2);

/// The key of most tests.
pub fn key() -> LockKey {
    LockKey::from(("k",))
}

/// [`key()`] for every request.
pub fn one_key() -> impl KeySource {
    key::from_parts(|_| ("k",))
}

/// A manager, and its store in memory.
pub fn store_and_locks() -> (TestStore, LockManager) {
    let store = TestStore::new();
    let locks = LockManager::new(store.clone());
    (store, locks)
}

/// The store stops in the work of a call, and replies again after its lease: the record is lost,
/// which is reported once, and the work runs again.
pub async fn lost_record_is_reported(builder: LockManagerBuilder, stop: impl AsyncFn(), go_on: impl AsyncFn()) {
    let log = Log::default();
    let _listening = log.listen();
    let locks = builder.lease(LEASE).build();
    let warnings = || log.text().matches("a record may be lost").count();
    locks.once(("left", 1)).run(async |_| {}).await.expect("it is up");
    let mut token = None;
    let run = locks.once(("pay", 7)).run(async |lock| {
        token = Some(lock.fencing_token());
        stop().await;
    });
    run.await.expect("it ran");
    sleep(LEASE).await;
    go_on().await;
    until("the warning", async || warnings() == 1).await;
    let text = log.text();
    let warning = text.lines().find(|line| line.contains("a record may be lost")).expect("found");
    let fence = format!("fence={}", token.expect("it ran"));
    assert!(warning.contains("key=\"+once:~") && warning.contains(&fence), "{text}");
    until("another run", async || locks.once(("pay", 7)).run(async |_| {}).await.is_ok()).await;
    assert_eq!(warnings(), 1, "{}", log.text());
}
