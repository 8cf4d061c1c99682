//! Several keys at once: all of them, or none.

use std::{
    collections::HashMap,
    future::IntoFuture,
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use fastrand::Rng;
use futures_util::poll;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_lock::{
    Lease, LockError, LockKey, LockLost, LockManager, MemoryStore, Owner,
    key::KeyCountError,
    lock::{LockAllError, LockGuards, ReleaseOutcome},
    store::{AcquireReply, AcquireRequest, LockStore, StoreError, StoreErrorKind, StoreFuture},
    test_util::{Chaos, Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    locks::store_and_locks,
    store::{Intercept, InterceptedStore, StoreExt},
    wait::{settle, soon},
};

const S: Duration = Duration::from_secs(1);

fn account(number: u64) -> LockKey {
    ("account", number).into()
}

fn keys(guards: &LockGuards) -> Vec<String> {
    guards.held_locks().iter().map(|lock| lock.key().as_str().to_owned()).collect()
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn keys_in_any_order_and_twice_are_locked_once_each() {
    let (store, locks) = store_and_locks();
    let guards = locks.lock_all([account(7), account(5), account(7), account(6)]).await.expect("free");
    assert_eq!(keys(&guards), ["account:5", "account:6", "account:7"]);
    assert_eq!((store.held_count(), store.on(StoreOp::Acquire).calls()), (3, 3));
    for number in 5..8 {
        assert!(matches!(locks.try_lock(account(number)).await, Err(LockError::Busy { .. })), "{number}");
        assert!(guards.get(account(number)).is_some_and(|lock| !lock.remaining().is_zero()));
    }
    assert!(guards.get(account(8)).is_none());
    assert_eq!(guards.release().await.expect("up"), ReleaseOutcome::Released);
    settle().await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

#[tokio::test]
async fn no_key_and_too_many_keys_are_typed_errors() {
    let locks = LockManager::in_memory();
    let none: [LockKey; 0] = [];
    let error = locks.lock_all(none).await.expect_err("no key");
    assert!(matches!(error, LockAllError::Keys(KeyCountError::Empty)), "{error:?}");
    let error = locks.try_lock_all((0..65).map(account)).await.expect_err("65 keys");
    assert!(matches!(error, LockAllError::Keys(KeyCountError::TooMany { max: 64 })), "{error:?}");
    locks.try_lock_all((0..64).map(account)).await.expect("64 keys").release().await.expect("up");
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn a_busy_key_rejects_a_call_without_a_wait_and_leaves_nothing() {
    let (store, locks) = store_and_locks();
    for busy in [1, 2, 3] {
        let held = locks.try_lock(account(busy)).await.expect("free");
        let error = locks.try_lock_all((1..4).map(account)).await.expect_err("one is busy");
        let LockAllError::NotAcquired { key, source: LockError::Busy { .. } } = error else { panic!("{error:?}") };
        assert_eq!(key, account(busy));
        settle().await;
        assert_eq!(store.held_count(), 1, "only the busy one");
        held.release().await.expect("up");
        // No lock-delay: nothing ran under the keys.
        locks.try_lock_all((1..4).map(account)).await.expect("free").release().await.expect("up");
    }
    settle().await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

/// Greater keys are not held while a smaller one is waited for, and smaller ones are kept.
/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn a_waiting_call_keeps_only_the_keys_before_the_busy_one() {
    let (store, locks) = store_and_locks();
    let other = LockManager::new(store.clone());
    for (manager, busy) in [(&locks, 1), (&locks, 2), (&other, 1), (&other, 2)] {
        let held = manager.try_lock(account(busy)).await.expect("free");
        let call = tokio::spawn(locks.lock_all((1..5).map(account)).into_future());
        sleep(S / 10).await;
        for kept in 1..busy {
            assert!(matches!(other.try_lock(account(kept)).await, Err(LockError::Busy { .. })), "{kept} is kept");
        }
        for free in busy + 1..5 {
            other.try_lock(account(free)).await.expect("it is not held meanwhile").release().await.expect("up");
        }
        held.release().await.expect("up");
        let guards = soon("the rest", call).await.expect("no panic").expect("granted");
        assert_eq!(keys(&guards).len(), 4);
        guards.release().await.expect("up");
    }
    settle().await;
    assert_eq!((store.held_count(), locks.size(), other.size()), (0, (0, 0), (0, 0)));
}

/// Single locks in opposite orders wait for each other until their timeout.
/// Guarantee: G6, G21.
#[tokio::test(start_paused = true)]
async fn opposite_orders_do_not_deadlock() {
    let (_, locks) = store_and_locks();
    let pairs = [[1, 2], [2, 1]];
    let singles = pairs.map(|[first, second]| {
        let locks = locks.clone();
        tokio::spawn(async move {
            let _first = locks.lock(account(first)).await?;
            sleep(S).await;
            locks.lock(account(second)).wait(5 * S).await.map(drop)
        })
    });
    let mut timed_out = 0;
    for single in singles {
        timed_out += u32::from(matches!(single.await.expect("no panic"), Err(LockError::TimedOut { .. })));
    }
    assert!(timed_out > 0, "single locks wait for each other");
    sleep(2 * S).await;
    for pair in pairs.repeat(20) {
        let call = |pair: [u64; 2]| locks.lock_all(pair.map(account)).wait(5 * S).into_future();
        let (one, other) = (tokio::spawn(call(pair)), tokio::spawn(call([pair[1], pair[0]])));
        for call in [one, other] {
            call.await.expect("no panic").expect("in time").release().await.expect("up");
        }
    }
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_dropped_or_timed_out_leaves_nothing() {
    let (store, locks) = store_and_locks();
    let busy = locks.try_lock(account(2)).await.expect("free");
    let began = Instant::now();
    let error = locks.lock_all([1, 2, 3].map(account)).wait(3 * S).await.expect_err("busy");
    let LockAllError::NotAcquired { key, source: LockError::TimedOut { waited, .. } } = error else {
        panic!("{error:?}")
    };
    assert_eq!((key, waited), (account(2), 3 * S));
    assert!(began.elapsed() >= 3 * S && began.elapsed() < 4 * S, "{:?}", began.elapsed());
    for wait in [0, 1, 500] {
        let call = locks.lock_all([1, 2, 3].map(account)).into_future();
        assert!(timeout(Duration::from_millis(wait), call).await.is_err());
        settle().await;
        sleep(S / 100).await;
        assert_eq!(store.held_count(), 1, "after {wait} ms");
        // No lock-delay: nothing ran under the keys.
        locks.try_lock_all([1, 3].map(account)).await.expect("free").release().await.expect("up");
    }
    // The keys of a call that is dropped before it was polled.
    drop(locks.lock_all([1, 3].map(account)).into_future());
    busy.release().await.expect("up");
    settle().await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

/// One key is granted, and another one has no reply yet.
/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_dropped_in_a_step_leaves_nothing() {
    let (store, locks) = store_and_locks();
    store.on(StoreOp::Acquire).latency(S / 100);
    let owner = Owner::new();
    let outer = locks.lock(account(1)).owner(&owner).await.expect("free");
    {
        let mut call = pin!(locks.lock_all([1, 2].map(account)).owner(&owner).into_future());
        assert!(poll!(&mut call).is_pending());
    }
    assert_eq!(outer.release().await.expect("up"), ReleaseOutcome::Released);
    let began = Instant::now();
    locks.try_lock_all([1, 2].map(account)).await.expect("free").release().await.expect("up");
    assert!(began.elapsed() < S / 2, "{:?}", began.elapsed());
}

/// Limits of zero are lost at once, and not acquired again and again.
/// Guarantee: G6.
#[tokio::test]
async fn keys_without_time_are_granted_and_lost() {
    let locks = LockManager::in_memory();
    for wait in [Duration::ZERO, S / 10] {
        let call = locks.lock_all([1, 2].map(account)).wait(wait).max_hold(Duration::ZERO).lock_delay(Duration::ZERO);
        let guards = soon("an end", call.into_future()).await.expect("free");
        guards.held_locks().lost().await;
        drop(guards.release());
    }
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn the_loss_of_one_key_is_the_loss_of_all() {
    let (store, locks) = store_and_locks();
    let guards = locks.lock_all([1, 2].map(account)).await.expect("free");
    let views = guards.held_locks();
    let work = guards.while_held(std::future::pending::<()>());
    locks.force_release(account(2)).await.expect("up");
    assert_eq!(soon("the loss", work).await, Err(LockLost::Revoked));
    assert_eq!((views.remaining(), views.lost().await), (Duration::ZERO, LockLost::Revoked));
    assert!(views.ensure_remaining(Duration::ZERO).is_err());
    assert_eq!(guards.while_held(async {}).await, Err(LockLost::Revoked), "it is not started");
    assert_eq!(guards.release().await.expect("up"), ReleaseOutcome::NotHeld);
    sleep(2 * S).await;
    settle().await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

/// A smaller key that is lost while a greater one is waited for: the call starts over.
/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn a_loss_during_the_wait_starts_over() {
    let (store, locks) = store_and_locks();
    let busy = locks.try_lock(account(2)).await.expect("free");
    let call = tokio::spawn(locks.lock_all([1, 2].map(account)).wait(60 * S).into_future());
    sleep(S).await;
    locks.force_release(account(1)).await.expect("up");
    // The revocation is noticed by its message, and the key is blocked for the lock-delay.
    sleep(3 * S).await;
    assert!(matches!(locks.try_lock(account(1)).await, Err(LockError::Busy { .. })), "acquired again");
    busy.release().await.expect("up");
    let guards = soon("all keys", call).await.expect("no panic").expect("granted");
    assert!(guards.held_locks().iter().all(|lock| !lock.remaining().is_zero()));
    guards.release().await.expect("up");
    settle().await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

/// The caller is not polled between the loss of a key and the grant of the last one.
/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn a_loss_before_the_last_grant_is_noticed_starts_over() {
    let (_, locks) = store_and_locks();
    let busy = locks.try_lock(account(2)).await.expect("free");
    let mut call = pin!(locks.lock_all([1, 2].map(account)).into_future());
    for _ in 0..3 {
        assert!(poll!(&mut call).is_pending());
        settle().await;
    }
    locks.force_release(account(1)).await.expect("up");
    busy.release().await.expect("up");
    sleep(S / 10).await;
    let guards = soon("all keys", call).await.expect("granted");
    assert!(guards.held_locks().iter().all(|lock| !lock.remaining().is_zero()), "{guards:?}");
    guards.release().await.expect("up");
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn limits_count_from_the_last_grant() {
    let (store, locks) = store_and_locks();
    for (lease, max_hold) in
        [(Lease::Fixed(5 * S), None), (Lease::AutoRenew, Some(5 * S)), (Lease::Fixed(9 * S), Some(5 * S))]
    {
        let busy = locks.try_lock(account(2)).await.expect("free");
        let mut call = locks.lock_all([1, 2].map(account)).lease(lease);
        if let Some(max_hold) = max_hold {
            call = call.max_hold(max_hold);
        }
        let call = tokio::spawn(call.into_future());
        // Longer than the limit.
        sleep(8 * S).await;
        busy.release().await.expect("up");
        let guards = soon("a grant", call).await.expect("no panic").expect("granted");
        let granted = Instant::now();
        for lock in &guards.held_locks() {
            assert!(lock.remaining() > 4 * S && lock.remaining() <= 5 * S, "{:?}", lock.remaining());
        }
        assert_eq!(guards.held_locks().lost().await, LockLost::HoldLimitReached);
        assert_eq!(granted.elapsed().as_secs(), 5);
        drop(guards);
        sleep(10 * S).await;
        assert_eq!(store.held_count(), 0);
    }
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn minimum_hold_counts_from_the_last_grant() {
    let (_, locks) = store_and_locks();
    let busy = locks.try_lock(account(2)).await.expect("free");
    let call = tokio::spawn(locks.lock_all([1, 2].map(account)).min_hold(10 * S).into_future());
    sleep(8 * S).await;
    busy.release().await.expect("up");
    let guards = soon("a grant", call).await.expect("no panic").expect("granted");
    let granted = Instant::now();
    drop(guards.release());
    for number in [1, 2] {
        let guard = locks.lock(account(number)).await.expect("in time");
        assert!(granted.elapsed() >= 10 * S, "{:?} for {number}", granted.elapsed());
        guard.release().await.expect("up");
    }
    let began = Instant::now();
    let failed = locks.lock_all([1, 2].map(account)).min_hold(10 * S).await.expect("free");
    drop(failed.release_after_failure());
    locks.lock_all([1, 2].map(account)).await.expect("free").release().await.expect("up");
    assert!(began.elapsed() < S, "{:?}", began.elapsed());
}

/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn an_owner_reenters_the_keys_that_it_holds() {
    let (store, locks) = store_and_locks();
    let owner = Owner::new();
    let outer = locks.lock(account(2)).max_hold(20 * S).owner(&owner).await.expect("free");
    let guards = locks.try_lock_all([1, 2, 3].map(account)).max_hold(5 * S).owner(&owner).await.expect("its own");
    let inner = locks.try_lock(account(3)).owner(&owner).await.expect("its own");
    assert!(outer.held_lock().remaining() > 15 * S, "the limit of its first call");
    assert!(guards.get(account(1)).is_some_and(|lock| lock.remaining() <= 5 * S));
    assert_eq!(inner.release().await.expect("up"), ReleaseOutcome::StillHeld);
    assert_eq!(guards.release().await.expect("up"), ReleaseOutcome::StillHeld);
    settle().await;
    assert_eq!(store.held_count(), 1);
    outer.release().await.expect("up");
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_store_leaves_nothing() {
    let (store, locks) = store_and_locks();
    store.on(StoreOp::Acquire).fault(Fault::Fail);
    for wait in [Duration::ZERO, 10 * S] {
        let error = locks.lock_all([1, 2].map(account)).wait(wait).await.expect_err("it fails");
        assert!(matches!(error, LockAllError::NotAcquired { source: LockError::Store(_), .. }), "{error:?}");
    }
    store.on(StoreOp::Acquire).fault(Fault::None);
    sleep(40 * S).await;
    settle().await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
    locks.shutdown(S).await;
    let error = locks.lock_all([1, 2].map(account)).await.expect_err("shut down");
    assert!(matches!(error, LockAllError::NotAcquired { source: LockError::ShuttingDown, .. }), "{error:?}");
}

/// Random sets of keys, waits, drops and faults, in two processes: each key has one holder at a
/// time, its tokens rise, every call ends, and nothing is left.
/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn random_sets_exclude_each_other_and_end() {
    #[derive(Default)]
    struct Seen {
        held: HashMap<LockKey, u64>,
        last: HashMap<LockKey, u64>,
        granted: u32,
        refused: u32,
    }
    for seed in 0..21 {
        let store = TestStore::new();
        let processes = [LockManager::new(store.clone()), LockManager::new(store.clone())];
        let has_faults = seed % 3 == 2;
        if has_faults {
            store.chaos(Some(Chaos::new(seed, 30)));
        }
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut callers = JoinSet::new();
        for caller in 0..12_u64 {
            let (locks, seen) = (processes[usize::from(caller % 2 == 0)].clone(), Arc::clone(&seen));
            callers.spawn(async move {
                let mut random = Rng::with_seed(seed * 1000 + caller);
                for _ in 0..12 {
                    let set: Vec<_> = (0..random.usize(1..5)).map(|_| account(random.u64(0..6))).collect();
                    let wait = if random.bool() { Duration::ZERO } else { 60 * S };
                    let call = locks.lock_all(set).wait(wait).into_future();
                    let limit = if random.u8(0..8) == 0 { random.u64(0..30) } else { 300_000 };
                    let Ok(result) = timeout(Duration::from_millis(limit), call).await else { continue };
                    let guards = match result {
                        Ok(guards) => guards,
                        Err(_) => {
                            seen.lock().expect("no panic").refused += 1;
                            continue;
                        }
                    };
                    let views = guards.held_locks();
                    let enter = || {
                        let mut seen = seen.lock().expect("no panic");
                        seen.granted += 1;
                        for lock in &views {
                            let token = lock.fencing_token().as_u64();
                            let other = seen.held.insert(lock.key().clone(), token);
                            assert!(other.is_none(), "seed {seed}: {lock:?} is held under {other:?}");
                            let last = seen.last.insert(lock.key().clone(), token);
                            assert!(last.is_none_or(|last| last < token), "seed {seed}: {lock:?} after {last:?}");
                        }
                    };
                    let work = async {
                        enter();
                        sleep(Duration::from_millis(random.u64(0..20))).await;
                    };
                    let _ = guards.while_held(work).await;
                    {
                        let mut seen = seen.lock().expect("no panic");
                        views.iter().for_each(|lock| _ = seen.held.remove(lock.key()));
                    }
                    if random.u8(0..6) == 0 { drop(guards) } else { drop(guards.release()) }
                }
            });
        }
        while let Some(done) = timeout(3600 * S, callers.join_next()).await.expect("every call ends") {
            done.expect("no violation");
        }
        let seen = std::mem::take(&mut *seen.lock().expect("no panic"));
        assert!(
            seen.granted > 20 && seen.refused > 0,
            "seed {seed}: {} granted, {} refused",
            seen.granted,
            seen.refused
        );
        store.chaos(None);
        sleep(120 * S).await;
        settle().await;
        assert_eq!(store.held_count(), 0, "seed {seed}");
        assert!(processes.iter().all(|locks| locks.size() == (0, 0)), "seed {seed}");
    }
}

/// The server of one key moves.
#[derive(Debug)]
struct Moves {
    key: LockKey,
    until: Instant,
}

impl Intercept for Moves {
    fn acquire(&self, store: &Arc<dyn LockStore>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        if request.key == self.key && Instant::now() < self.until {
            return StoreFuture::ready(Err(StoreError::new("test", "acquire", StoreErrorKind::Failover)));
        }
        store.acquire_one(request)
    }
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn a_key_whose_server_moves_is_waited_for_alone() {
    let moves = || Moves { key: account(2), until: Instant::now() + 3 * S };
    let locks = || LockManager::new(InterceptedStore::new(Arc::new(MemoryStore::new()), moves()));
    let guards = locks().lock_all([account(1), account(2), account(3)]).wait(60 * S).await.expect("it has moved");
    assert_eq!(keys(&guards), ["account:1", "account:2", "account:3"]);
    let error = locks().try_lock_all([account(1), account(2)]).await.expect_err("a call without a wait");
    assert!(matches!(error, LockAllError::NotAcquired { source: LockError::Store(_), .. }), "{error:?}");
}
