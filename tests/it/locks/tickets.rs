//! Keys that are left to a ticket, between sections of several processes.

use std::{error::Error, sync::Arc, time::Duration};

use tokio::{join, time::sleep};
use tower_lock::{
    LockError, LockKey, LockManager, MemoryStore, Owner, Ticket,
    lock::{ReleaseOutcome, TicketError},
    store::StoreErrorKind,
    test_util::{Fault, StoreOp},
};
use tower_lock_testkit::{
    locks::{key, store_and_locks},
    store::{InterceptedStore, WithoutTraits},
    wait::{settle, until},
};

const GAP: Duration = Duration::from_secs(60);

fn processes() -> [LockManager; 2] {
    let store = Arc::new(MemoryStore::new());
    [LockManager::new(Arc::clone(&store)), LockManager::new(store)]
}

async fn kept(locks: &LockManager) -> Ticket {
    locks.lock(key()).await.expect("free").into_ticket(GAP).await.expect("held")
}

async fn is_locked(locks: &LockManager) -> bool {
    match locks.try_lock(key()).await {
        Ok(guard) => {
            guard.release().await.expect("held");
            false
        }
        Err(LockError::Busy { .. }) => true,
        Err(error) => panic!("{error}"),
    }
}

#[track_caller]
#[expect(clippy::needless_pass_by_value, reason = "the result of a call")]
fn assert_not_held<T: std::fmt::Debug>(redeemed: Result<T, TicketError>) {
    assert!(matches!(redeemed, Err(TicketError::NotHeld)), "{redeemed:?}");
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn ticket_keeps_its_key_between_two_processes() {
    let [a, b] = processes();
    let first = a.lock(key()).await.expect("free");
    let before = first.fencing_token();
    assert!(!first.held_lock().is_redeemed(), "the key was free");
    let ticket = first.into_ticket(GAP).await.expect("held");
    assert_eq!((a.held_count(), ticket.key()), (0, &key()));
    assert!(is_locked(&a).await && is_locked(&b).await);
    let waiter = tokio::spawn(async move { a.lock(key()).wait(GAP).await });
    settle().await;
    let second = b.redeem(&ticket).await.expect("it holds the key");
    assert!(second.fencing_token() > before, "a later write of the first section is stale");
    assert!(second.hold_count() == 1 && second.held_lock().is_redeemed());
    assert_not_held(b.redeem(&ticket).await);
    assert_eq!(second.release().await.expect("held"), ReleaseOutcome::HandedOff);
    let third = waiter.await.expect("no panic").expect("the key is free");
    third.release().await.expect("held");
    assert_not_held(b.redeem(&ticket).await);
}

/// Guarantee: G24.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_two_redeemers_gets_the_key() {
    let [a, b] = processes();
    let ticket = kept(&a).await;
    for _ in 0..200 {
        let guard = match join!(a.redeem(&ticket), b.redeem(&ticket)) {
            (Ok(guard), Err(TicketError::NotHeld)) | (Err(TicketError::NotHeld), Ok(guard)) => guard,
            other => panic!("{other:?}"),
        };
        let again = guard.into_ticket(GAP).await.expect("held");
        assert_eq!(again.to_string(), ticket.to_string(), "the text stays the same");
    }
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn changed_ticket_holds_nothing() {
    let [locks, _] = processes();
    let ticket = kept(&locks).await.to_string();
    assert_eq!(ticket.parse::<Ticket>().expect("a ticket").to_string(), ticket);
    let other = LockKey::from(("other",));
    let changed = [
        ticket.replace("gap=60000", "gap=86400000"),
        ticket.replace("by=ticket", "by=Ann"),
        ticket.replace("start=1", "start=2"),
        ticket.replace("key=k", &format!("key={other}", other = other.as_str())),
        format!("{}{}", &ticket[..ticket.len() - 1], if ticket.ends_with('0') { '1' } else { '0' }),
    ];
    for text in changed {
        assert_ne!(text, ticket);
        assert_not_held(locks.redeem(&text.parse().expect("a ticket")).await);
    }
    let (_, start) = ticket.split_once("start=").expect("it has one");
    let (start, _) = start.split_once('&').expect("not the last part");
    let later = start.parse::<u64>().expect("a number") + (1 << 48);
    let unreadable = [
        "",
        "key=k",
        &ticket.replace("key=k", "key=k%7D"),
        &format!("{ticket}&x=1"),
        &"a".repeat(5_000),
        &ticket.replace("by=ticket", &format!("by={}", "a".repeat(65))),
        &ticket.replace("gap=60000", "gap=999"),
        &ticket.replace("gap=60000", "gap=86400001"),
        // The sequence of an id has 48 bits: with the rest alone, `total` would never be over.
        &ticket.replace(start, &later.to_string()),
    ];
    for text in unreadable {
        assert_ne!(text, ticket);
        assert!(text.parse::<Ticket>().is_err(), "{text}");
    }
    assert!(locks.redeem(&ticket.parse().expect("a ticket")).await.is_ok());
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn step_that_fails_in_order_goes_back_to_its_ticket() {
    let [a, b] = processes();
    let first = a.lock(key()).await.expect("free");
    first.held_lock().keep(GAP).expect("the store has tickets");
    first.release_after_failure().await.expect("held");
    assert!(!is_locked(&a).await, "a first step that fails keeps nothing");
    let ticket = kept(&a).await;
    for locks in [&a, &b, &a] {
        let step = locks.redeem(&ticket).await.expect("it holds the key");
        step.release_after_failure().await.expect("held");
        assert!(is_locked(&b).await);
    }
    let last = b.redeem(&ticket).await.expect("it holds the key");
    last.release().await.expect("held");
    assert!(!is_locked(&a).await, "the work is over");
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn dropped_step_ends_the_work_after_the_lock_delay() {
    let [a, b] = processes();
    let ticket = kept(&a).await;
    let step = a.redeem(&ticket).await.expect("it holds the key");
    step.held_lock().keep(GAP).expect("the store has tickets");
    drop(step);
    assert!(is_locked(&b).await, "a statement may be in flight");
    assert_not_held(b.redeem(&ticket).await);
    sleep(Duration::from_millis(1_010)).await;
    assert!(!is_locked(&b).await);
}

#[tokio::test(start_paused = true)]
async fn ticket_expires_after_its_gap() {
    let [a, b] = processes();
    let ticket = kept(&a).await;
    sleep(GAP - Duration::from_millis(10)).await;
    assert!(is_locked(&b).await);
    sleep(Duration::from_millis(20)).await;
    assert_not_held(b.redeem(&ticket).await);
    assert!(!is_locked(&b).await);
}

/// The call is not executed, its reply is lost, or it is executed after its error.
///
/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn redeem_without_a_reply_leaves_the_key_to_its_ticket() {
    let (store, locks) = store_and_locks();
    let ticket = kept(&locks).await;
    for fault in [Fault::Fail, Fault::LoseReply, Fault::Delay(Duration::from_millis(200)), Fault::Hang] {
        store.on(StoreOp::Acquire).fault(fault);
        let redeemed = locks.redeem(&ticket).await;
        assert!(matches!(redeemed, Err(TicketError::Lock(LockError::Store(_)))), "{fault:?}: {redeemed:?}");
        store.on(StoreOp::Acquire).fault(Fault::None);
        // The release is repeated when the call cannot be executed any more.
        sleep(Duration::from_secs(1)).await;
        let step = locks.redeem(&ticket).await.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        step.into_ticket(GAP).await.expect("held");
        until("nothing is left", async || locks.size() == (0, 0)).await;
    }
    let point = store.on(StoreOp::Acquire);
    point.pause_after();
    let call = tokio::spawn({
        let (locks, ticket) = (locks.clone(), ticket.clone());
        async move { locks.redeem(&ticket).await }
    });
    settle().await;
    call.abort();
    assert!(call.await.expect_err("aborted").is_cancelled());
    point.resume();
    until("the ticket holds the key", async || locks.redeem(&ticket).await.is_ok()).await;
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn release_without_a_reply_is_repeated_with_its_ticket() {
    let (store, locks) = store_and_locks();
    for fault in [Fault::Fail, Fault::LoseReply] {
        let guard = locks.lock(key()).await.expect("free");
        let ticket = guard.held_lock().keep(GAP).expect("the store has tickets");
        store.on(StoreOp::Release).fault(fault);
        let release = guard.release();
        settle().await;
        store.on(StoreOp::Release).fault(Fault::None);
        let _ = release.await;
        until("the ticket holds the key", async || {
            let status = locks.inspect(key()).await.expect("it is up");
            status.holder().is_some_and(|holder| holder.id.instance() == "ticket")
        })
        .await;
        locks.redeem(&ticket).await.expect("it holds the key").release().await.expect("held");
    }
}

#[tokio::test(start_paused = true)]
async fn owner_of_a_redeemed_lock_reenters_it() {
    let [locks, other] = processes();
    let (ticket, owner) = (kept(&locks).await, Owner::new());
    let outer = owner.scope(locks.redeem(&ticket)).await.expect("it holds the key");
    let inner = locks.lock(key()).owner(&owner).await.expect("it is the owner");
    assert_eq!((inner.fencing_token(), inner.hold_count()), (outer.fencing_token(), 2));
    assert!(is_locked(&locks).await, "for all others");
    // The last guard decides.
    outer.held_lock().keep(GAP).expect("the store has tickets");
    assert_eq!(outer.release().await.expect("held"), ReleaseOutcome::StillHeld);
    inner.release().await.expect("held");
    assert!(other.redeem(&ticket).await.is_ok());
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn redeemed_lock_is_renewed_and_can_be_revoked() {
    let [a, b] = processes();
    let ticket = kept(&a).await;
    let step = a.redeem(&ticket).await.expect("it holds the key");
    sleep(Duration::from_secs(300)).await;
    assert!(step.held_lock().remaining() > Duration::ZERO && is_locked(&b).await);
    b.force_release(key()).await.expect("it is up");
    let lost = step.held_lock().lost().await;
    assert_eq!(lost, tower_lock::LockLost::Revoked);
    assert_eq!(step.into_ticket(GAP).await.expect_err("it is lost").to_string(), TicketError::NotHeld.to_string());
}

#[tokio::test(start_paused = true)]
async fn listing_shows_a_ticket_and_not_its_secret() {
    let [locks, _] = processes();
    let ticket = kept(&locks).await;
    let text = ticket.to_string();
    let (_, secret) = text.rsplit_once("secret=").expect("its last part");
    let status = locks.inspect(key()).await.expect("it is up");
    let holder = status.holder().expect("the ticket");
    assert_eq!((holder.id.instance(), holder.connected), ("ticket", None));
    let request = tower_lock::store::ListRequest::new(10);
    let listed = locks.list(request).await.expect("it is up");
    assert_eq!(listed.entries[0].status.holders[0].connected, None);
    for shown in [format!("{status} {status:?}"), format!("{listed:?}"), format!("{ticket:?}")] {
        assert!(!shown.contains(secret), "{shown}");
    }
}

#[tokio::test(start_paused = true)]
async fn tickets_are_refused_by_name() {
    let small = LockManager::new(InterceptedStore::new(Arc::new(MemoryStore::new()), WithoutTraits));
    let [locks, _] = processes();
    let raw = LockKey::raw("redisson").expect("a name");
    for (locks, key, why) in [(&small, key(), "it has no tickets"), (&locks, raw, "a raw key has no tickets")] {
        let guard = locks.lock(key).await.expect("free");
        let error = guard.held_lock().keep(GAP).expect_err("refused");
        let source = error.source().map(ToString::to_string).unwrap_or_default();
        assert!(error.kind() == StoreErrorKind::Unsupported && source.contains(why), "{error}: {source}");
        let error = guard.into_ticket(GAP).await.expect_err("refused");
        assert!(matches!(error, TicketError::Lock(LockError::Store(_))), "{error:?}");
    }
    let ticket = kept(&locks).await;
    assert!(matches!(small.redeem(&ticket).await, Err(TicketError::Lock(LockError::Store(_)))));
    locks.shutdown(Duration::ZERO).await;
    assert!(matches!(locks.redeem(&ticket).await, Err(TicketError::Lock(LockError::ShuttingDown))));
}

#[tokio::test]
#[should_panic(expected = "a ticket cannot hold its key for 999ms")]
async fn gap_out_of_bounds_panics() {
    let [locks, _] = processes();
    let guard = locks.lock(key()).await.expect("free");
    let _ = guard.held_lock().keep(Duration::from_millis(999));
}
