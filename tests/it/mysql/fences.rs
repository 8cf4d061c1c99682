//! The check of a fence in a transaction of the application.

use mysql_async::{Conn, prelude::Queryable};
use tower_lock::{
    LockError, LockKey,
    store::{AcquireReply, ForceReleaseReply},
};
use tower_lock_testkit::{
    caller::Caller,
    wait::{ms, until},
};

use crate::support::{Environment, environment};

const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

async fn begun(environment: &Environment, level: &str) -> Conn {
    let mut session = environment.session().await;
    session.query_drop(format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}")).await.expect("a level");
    session.query_drop("START TRANSACTION").await.expect("begun");
    session
}

/// Guarantee: G1.
#[tokio::test]
async fn transaction_that_checks_its_fence_keeps_its_key() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.instance("one").await, environment.instance("two").await);
    for level in LEVELS {
        let key = LockKey::from(("reward", level));
        let guard = one.lock(key.clone()).await.expect("free");
        let (token, id) = (guard.fencing_token().as_u64(), guard.held_lock().acquisition_id().to_string());
        let mut session = begun(&environment, level).await;
        environment.check(&mut session, &key, token, &id).await.expect("it holds the key");
        let mut other = begun(&environment, level).await;
        let wrong = environment.check(&mut other, &key, token, "one:0:0").await.expect_err("another id");
        assert!(wrong.to_string().contains("is not held any more"), "{wrong}");
        if level == "SERIALIZABLE" {
            // Each of its reads locks. With the other levels this transaction keeps nothing.
            other.query_drop("ROLLBACK").await.expect("rolled back");
        }
        // Passes the open transaction, as renewals do.
        assert!(guard.release().await.is_ok(), "{level}");
        assert!(matches!(two.try_lock(key.clone()).await, Err(LockError::Busy { .. })), "{level}: it is kept");
        assert_eq!(two.inspect(key.clone()).await.expect("a reply").kept_by.as_deref(), Some("an open transaction"));
        session.query_drop("COMMIT").await.expect("committed");
        let next = two.lock(key.clone()).await.expect("free");
        let mut late = begun(&environment, level).await;
        let stale = environment.check(&mut late, &key, token, &id).await.expect_err("stale");
        assert!(stale.to_string().contains("is not held any more: roll back"), "{stale}");
        late.query_drop("ROLLBACK").await.expect("rolled back");
        assert!(matches!(two.force_release(key.clone()).await.expect("a reply"), ForceReleaseReply::Revoked { .. }));
        let (token, id) = (next.fencing_token().as_u64(), next.held_lock().acquisition_id().to_string());
        late.query_drop("START TRANSACTION").await.expect("begun");
        let revoked = environment.check(&mut late, &key, token, &id).await.expect_err("revoked");
        assert!(revoked.to_string().contains("is not held any more"), "{revoked}");
    }
}

/// Guarantee: G1.
#[tokio::test]
async fn snapshot_that_is_older_than_the_lock_is_refused() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("one").await;
    let key = LockKey::from(("stock", 7));
    locks.lock(key.clone()).await.expect("free").release().await.expect("up");
    let mut session = begun(&environment, "REPEATABLE READ").await;
    session.query_drop(format!("SELECT COUNT(*) FROM {}_records", environment.prefix)).await.expect("a snapshot");
    let guard = locks.lock(key.clone()).await.expect("free");
    let (token, id) = (guard.fencing_token().as_u64(), guard.held_lock().acquisition_id().to_string());
    let old = environment.check(&mut session, &key, token, &id).await.expect_err("an old snapshot");
    assert!(old.to_string().contains("this transaction is older than its lock"), "{old}");
    session.query_drop("ROLLBACK").await.expect("rolled back");
    session.query_drop("START TRANSACTION").await.expect("begun");
    environment.check(&mut session, &key, token, &id).await.expect("a new snapshot");
    session.query_drop("ROLLBACK").await.expect("rolled back");
    let none = environment.check(&mut session, &key, token, &id).await.expect_err("no transaction");
    assert!(none.to_string().contains("no transaction is open"), "{none}");
}

/// An answer that the handler leaves in its transaction is the record of its key.
///
/// Guarantee: G18.
#[tokio::test]
async fn answer_in_a_transaction_is_found_after_its_commit() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("one").await;
    let (key, other) = (LockKey::from(("payment", 7)), Caller::new(&environment.store().await, "two"));
    for commits in [false, true] {
        let guard = locks.lock(key.clone()).await.expect("free");
        let (token, id) = (guard.fencing_token().as_u64(), guard.held_lock().acquisition_id().to_string());
        let mut session = begun(&environment, "REPEATABLE READ").await;
        let answer = [&4_u32.to_be_bytes()[..], b"headbody"].concat();
        let statement = format!("CALL {}_leave_answer(?, ?, ?, ?, ?)", environment.prefix);
        session.exec_drop(statement, (key.as_str(), token, &id, answer, 60_000)).await.expect("left");
        let retry = other.acquire_unless_recorded(&key, &other.id()).await;
        assert!(matches!(retry, AcquireReply::Queued { .. }), "does not wait for the transaction: {retry:?}");
        session.query_drop(if commits { "COMMIT" } else { "ROLLBACK" }).await.expect("ended");
        guard.release().await.expect("up");
        let left = locks.inspect(key.clone()).await.expect("a reply").record_left;
        assert_eq!(left.is_some_and(|left| left > ms(50_000)), commits, "{left:?}");
    }
    until("the key is free", async || locks.try_lock(key.clone()).await.is_ok()).await;
}
