//! The fencing of the examples rejects late writes, in each database that they support.

use axum::{http::StatusCode, response::IntoResponse};
use futures_util::future::{join, join_all};
use sqlx::{AnyConnection, AnyPool};
use tokio::time::sleep;
use tower_lock::{HeldLock, LockKey, LockManager};
use tower_lock_testkit::wait::{ms, soon};

use crate::services::Databases;
use support::database::{Dialect, check_fence, open_url};

const SCHEMA: &str = "CREATE TABLE written (id INTEGER PRIMARY KEY AUTOINCREMENT, writer VARCHAR(10) NOT NULL)";

/// Two consecutive holders of a key. Only their tokens are left.
async fn early_and_late(locks: &LockManager, key: (&'static str, u64)) -> (HeldLock, HeldLock) {
    let mut held = Vec::new();
    for _ in 0..2 {
        let guard = locks.lock(key).await.expect("free");
        held.push(guard.held_lock());
        guard.release().await.expect("in order");
    }
    let [early, late] = held.try_into().expect("two");
    assert!(early.fencing_token() < late.fencing_token());
    (early, late)
}

async fn passes(transaction: &mut AnyConnection, lock: &HeldLock) -> bool {
    match soon("the row", check_fence(transaction, lock)).await {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.into_response().status(), StatusCode::SERVICE_UNAVAILABLE);
            false
        }
    }
}

/// Writes as a handler does: the fence first.
async fn write(db: &AnyPool, lock: &HeldLock, writer: &str) -> bool {
    let mut transaction = db.begin().await.expect("a database");
    let passed = passes(&mut transaction, lock).await;
    if passed {
        let insert = db.sql("INSERT INTO written (writer) VALUES (?)");
        sqlx::query(&insert).bind(writer).execute(&mut *transaction).await.expect("a table");
        transaction.commit().await.expect("no conflict");
    }
    passed
}

async fn written(db: &AnyPool) -> Vec<String> {
    let all = sqlx::query_scalar("SELECT writer FROM written ORDER BY id");
    all.fetch_all(db).await.expect("a table")
}

/// Guarantee: G1, G17.
#[tokio::test]
async fn smaller_fencing_token_is_refused_and_an_equal_one_is_not() {
    let databases = Databases::new("fence").await;
    for url in databases.urls() {
        let db = open_url(&url, SCHEMA).await.expect(&url);
        let locks = LockManager::in_memory();
        let (early, late) = early_and_late(&locks, ("account", 7)).await;
        assert!(write(&db, &early, "early").await, "{url}: the first");
        assert!(write(&db, &early, "early").await, "{url}: one section may write twice");
        assert!(write(&db, &late, "late").await, "{url}: a later one");
        assert!(!write(&db, &early, "early").await, "{url}: too late");
        assert!(!write(&db, &early, "early").await, "{url}: still too late");
        assert!(write(&db, &late, "late").await, "{url}: a refused write changes nothing");
        assert_eq!(written(&db).await, ["early", "early", "late", "late"], "{url}");

        // Another key has its own fence, even with a similar name.
        for (name, alike) in [("account", "Account"), ("account", "account "), ("é", "e")] {
            let (name, alike) = (LockKey::raw(name).expect("a key"), LockKey::raw(alike).expect("a key"));
            let before = locks.lock(alike.clone()).await.expect("free");
            let after = locks.lock(name).await.expect("free");
            assert!(before.fencing_token() < after.fencing_token());
            assert!(
                write(&db, &after.held_lock(), "-").await && write(&db, &before.held_lock(), "-").await,
                "{url}: {alike}"
            );
        }
        db.close().await;
    }
}

/// Guarantee: G17.
#[tokio::test]
async fn two_writers_of_one_key_are_serialized() {
    let databases = Databases::new("fence-row").await;
    for url in databases.urls() {
        let db = open_url(&url, SCHEMA).await.expect(&url);
        // The first writer is followed by an earlier or a later one; the key is new or known.
        for round in 0..4 {
            let (early, late) = early_and_late(&LockManager::in_memory(), ("account", round / 2)).await;
            let (first, second) = if round % 2 == 0 { (&late, &early) } else { (&early, &late) };
            let mut in_it = db.begin().await.expect("a database");
            assert!(passes(&mut in_it, first).await, "{url}, round {round}");
            let mut waits = std::pin::pin!(write(&db, second, "second"));
            // The time in which it would write.
            tokio::select! {
                _ = &mut waits => panic!("{url}, round {round}: no row was written"),
                () = sleep(ms(200)) => {}
            }
            let (committed, passed) = join(in_it.commit(), waits).await;
            committed.expect("no conflict");
            assert_eq!(passed, first.fencing_token() < second.fencing_token(), "{url}, round {round}");
        }
        db.close().await;
    }
}

/// The snapshot of a transaction may be old: the current fence decides.
/// Guarantee: G17.
#[tokio::test]
async fn stale_read_does_not_let_a_transaction_through() {
    let databases = Databases::new("fence-snapshot").await;
    for url in databases.urls() {
        let db = open_url(&url, SCHEMA).await.expect(&url);
        let (early, late) = early_and_late(&LockManager::in_memory(), ("account", 7)).await;
        assert!(write(&db, &early, "early").await, "{url}");
        let mut looks = db.begin().await.expect("a database");
        let tokens: Vec<(i64,)> =
            sqlx::query_as("SELECT token FROM lock_fence").fetch_all(&mut *looks).await.expect("a table");
        assert_eq!(tokens, [(early.fencing_token().as_i64(),)], "{url}");
        assert!(write(&db, &late, "late").await, "{url}");
        // Some databases report a conflict early, some at the end.
        assert!(soon("the row", check_fence(&mut looks, &early)).await.is_err(), "{url}");
        drop(looks);
        db.close().await;
    }
}

/// New keys do not block each other, in any order.
/// Guarantee: G17.
#[tokio::test]
async fn writers_of_many_keys_do_not_abort_each_other() {
    let databases = Databases::new("fence-many").await;
    for url in databases.urls() {
        let db = open_url(&url, SCHEMA).await.expect(&url);
        let locks = LockManager::in_memory();
        let writers = join_all((0..60_u64).map(|n| {
            let (db, locks, key) = (&db, &locks, ("account", n * 7919 % 20));
            async move {
                let guard = locks.lock(key).await.expect("a section");
                let wrote = write(db, &guard.held_lock(), "-").await;
                guard.release().await.expect("in order");
                wrote
            }
        }));
        let wrote = soon("all to have written", writers).await;
        assert!(wrote.into_iter().all(|wrote| wrote), "{url}");
        assert_eq!(written(&db).await.len(), 60, "{url}");
        db.close().await;
    }
}
