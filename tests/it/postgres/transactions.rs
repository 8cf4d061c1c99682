//! Transactions of an application that read the row of their lock.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::sleep;
use tokio_postgres::error::SqlState;
use tower_lock::{
    AcquisitionId, LockKey, LockManager,
    store::{
        AcquireReply, AcquireRequest, IfBusy, LockStore, ReleaseReply, ReleaseRequest, RenewReply, StoreError,
        StoreErrorKind,
    },
};
use tower_lock_testkit::wait::{ms, until};

use crate::support::{Caller, LONG, environment, request, terms};

/// When a waiter asks again for a key that a transaction keeps.
const PINNED_POLL: Duration = ms(100);

/// The writer was paused for longer than its lease, and is inside of its transaction: it is kept
/// from overlapping with the next holder, and not only detected.
///
/// Guarantee: G1.
#[tokio::test]
async fn open_transaction_keeps_the_key_after_its_lease() {
    let Some(environment) = environment().await else { return };
    let (a, b) = (environment.store().await, environment.store().await);
    let (a, b) = (Caller::new(&a, "a"), Caller::new(&b, "b"));
    let (key, second) = (LockKey::from(("paused",)), b.id());
    let fence = a.expired(&key).await;
    let writer = environment.writer(&key, fence).await;
    let busy = b.acquire(&key, &b.id(), LONG, IfBusy::Fail).await.expect("no error");
    assert_eq!(busy, AcquireReply::Busy { lease_left: Duration::ZERO, held_by: None });
    let queued =
        AcquireReply::Queued { ahead: 0, lease_left: Duration::ZERO, poll_in: Some(PINNED_POLL), held_by: None };
    assert_eq!(b.acquire(&key, &second, LONG, IfBusy::Enqueue).await.expect("no error"), queued);
    environment.run(&writer, "COMMIT").await;
    let next = b.granted(&key, &second, LONG).await;
    assert!(next > fence, "{next} after {fence}");
    assert_eq!(environment.check_fence(&writer, &key, fence).await, Err("TL001".to_owned()), "the fence is stale");
}

/// Also after a renewal, which has written the row anew.
#[tokio::test]
async fn inspect_names_the_transaction_that_keeps_a_key() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let (caller, locks) = (Caller::new(&store, "a"), LockManager::new(Arc::clone(&store)));
    let (key, id) = (LockKey::from(("open",)), caller.id());
    let fence = caller.granted(&key, &id, LONG).await;
    assert_eq!(locks.inspect(key.clone()).await.expect("it is up").kept_by, None);
    let writer = environment.writer(&key, fence).await;
    let pid: i32 = writer.query_one("SELECT pg_backend_pid()", &[]).await.expect("a row").get(0);
    assert_eq!(caller.renew(&key, &id).await, RenewReply::Extended);
    locks.force_release(key.clone()).await.expect("it is up");
    until("the lock-delay has passed", async || {
        let status = locks.inspect(key.clone()).await.expect("it is up").to_string();
        status.starts_with(&format!("free, kept by the transaction of backend {pid}, "))
    })
    .await;
    environment.run(&writer, "COMMIT").await;
    let keeper = async |key: &LockKey| locks.inspect(key.clone()).await.expect("it is up").kept_by;
    assert_eq!(keeper(&key).await, None);
    // The part of a transaction under a savepoint has an id of its own.
    let (second, third) = (caller.id(), LockKey::from(("third",)));
    let fence = caller.granted(&third, &second, LONG).await;
    environment.run(&writer, "BEGIN; SAVEPOINT part").await;
    assert_eq!(environment.check_fence(&writer, &third, fence).await, Ok(()));
    environment.run(&writer, "RELEASE part").await;
    assert_eq!(keeper(&third).await, None, "it has a holder");
    assert_eq!(caller.release(&third, &second, Duration::ZERO).await, ReleaseReply::Freed);
    assert_eq!(keeper(&third).await.as_deref(), Some("an open transaction"));
    environment.run(&writer, "COMMIT").await;
    assert_eq!(keeper(&third).await, None);
}

#[tokio::test]
async fn open_transaction_delays_no_renewal_and_no_release() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let (key, first, second) = (LockKey::from(("open",)), caller.id(), caller.id());
    let fence = caller.granted(&key, &first, LONG).await;
    let writer = environment.writer(&key, fence).await;
    assert_eq!(caller.renew(&key, &first).await, RenewReply::Extended);
    let queued = caller.acquire(&key, &second, LONG, IfBusy::Enqueue).await.expect("no error");
    assert!(matches!(queued, AcquireReply::Queued { poll_in, .. } if poll_in != Some(PINNED_POLL)), "{queued:?}");
    // An offer is a grant to another acquisition.
    assert_eq!(caller.release(&key, &first, Duration::ZERO).await, ReleaseReply::Freed);
    let pinned = caller.acquire(&key, &second, LONG, IfBusy::Enqueue).await.expect("no error");
    assert_eq!(
        pinned,
        AcquireReply::Queued { ahead: 0, lease_left: Duration::ZERO, poll_in: Some(PINNED_POLL), held_by: None }
    );
    environment.run(&writer, "ROLLBACK").await;
    assert!(caller.granted(&key, &second, LONG).await > fence);
}

/// Free keys are granted together. Those that a transaction keeps are not among them.
///
/// Guarantee: G1.
#[tokio::test]
async fn call_with_many_keys_passes_over_no_transaction() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let (kept, free) = (LockKey::from(("kept",)), LockKey::from(("free",)));
    let fence = caller.expired(&kept).await;
    let writer = environment.writer(&kept, fence).await;
    let acquire = |key: &LockKey| request(key, &caller.id(), LONG, IfBusy::Fail);
    let replies = join_all(store.acquire([&kept, &free].into_iter().map(acquire).collect()).into_iter()).await;
    assert_eq!(
        replies[0].as_ref().ok(),
        Some(&AcquireReply::Busy { lease_left: Duration::ZERO, held_by: None }),
        "{replies:?}"
    );
    assert!(matches!(replies[1], Ok(AcquireReply::Granted { .. })), "{replies:?}");
    environment.run(&writer, "COMMIT").await;
}

/// Free keys are granted together, and freed together. Those with a waiter are not among them.
#[tokio::test]
async fn call_with_many_keys_passes_over_no_waiter() {
    let Some(environment) = environment().await else { return };
    let (store, other) = (environment.store().await, environment.store().await);
    let (a, b) = (Caller::new(&store, "a"), Caller::new(&other, "b"));
    let (key, free) = (LockKey::from(("waited for",)), LockKey::from(("free",)));
    let waiter = b.id();
    // A row that is free, with a waiter: a transaction has kept it until now.
    let fence = a.expired(&key).await;
    let writer = environment.writer(&key, fence).await;
    let queued = b.acquire(&key, &waiter, LONG, IfBusy::Enqueue).await.expect("no error");
    assert!(matches!(queued, AcquireReply::Queued { .. }), "{queued:?}");
    environment.run(&writer, "COMMIT").await;
    let ids = [a.id(), a.id()];
    let keys = [&key, &free];
    let acquire = |(key, id): (&&LockKey, &AcquisitionId)| request(key, id, LONG, IfBusy::Enqueue);
    let replies = store.acquire(keys.iter().zip(&ids).map(acquire).collect());
    let replies = join_all(replies.into_iter()).await;
    assert!(matches!(replies[0], Ok(AcquireReply::Queued { ahead: 0, .. })), "{replies:?}");
    assert!(matches!(replies[1], Ok(AcquireReply::Granted { .. })), "{replies:?}");
    b.granted(&key, &waiter, LONG).await;
    let held = b.id();
    let own = LockKey::from(("without a waiter",));
    b.granted(&own, &held, LONG).await;
    let release =
        |(key, id): (&LockKey, &AcquisitionId)| ReleaseRequest::new(key.clone(), id.clone(), Duration::ZERO, terms());
    let replies = other.release([(&key, &waiter), (&own, &held)].into_iter().map(release).collect());
    let replies: Vec<_> = join_all(replies.into_iter()).await.into_iter().map(Result::ok).collect();
    assert_eq!(replies, [Some(ReleaseReply::HandedOff), Some(ReleaseReply::Freed)]);
    a.granted(&key, &ids[0], LONG).await;
}

/// `FOR UPDATE` is not what the guide says, and must not stop the other keys.
#[tokio::test]
async fn row_that_is_locked_for_update_fails_alone() {
    let Some(environment) = environment().await else { return };
    environment.migrate(&[]).await;
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let key = |n: usize| LockKey::from(("locked", n));
    let first = caller.id();
    caller.granted(&key(1), &first, LONG).await;
    let writer = environment.client().await;
    environment.run(&writer, "BEGIN; SELECT 1 FROM {schema}.locks WHERE key = 'locked:1' FOR UPDATE").await;
    let request = |n| request(&key(n), &caller.id(), LONG, IfBusy::Enqueue);
    let replies = join_all(store.acquire((0..3).map(request).collect()).into_iter()).await;
    assert_eq!(replies[1].as_ref().map_err(StoreError::kind), Err(StoreErrorKind::Timeout));
    for other in [0, 2] {
        assert!(matches!(replies[other], Ok(AcquireReply::Granted { .. })), "{:?}", replies[other]);
    }
}

/// A call without a reply is released. If its transaction is not committed yet, the release waits
/// for it: otherwise it would find nothing, and the grant would stay (I8).
#[tokio::test]
async fn release_waits_for_an_acquire_that_is_not_committed() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("late",)));
    let id = caller.id();
    let late = environment.uncommitted_acquire(&key, &id).await;
    let release = caller.release(&key, &id, Duration::ZERO);
    let (reply, ()) = tokio::join!(release, environment.commit_when_awaited(&late));
    assert_eq!(reply, ReleaseReply::Freed);
}

/// The lock of a row was held for so long that the caller has released its acquisition meanwhile.
#[tokio::test]
async fn acquire_that_expires_while_it_waits_does_nothing() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let keys = [LockKey::from(("waited", 1)), LockKey::from(("waited", 2))];
    for key in &keys {
        let id = caller.id();
        caller.granted(key, &id, LONG).await;
        caller.release(key, &id, Duration::ZERO).await;
    }
    // One key, and several in one call.
    for keys in [&keys[..1], &keys] {
        let other = environment.client().await;
        environment.run(&other, "BEGIN; SELECT 1 FROM {schema}.locks FOR UPDATE").await;
        let request =
            |key: &LockKey| AcquireRequest::new(key.clone(), caller.id(), LONG, IfBusy::Enqueue, terms(), ms(60));
        let replies = join_all(store.acquire(keys.iter().map(request).collect()).into_iter());
        let commit = async {
            sleep(ms(100)).await;
            environment.run(&other, "COMMIT").await;
        };
        let (replies, ()) = tokio::join!(replies, commit);
        for (key, reply) in keys.iter().zip(replies) {
            assert_eq!(reply.map_err(|error| error.kind()), Err(StoreErrorKind::Timeout));
            assert!(store.inspect(key.clone()).await.expect("a reply").holders.is_empty());
        }
    }
}

/// Another client of a pooler has set the level, for all clients after it. The call would not see
/// the record of a transaction that it has waited for.
///
/// Guarantee: G1.
#[tokio::test]
async fn session_with_another_isolation_level_is_refused() {
    let Some(environment) = environment().await else { return };
    environment.store().await;
    let client = environment.client().await;
    for level in ["repeatable read", "serializable"] {
        client.batch_execute(&format!("SET default_transaction_isolation = '{level}'")).await.expect("set");
        for call in [
            "acquire(9e15::bigint, 3000, 10000, 100, true, '{k}', '{a:1:1}', '{30000}', '{true}', '{NULL}')",
            "release(3000, '{k}', '{a:1:1}', '{0}', '{NULL}', NULL, NULL, 0)",
            "yield_key(9e15::bigint, 3000, 10000, 100, true, 'k', 'a:1:1', 1, 'a:1:2', 30000, NULL, NULL)",
            "force_release('k', 0, 3000)",
        ] {
            let statement = environment.named(&format!("SELECT * FROM {{schema}}.{call}"));
            let error = client.batch_execute(&statement).await.expect_err(call);
            assert_eq!(error.code().map(SqlState::code), Some("TL002"), "{call}: {error:?}");
        }
    }
}
