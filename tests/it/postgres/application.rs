//! The functions that a transaction of the application calls: the check of the fence, and the
//! answer of a handler.

use std::time::Duration;

use crate::support::{Caller, LONG, environment};
use tower_lock::{
    LockKey, LockManager,
    store::{AcquireReply, Record, ReleaseReply},
};
use tower_lock_testkit::{limits, locks::lost_record_is_reported};

const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];
const SERIALIZATION_FAILURE: &str = "40001";
const LOST: &str = "TL001";
const TOO_LONG: &str = "22001";
const NO_RIGHT: &str = "42501";

fn key() -> LockKey {
    LockKey::from(("account", 7))
}

fn record() -> Record {
    Record::new("head", Some("the first answer".into()))
}

/// The transaction has a snapshot from before a change of the row.
///
/// Guarantee: G1.
#[tokio::test]
async fn stale_fence_passes_at_no_isolation_level() {
    let Some(environment) = environment().await else { return };
    let caller = Caller::new(&environment.store().await, "a");
    for level in LEVELS {
        let (key, id) = (LockKey::from(("level", level)), caller.id());
        let fence = caller.granted(&key, &id, LONG).await;
        let begin = async || {
            let client = environment.application().await;
            environment.run(&client, &format!("BEGIN ISOLATION LEVEL {level}; SELECT 1")).await;
            client
        };
        let current = begin().await;
        assert_eq!(environment.check_fence(&current, &key, fence).await, Ok(()), "{level}");
        assert_eq!(environment.check_fence(&current, &key, fence + 1).await, Err(LOST.to_owned()), "{level}");

        let renewed = begin().await;
        caller.renew(&key, &id).await;
        assert_eq!(environment.check_fence(&renewed, &key, fence).await, Ok(()), "{level}: a renewal is no grant");
        renewed.batch_execute("ROLLBACK").await.expect("it ends");
        current.batch_execute("ROLLBACK").await.expect("it ends");

        let granted = begin().await;
        caller.release(&key, &id, Duration::ZERO).await;
        let released = begin().await;
        let lost = environment.check_fence(&released, &key, fence).await;
        assert_eq!(lost, Err(LOST.to_owned()), "{level}: released");
        let second = caller.id();
        let next = caller.granted(&key, &second, LONG).await;
        let expected = if level == LEVELS[0] { LOST } else { SERIALIZATION_FAILURE };
        let lost = environment.check_fence_as(&granted, &key, fence, &id.to_string()).await;
        assert_eq!(lost, Err(expected.to_owned()), "{level}: granted to another");
        let later = begin().await;
        assert_eq!(environment.check_fence(&later, &key, fence).await, Err(LOST.to_owned()), "{level}");

        let yielded = begin().await;
        let extended = caller.extended(&key, &second, next).await;
        let lost = environment.check_fence(&yielded, &key, next).await;
        assert_eq!(lost, Err(expected.to_owned()), "{level}: a new fence of the same holder");
        let holder = begin().await;
        assert_eq!(environment.check_fence(&holder, &key, extended).await, Ok(()), "{level}");
    }
}

/// A grant that is not committed yet is waited for.
///
/// Guarantee: G1.
#[tokio::test]
async fn check_waits_for_a_grant_and_then_fails() {
    let Some(environment) = environment().await else { return };
    let caller = Caller::new(&environment.store().await, "a");
    let key = key();
    let fence = caller.expired(&key).await;
    let grant = environment.uncommitted_acquire(&key, &caller.id()).await;
    let writer = environment.application().await;
    let check = environment.check_fence(&writer, &key, fence);
    let (checked, ()) = tokio::join!(check, environment.commit_when_awaited(&grant));
    assert_eq!(checked, Err(LOST.to_owned()));
}

/// Guarantee: G1.
#[tokio::test]
async fn user_of_the_application_can_neither_free_nor_extend_a_lock() {
    let Some(environment) = environment().await else { return };
    let caller = Caller::new(&environment.store().await, "a");
    let (key, id) = (key(), caller.id());
    caller.granted(&key, &id, LONG).await;
    let client = environment.application().await;
    for statement in [
        "SELECT * FROM {schema}.locks",
        "SELECT 1 FROM {schema}.locks FOR KEY SHARE",
        "UPDATE {schema}.locks SET holder = NULL",
        "UPDATE {schema}.locks SET until = 'infinity'",
        "DELETE FROM {schema}.locks",
        "TRUNCATE {schema}.locks",
        "INSERT INTO {schema}.locks VALUES ('k', 'x', 1, now(), now(), NULL)",
        "INSERT INTO {schema}.records VALUES ('k', 'x', '', '', 'infinity')",
        "DELETE FROM {schema}.waiters",
        "UPDATE {schema}.floor SET fence = 0",
        "SELECT {schema}.release(3000, '{{key}}', '{{id}}', '{0}', '{NULL}', NULL, NULL, 0)",
        "SELECT {schema}.renew('{{key}}', '{{id}}', '{600000}')",
        "SELECT {schema}.force_release('{key}', 0, 3000)",
        "SELECT {schema}.grant_key('{key}', '{id}', now(), 600000)",
        "SELECT {schema}.end_hold('{key}', now(), 3000)",
        "SELECT {schema}.delete_record('{key}')",
        "SELECT {schema}.sweep('', 1000)",
        "SELECT {schema}.pin('{key}', 1, '{id}')",
        "CREATE TABLE {schema}.x ()",
        "CREATE FUNCTION {schema}.us(text) RETURNS int LANGUAGE sql AS 'SELECT 1'",
    ] {
        let statement = environment.named(statement).replace("{key}", key.as_str()).replace("{id}", &id.to_string());
        let error = client.batch_execute(&statement).await.expect_err(&statement);
        assert_eq!(error.code().map(tokio_postgres::error::SqlState::code), Some(NO_RIGHT), "{statement}: {error:?}");
    }
    assert_eq!(caller.release(&key, &id, Duration::ZERO).await, ReleaseReply::Freed, "it is still held");
}

/// The fence is a clock: the user of the application can find that of a lock that it was not given.
///
/// Guarantee: G1.
#[tokio::test]
async fn fence_without_the_id_of_its_holder_is_refused() {
    let Some(environment) = environment().await else { return };
    let caller = Caller::new(&environment.store().await, "a");
    let (key, id, own) = (key(), caller.id(), LockKey::from(("own",)));
    let fence = caller.granted(&key, &id, LONG).await;
    let other = caller.id();
    let own_fence = caller.granted(&own, &other, LONG).await;
    let client = environment.application().await;
    for guess in ["", "a", id.manager(), &other.to_string()] {
        let checked = environment.check_fence_as(&client, &key, fence, guess).await;
        assert_eq!(checked, Err(LOST.to_owned()), "{guess}");
    }
    assert_eq!(environment.check_fence_as(&client, &own, own_fence, &other.to_string()).await, Ok(()));
}

/// The user of a dashboard, for example.
///
/// Guarantee: G1.
#[tokio::test]
async fn user_who_reads_the_tables_can_leave_no_answer() {
    let Some(environment) = environment().await else { return };
    let caller = Caller::new(&environment.store().await, "a");
    let (key, id) = (key(), caller.id());
    let fence = caller.granted(&key, &id, LONG).await;
    let client = environment.client().await;
    let reader = "CREATE ROLE reader_{user}; GRANT USAGE ON SCHEMA {schema} TO reader_{user};
        GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO reader_{user}; SET SESSION AUTHORIZATION reader_{user}";
    environment.run(&client, reader).await;
    let left = environment.leave_answer(&client, &key, fence, &record()).await;
    assert_eq!(left, Err(NO_RIGHT.to_owned()));
    assert_eq!(environment.check_fence(&client, &key, fence).await, Err(NO_RIGHT.to_owned()));
}

/// A handler commits its work with its answer, and its process ends at once.
///
/// Guarantee: G18.
#[tokio::test]
async fn answer_of_a_transaction_is_the_record_of_its_key() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let (a, b) = (Caller::new(&store, "a"), Caller::new(&store, "b"));
    let writer = environment.application().await;
    for end in ["ROLLBACK", "COMMIT"] {
        let key = LockKey::from(("payment", end));
        let fence = a.expired(&key).await;
        environment.run(&writer, "BEGIN").await;
        assert_eq!(environment.leave_answer(&writer, &key, fence, &record()).await, Ok(()));
        environment.run(&writer, end).await;
        let reply = b.acquire_unless_recorded(&key, &b.id()).await;
        match end {
            "COMMIT" => assert_eq!(reply, AcquireReply::Recorded(record())),
            _ => assert!(matches!(reply, AcquireReply::Granted { .. }), "{reply:?}"),
        }
    }
    let key = LockKey::from(("payment", "late"));
    let fence = a.expired(&key).await;
    let next = b.granted(&key, &b.id(), LONG).await;
    let late = environment.leave_answer(&writer, &key, fence, &record()).await;
    assert_eq!(late, Err(LOST.to_owned()), "another holder may have answered");
    let long = Record::new("head", Some(vec![b'x'; 2 << 20].into()));
    let refused = environment.leave_answer(&writer, &key, next, &long).await;
    assert_eq!(refused, Err(TOO_LONG.to_owned()), "no call could read it");
}

/// The record of a release does not replace it: a layer may keep less of an answer.
///
/// Guarantee: G18.
#[tokio::test]
async fn answer_of_a_transaction_stays_after_the_release() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let (a, b) = (Caller::new(&store, "a"), Caller::new(&store, "b"));
    let (key, id) = (key(), a.id());
    let fence = a.granted(&key, &id, LONG).await;
    let writer = environment.application().await;
    assert_eq!(environment.leave_answer(&writer, &key, fence, &record()).await, Ok(()));
    assert_eq!(a.release_with(&key, &id, Record::new("tombstone", None)).await, ReleaseReply::Freed);
    assert_eq!(b.acquire_unless_recorded(&key, &b.id()).await, AcquireReply::Recorded(record()));
    assert_eq!(a.release_with(&key, &id, Record::new("again", None)).await, ReleaseReply::RecordedBefore);
}

/// The lease has expired, and the transaction commits while a retry looks at the key: the retry
/// gets the answer, and does not run again.
///
/// Guarantee: G18.
#[tokio::test]
async fn retry_during_the_commit_gets_the_answer() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let (a, b) = (Caller::new(&store, "a"), Caller::new(&store, "b"));
    // The last moment at which the transaction can end: a retry is about to lock the row.
    let stopped = "DO $$ BEGIN EXECUTE replace(pg_get_functiondef('{schema}.is_pinned'::regproc),
        'BEGIN', $b$BEGIN PERFORM pg_advisory_xact_lock(hashtext('{schema}'));$b$); END $$;
        SELECT pg_advisory_lock(hashtext('{schema}'))";
    let stop = environment.client().await;
    environment.run(&stop, stopped).await;
    let key = key();
    let fence = a.expired(&key).await;
    let writer = environment.application().await;
    environment.run(&writer, "BEGIN").await;
    assert_eq!(environment.leave_answer(&writer, &key, fence, &record()).await, Ok(()));
    let retry = b.id();
    let commit = async {
        environment.sessions_wait(1).await;
        environment.run(&writer, "COMMIT").await;
        environment.run(&stop, "SELECT pg_advisory_unlock_all()").await;
    };
    let (reply, ()) = tokio::join!(b.acquire_unless_recorded(&key, &retry), commit);
    assert_eq!(reply, AcquireReply::Recorded(record()));
}

/// A release leaves its record while a call waits for the row of its key.
///
/// Guarantee: G18.
#[tokio::test]
async fn retry_during_the_release_gets_the_record() {
    let Some(environment) = environment().await else { return };
    let caller = Caller::new(&environment.store().await, "a");
    let (key, id) = (LockKey::from(("paid",)), caller.id());
    caller.granted(&key, &id, LONG).await;
    let other = environment.client().await;
    let release = format!(
        "BEGIN; SELECT {{schema}}.release(3000, '{{{}}}', '{{{id}}}', '{{0}}', '{{NULL}}', 'paid', NULL, 60000)",
        key.as_str(),
    );
    environment.run(&other, &release).await;
    let retry = caller.id();
    let acquire = caller.acquire_unless_recorded(&key, &retry);
    let (reply, ()) = tokio::join!(acquire, environment.commit_when_awaited(&other));
    assert_eq!(reply, AcquireReply::Recorded(Record::new("paid", None)));
}

/// Guarantee: G18.
#[tokio::test]
async fn record_that_postgres_does_not_confirm_is_reported() {
    let Some(environment) = environment().await else { return };
    let store = environment.connect(environment.builder().call_timeout(limits::SHORT), &environment.url()).await;
    let client = environment.client().await;
    let stop = async || environment.run(&client, "BEGIN; LOCK TABLE {schema}.locks").await;
    let go_on = async || environment.run(&client, "ROLLBACK").await;
    lost_record_is_reported(LockManager::builder(store), stop, go_on).await;
}
