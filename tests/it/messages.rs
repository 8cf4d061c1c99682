//! Messages of the store are hints. Anybody who can send them can forge them: they free nothing, end nothing, and cost little.

use std::{future::IntoFuture, time::Duration};

use tokio::time::{Instant, advance, sleep};
use tower_lock::{
    LockKey, LockLost, Locks, OwnerId,
    store::StoreEvent,
    test_util::{Fault, TestStore, Verb},
};

use crate::support::{settle, soon, store_and_locks};

fn key() -> LockKey {
    LockKey::from(("k",))
}

async fn holder(locks: &Locks) -> OwnerId {
    locks.inspect(key()).await.expect("up").holder.expect("somebody")
}

fn offered(owner: &OwnerId) -> StoreEvent {
    StoreEvent::Offered { key: key(), owner: owner.clone() }
}

fn revoked(owner: &OwnerId) -> StoreEvent {
    StoreEvent::TakenAway { key: key(), owner: owner.clone() }
}

#[tokio::test(start_paused = true)]
async fn a_forged_offer_frees_nothing_that_another_process_holds() {
    let store = TestStore::new();
    let (one, other) = (Locks::new(store.clone()), Locks::new(store.clone()));
    let guard = one.lock(key()).await.expect("free");
    let owner = holder(&other).await;
    // Both processes have given out this number.
    other.lock(("another",)).await.expect("free").release().await.expect("up");
    let released = store.on(Verb::Release).calls();
    store.forge(&offered(&owner));
    // Of a number that its process has not reached yet.
    store.forge(&offered(&OwnerId::from_text(&format!("{}:77", owner.process()))));
    settle().await;
    assert_eq!(store.on(Verb::Release).calls(), released, "nobody gives back what is not known to be theirs");
    assert!(other.try_lock(key()).await.is_err(), "it is held");
    assert_eq!(holder(&other).await, owner);
    guard.release().await.expect("ours to the end");
}

#[tokio::test(start_paused = true)]
async fn a_forged_revocation_is_asked_about_and_ends_nothing() {
    let (store, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    let owner = holder(&locks).await;
    for _ in 0..1_000 {
        store.forge(&revoked(&owner));
        store.forge(&revoked(&OwnerId::from_text("somebody:0000000000000000:0")));
    }
    sleep(Duration::from_millis(99)).await;
    assert_eq!(store.on(Verb::Renew).calls(), 1, "one question for all of them");
    for _ in 0..1_000 {
        store.forge(&revoked(&owner));
        advance(Duration::from_millis(1)).await;
        settle().await;
    }
    let renewals = store.on(Verb::Renew).calls();
    assert!((8..=11).contains(&renewals), "one in a tenth of a second: {renewals}");
    assert!(!guard.view().remaining().is_zero());
    guard.release().await.expect("ours to the end");
}

#[tokio::test(start_paused = true)]
async fn a_revocation_that_the_store_confirms_ends_its_section_at_once_whatever_else_is_told() {
    let (store, locks) = store_and_locks();
    let operator = Locks::new(store.clone());
    let guard = locks.lock(key()).await.expect("free");
    let owner = holder(&locks).await;
    let lost = tokio::spawn({
        let view = guard.view();
        async move { (view.lost().await, Instant::now()) }
    });
    // The answer to a forged one is on its way while the key is taken away.
    store.on(Verb::Renew).hold_answer();
    store.forge(&revoked(&owner));
    store.on(Verb::Renew).somebody().await;
    let forced = Instant::now();
    operator.force_release(key()).await.expect("up");
    store.on(Verb::Renew).open();
    let (why, at) = soon("lost", lost).await.expect("no panic");
    assert_eq!(why, LockLost::TakenAway);
    assert!(at - forced <= Duration::from_millis(100), "{:?}", at - forced);
}

#[tokio::test(start_paused = true)]
async fn a_revocation_that_the_store_does_not_answer_leaves_the_section_its_deadline() {
    let (store, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    let (asked, owner) = (Instant::now(), holder(&locks).await);
    store.all(Fault::Stall);
    store.forge(&revoked(&owner));
    assert_eq!(soon("lost", guard.view().lost()).await, LockLost::Unrenewed);
    assert!(asked.elapsed() >= Duration::from_millis(29_698), "{:?}", asked.elapsed());
}

#[tokio::test(start_paused = true)]
async fn gaps_in_the_messages_are_told_to_those_who_wait_once_in_a_tenth_of_a_second() {
    let (store, locks) = store_and_locks();
    let other = Locks::new(store.clone());
    let guard = other.lock(key()).await.expect("free");
    let waits = tokio::spawn(locks.lock(key()).into_future());
    settle().await;
    let before = store.on(Verb::Acquire).calls();
    for _ in 0..1_000 {
        store.forge(&StoreEvent::Gap);
        settle().await;
    }
    assert_eq!(store.on(Verb::Acquire).calls() - before, 1);
    sleep(Duration::from_millis(101)).await;
    assert_eq!(store.on(Verb::Acquire).calls() - before, 2, "and once for those that came since");
    sleep(Duration::from_millis(200)).await;
    assert_eq!(store.on(Verb::Acquire).calls() - before, 2);
    guard.release().await.expect("ours");
    soon("its turn", waits).await.expect("no panic").expect("its turn").release().await.expect("ours");
}
