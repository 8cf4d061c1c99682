//! Sessions are killed, the server crashes, has no connection left or a table is locked, while
//! instances lock keys. And calls that are executed late.

use std::{future::IntoFuture, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_lock::{
    LockKey, MysqlStore,
    store::{AcquireReply, IfBusy, LockStore, ReleaseReply, StoreError, StoreErrorKind},
};
use tower_lock_testkit::{
    caller::{Caller, LONG, request},
    limits,
    locks::key,
    sections::Sections,
    store::StoreExt,
    wait::{ms, soon, until},
};

use crate::support::{environment, own_environment};

/// Guarantee: G1, G6.
#[tokio::test]
async fn requests_go_on_while_sessions_of_mysql_are_killed() {
    let Some(environment) = environment().await else { return };
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&environment.instances(LONG).await);
    let idle = environment.store().await;
    for _ in 0..5 {
        sections.go_on("sections between two kills").await;
        environment.kill_sessions().await;
        idle.health().await.expect("by new sessions");
        for _ in 0..50 {
            environment.kill("QUERY").await;
        }
    }
    sections.go_on("sections after the kills").await;
    sections.end(tasks).await;
    // A procedure that is killed leaves its transaction open.
    let open = "SELECT COUNT(*) FROM information_schema.innodb_trx JOIN information_schema.processlist \
        ON id = trx_mysql_thread_id WHERE user = '{p}' AND command = 'Sleep'";
    until("no idle session has a transaction", async || environment.value::<u64>(open, 0).await == 0).await;
}

/// Guarantee: G1, G6, G11.
#[tokio::test]
async fn crashes_of_mysql_end_no_lock_and_no_wait() {
    let Some(environment) = own_environment(&["--innodb-flush-log-at-trx-commit=1"]).await else { return };
    let new = async |lease| environment.instances(lease).await;
    Arc::<Sections>::default().outlast_crashes(new, async || environment.crash().await).await;
}

/// Guarantee: G6.
#[tokio::test]
async fn running_store_goes_on_without_free_connections_of_mysql() {
    let Some(environment) = environment().await else { return };
    let limit = async |most: u32| {
        environment.admin(&format!("ALTER USER {{p}}@'127.0.0.1' WITH MAX_USER_CONNECTIONS {most}")).await;
    };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let (key, id) = (key(), caller.id());
    let acquire = async || caller.acquire(&key, &id, LONG, IfBusy::Fail).await;
    assert!(acquire().await.is_ok());
    limit(1).await;
    assert!(acquire().await.is_ok(), "it has its connections");
    // It would open more.
    let keys: Vec<_> = (0..256).map(|n| (LockKey::from(("load", n)), caller.id())).collect();
    join_all(keys.iter().map(|(key, id)| caller.granted(key, id, LONG))).await;
    let error = environment.builder().connect_timeout(limits::SHORT).connect(&environment.url()).await;
    let text = format!("{:?}", error.map(drop).expect_err("no connection is left"));
    assert!(text.contains("raise `max_connections`"), "{text}");
    environment.kill_sessions().await;
    // One of the two connections may be open again.
    let _other = mysql_async::Conn::from_url(environment.url()).await;
    let is_refused = async || {
        let error = store.health().await;
        error.is_err_and(|error| format!("{error:?}").contains("raise `max_connections`"))
    };
    until("a call without a connection", is_refused).await;
    limit(0).await;
    until("a connection", async || acquire().await.is_ok()).await;
    assert_eq!(caller.release(&key, &id, Duration::ZERO).await, ReleaseReply::Freed, "it was held all the time");
}

/// Guarantee: G6.
#[tokio::test]
async fn calls_end_while_a_table_of_mysql_is_locked() {
    let Some(environment) = environment().await else { return };
    // Shorter than what the server waits for a table.
    let store = environment.builder().call_timeout(ms(800)).connect(&environment.url()).await.expect("it is up");
    let store = Arc::new(store);
    let caller = Caller::new(&store, "a");
    let (free, held) = (LockKey::from(("free",)), LockKey::from(("held",)));
    let (first, holder) = (caller.id(), caller.id());
    caller.granted(&held, &holder, LONG).await;
    let mut other = environment.session().await;
    environment.run(&mut other, "LOCK TABLES {p}_locks WRITE").await;
    let refused = soon("an error", caller.acquire(&free, &first, LONG, IfBusy::Enqueue));
    // On one connection, which the first one ends.
    let inspect = async |after| {
        sleep(after).await;
        store.inspect(held.clone()).await
    };
    let (refused, early, late) = tokio::join!(refused, inspect(ms(0)), inspect(ms(300)));
    let kinds = [refused.map(drop), early.map(drop), late.map(drop)].map(|reply| reply.map_err(|error| error.kind()));
    assert_eq!(kinds, [Err(StoreErrorKind::Timeout); 3]);
    environment.run(&mut other, "UNLOCK TABLES").await;
    caller.granted(&free, &first, LONG).await;
    assert_eq!(caller.release(&held, &holder, Duration::ZERO).await, ReleaseReply::Freed, "it is still held");
}

/// Guarantee: G6.
#[tokio::test]
async fn open_transaction_delays_no_other_key_in_mysql() {
    let Some(environment) = own_environment(&[]).await else { return };
    let instances = environment.instances(LONG).await;
    let guard = instances[0].lock(("pinned",)).await.expect("free");
    let (token, id) = (guard.fencing_token().as_u64(), guard.held_lock().acquisition_id().to_string());
    let mut writer = environment.session().await;
    environment.run(&mut writer, "START TRANSACTION").await;
    environment.check(&mut writer, guard.held_lock().key(), token, &id).await.expect("it holds the key");
    guard.release().await.expect("held");
    let store = environment.store().await;
    let caller = Caller::new(&store, "c");
    let commit = async || {
        let keys = (0..20).map(|n| LockKey::from(("more", n))).chain([LockKey::from(("pinned",))]);
        let requests = keys.map(|key| request(&key, &caller.id(), LONG, IfBusy::Fail)).collect();
        let mut replies = join_all(store.acquire(requests).into_iter()).await;
        let pinned = replies.pop();
        assert!(matches!(pinned, Some(Ok(AcquireReply::Busy { .. }))), "no wait for the transaction: {pinned:?}");
        assert!(replies.iter().all(|reply| matches!(reply, Ok(AcquireReply::Granted { .. }))), "{replies:?}");
        environment.run(&mut writer, "COMMIT").await;
    };
    Arc::<Sections>::default().pass_open_transaction(&instances, commit).await;
    let waits = "SELECT `count` FROM information_schema.innodb_metrics WHERE name = 'lock_timeouts'";
    assert_eq!(environment.value::<u64>(waits, 0).await, 0, "no call has waited for the transaction");
}

/// A deadlock ends the transaction of a call, which has changed nothing, and is made again.
///
/// Guarantee: G6.
#[tokio::test]
async fn call_of_mysql_is_made_again_after_a_deadlock() {
    // A server of its own: a wait of another test would look like that of the call.
    let Some(environment) = own_environment(&[]).await else { return };
    let locks = environment.instance("a").await;
    let keys = || [LockKey::from(("a",)), LockKey::from(("b",))];
    locks.lock_all(keys()).await.expect("free").release().await.expect("held");
    let mut other = environment.session().await;
    environment.run(&mut other, "START TRANSACTION").await;
    // The server ends the transaction that has changed less.
    environment.run(&mut other, "INSERT INTO {p}_records VALUES ('x', '', '', '', 0), ('y', '', '', '', 0)").await;
    environment.run(&mut other, "SELECT 1 FROM {p}_locks WHERE lock_key = 'b' FOR UPDATE").await;
    let lock_all = || tokio::spawn(locks.lock_all(keys()).into_future());
    let mut call = lock_all();
    let waits = "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'";
    let mut is_waiting = async || {
        // Beside other load, a call may end before its wait is seen.
        if call.is_finished() {
            call = lock_all();
        }
        environment.value::<u64>(waits, 0).await > 0
    };
    until("the call waits for `b`", &mut is_waiting).await;
    environment.run(&mut other, "SELECT 1 FROM {p}_locks WHERE lock_key = 'a' FOR UPDATE").await;
    let status: String = environment.value("SHOW ENGINE INNODB STATUS", 2).await;
    assert!(status.contains("LATEST DETECTED DEADLOCK") && status.contains(&environment.prefix), "{status}");
    environment.run(&mut other, "ROLLBACK").await;
    let granted = soon("a grant", call).await.expect("no panic").expect("made again");
    granted.release().await.expect("held");
}

/// A row that another session has locked delays the other keys of its call, and fails none of them.
///
/// Guarantee: G6.
#[tokio::test]
async fn locked_row_fails_no_other_request_of_its_call() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let locked = LockKey::from(("locked",));
    let id = caller.id();
    caller.granted(&locked, &id, LONG).await;
    caller.release(&locked, &id, Duration::ZERO).await;
    let mut other = environment.session().await;
    environment.run(&mut other, "START TRANSACTION").await;
    environment.run(&mut other, "SELECT 1 FROM {p}_locks WHERE lock_key = 'locked' FOR UPDATE").await;
    let keys: Vec<_> = [locked].into_iter().chain((0..20).map(|n| LockKey::from(("other", n)))).collect();
    let requests = keys.iter().map(|key| request(key, &caller.id(), LONG, IfBusy::Fail)).collect();
    let replies = join_all(store.acquire(requests).into_iter()).await;
    let is_granted = |reply: &Result<_, _>| matches!(reply, Ok(AcquireReply::Granted { .. }));
    assert_eq!(replies[0].as_ref().map_err(StoreError::kind).err(), Some(StoreErrorKind::Timeout));
    assert!(replies[1..].iter().all(is_granted), "{replies:?}");
    environment.run(&mut other, "COMMIT").await;
}

/// A call that waits for a row longer than its caller grants nothing afterwards.
///
/// Guarantee: G5.
#[tokio::test]
async fn acquire_of_mysql_that_is_executed_late_does_nothing() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let (key, id) = (key(), caller.id());
    caller.granted(&key, &id, LONG).await;
    caller.release(&key, &id, Duration::ZERO).await;
    let mut other = environment.session().await;
    environment.run(&mut other, "START TRANSACTION").await;
    environment.run(&mut other, "SELECT 1 FROM {p}_locks FOR UPDATE").await;
    let mut late = request(&key, &caller.id(), LONG, IfBusy::Fail);
    late.valid_for = ms(300);
    let calls = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.acquire_one(late).await }
    });
    sleep(ms(500)).await;
    environment.run(&mut other, "COMMIT").await;
    let late = calls.await.expect("no panic").map_err(|error| error.kind());
    assert_eq!(late.map(drop), Err(StoreErrorKind::Timeout));
    assert_eq!(store.inspect(key).await.expect("a reply").holding, 0);
}

/// The reply of a procedure may be followed by the error of its commit.
#[tokio::test]
async fn error_after_the_reply_is_an_error() {
    let Some(environment) = environment().await else { return };
    let store: Arc<MysqlStore> = environment.store().await;
    environment.admin("DROP PROCEDURE {p}_delete_record").await;
    environment
        .admin(
            "CREATE PROCEDURE {p}_delete_record(k VARBINARY(1025)) SQL SECURITY INVOKER \
             BEGIN SELECT 'deleted'; SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no commit'; END",
        )
        .await;
    let error = store.delete_record(key()).await.expect_err("no commit");
    assert!(format!("{error:?}").contains("no commit"), "{error:?}");
}
