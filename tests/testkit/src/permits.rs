//! Permits and reads of several processes, on any store with shares.

use std::{
    error::Error,
    future::IntoFuture,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep},
};
use tower_lock::{
    LockError, LockKey, LockLayer, LockManager, PermitGuard, key,
    lock::ReleaseOutcome,
    store::{ForceReleaseReply, Holder, StoreErrorKind},
};

use crate::wait::{soon, until};

/// The rules of permits and of readers, for three processes.
pub async fn rules_are_kept(locks: &[LockManager]) {
    limit_is_kept(locks, ("permits",).into()).await;
    writer_is_not_passed(locks, ("readers",).into()).await;
    dropped_guard_blocks_one_place(locks, ("dropped",).into()).await;
}

/// An operator sees two holders of different processes, and revokes one of them.
///
/// # Panics
///
/// Panics if the other one loses its permit, too.
pub async fn one_of_several_holders_is_revoked(locks: &[LockManager], key: LockKey) {
    let kept = locks[0].permit(key.clone(), 2).await.expect("free");
    let revoked = locks[1].permit(key.clone(), 2).await.expect("free");
    let status = locks[0].inspect(key.clone()).await.expect("a reply");
    assert_eq!((status.holding, status.holders.len()), (2, 2));
    let of = |holder: &&Holder| holder.id.instance() == "p1";
    let holder = status.holders.iter().find(of).expect("one of them").id.clone();
    for _ in 0..2 {
        // Notified once more.
        let reply = locks[0].revoke(key.clone(), &holder).await.expect("a reply");
        assert_eq!(reply, ForceReleaseReply::Revoked { holders: vec![holder.clone()] });
    }
    let refused = locks[1].permit(key.clone(), 2).wait(Duration::ZERO).await;
    assert!(matches!(refused, Err(LockError::Busy { .. })), "its place is blocked");
    soon("the loss", revoked.held_permit().lost()).await;
    assert!(!kept.held_permit().remaining().is_zero());
    drop(locks[1].permit(key, 2).await.expect("a second later").release().await);
    assert_eq!(kept.release().await.expect("a reply"), ReleaseOutcome::Released);
}

/// Four permits for two processes, and a fifth caller.
pub async fn limit_is_kept(locks: &[LockManager], key: LockKey) {
    let mut guards = Vec::new();
    for n in 0..4 {
        guards.push(locks[n % 2].permit(key.clone(), 4).await.expect("a permit"));
    }
    for locks in &locks[..2] {
        let fifth = locks.permit(key.clone(), 4).wait(Duration::ZERO).await;
        assert!(matches!(fifth, Err(LockError::Busy { .. })), "{fifth:?}");
        assert!(matches!(locks.try_lock(key.clone()).await, Err(LockError::Busy { .. })), "not alone");
    }
    let larger = locks[0].permit(key.clone(), 5).wait(Duration::ZERO).await.expect("a larger limit fits");
    let waiter = waiter(locks[1].permit(key.clone(), 4).into_future());
    waits(&locks[0], &key, 1).await;
    larger.release().await.expect("released");
    guards.pop().expect("four").release().await.expect("released");
    guards.push(granted(waiter).await);
    for guard in guards {
        guard.release().await.expect("released");
    }
}

/// A writer waits for a reader, readers wait for the writer, and then run together.
pub async fn writer_is_not_passed(locks: &[LockManager], key: LockKey) {
    let first = locks[0].read(key.clone()).await.expect("free");
    let second = locks[1].read(key.clone()).await.expect("beside the first");
    let writer = tokio::spawn(locks[1].lock(key.clone()).into_future());
    waits(&locks[0], &key, 1).await;
    let refused = locks[2].read(key.clone()).wait(Duration::ZERO).await;
    assert!(matches!(refused, Err(LockError::Busy { .. })), "behind the writer: {refused:?}");
    let readers = [1, 2, 2].map(|n| waiter(locks[n].read(key.clone()).into_future()));
    waits(&locks[0], &key, 2).await;
    first.release().await.expect("released");
    second.release().await.expect("released");
    let writer = soon("the writer", writer).await.expect("no panic").expect("the writer is first");
    assert!(readers.iter().all(|reader| !reader.is_finished()));
    writer.release().await.expect("released");
    let mut held = Vec::new();
    for reader in readers {
        held.push(granted(reader).await);
    }
    assert!(held.iter().all(|guard| !guard.held_permit().remaining().is_zero()));
    for guard in held {
        guard.release().await.expect("released");
    }
}

/// A dropped guard blocks its own place for the lock-delay.
pub async fn dropped_guard_blocks_one_place(locks: &[LockManager], key: LockKey) {
    let permit = |delay| locks[0].permit(key.clone(), 2).lock_delay(delay);
    let dropped = permit(Duration::from_millis(600)).await.expect("free");
    let kept = permit(Duration::ZERO).await.expect("free");
    let view = kept.held_permit();
    drop(dropped);
    let began = Instant::now();
    let next = permit(Duration::ZERO).await.expect("after the lock-delay");
    assert!(began.elapsed() >= Duration::from_millis(500), "{:?}", began.elapsed());
    assert!(!view.remaining().is_zero(), "the other one goes on");
    next.release().await.expect("released");
    kept.release().await.expect("released");
}

/// The store has one holder for each key: a call fails, and a layer panics when it is made.
///
/// # Panics
///
/// Panics if the limit is ignored.
pub async fn permits_are_refused(locks: &LockManager) {
    for call in [locks.permit(("k", 1), 2), locks.read(("k", 1))] {
        let error = call.await.expect_err("no permits");
        let LockError::Store(error) = &error else { panic!("{error:?}") };
        assert_eq!(error.kind(), StoreErrorKind::Unsupported);
        let why = error.source().expect("the reason").to_string();
        assert!(why.contains("`RedisStore` and `PostgresStore`"), "{why}");
    }
    let layer = || LockLayer::new(locks, key::fixed(("k", 1)));
    let _one = layer().at_most(1);
    let make: [&dyn Fn(); 3] = [&|| drop(layer().at_most(2)), &|| drop(layer().at_most_by(|_| 2)), &|| {
        drop(layer().shared_for([axum::http::Method::GET]));
    }];
    make.into_iter().for_each(needs_another_store);
    newest_wins_is_refused(locks);
    locks.permit(("k", 1), 1).await.expect("the whole key").release().await.expect("released");
}

/// No request replaces another one.
///
/// # Panics
///
/// Panics if the setting is ignored.
pub fn newest_wins_is_refused(locks: &LockManager) {
    needs_another_store(&|| drop(LockLayer::new(locks, key::fixed(("k", 1))).newest_wins(Duration::ZERO)));
}

fn needs_another_store(make: &dyn Fn()) {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(make)).expect_err("a panic");
    let text = panic.downcast_ref::<String>().expect("a text");
    assert!(text.contains("needs another store"), "{text}");
}

/// What a storm has done.
#[derive(Debug, Default)]
pub struct StormReport {
    /// The sections that ran.
    pub sections: usize,
    /// The most of them at the same time.
    pub most: usize,
}

/// Callers on one key, a quarter of which hold it alone, and the others as one of `limit`: 1,024 is
/// a reader. Some drop their guards, or do not wait long.
///
/// # Panics
///
/// Panics if more callers are inside than a limit allows, or a writer is not alone.
pub async fn storm(locks: &[LockManager], key: &LockKey, limit: u16, duration: Duration) -> StormReport {
    /// Above it all limits of this storm: a writer counts as this many.
    const ALONE: usize = 1 << 20;
    let counts = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0)));
    let end = Instant::now() + duration;
    let mut callers = JoinSet::new();
    for n in 0..48 {
        let (locks, key, counts) = (locks[n % locks.len()].clone(), key.clone(), Arc::clone(&counts));
        callers.spawn(async move {
            let (inside, sections, most) = &*counts;
            let mut rng = fastrand::Rng::with_seed(u64::try_from(n).expect("small"));
            while Instant::now() < end {
                let limit = if rng.u8(..4) == 0 { 1 } else { limit };
                let wait = Duration::from_millis(if rng.u8(..10) == 0 { 2 } else { 20_000 });
                let call = if limit == 1_024 { locks.read(key.clone()) } else { locks.permit(key.clone(), limit) };
                let Ok(guard) = call.wait(wait).lock_delay(Duration::from_millis(3)).await else { continue };
                let weight = if limit == 1 { ALONE } else { 1 };
                let others = inside.fetch_add(weight, SeqCst);
                assert!(others < usize::from(limit), "{others:#x} beside one of {limit}");
                sections.fetch_add(1, SeqCst);
                most.fetch_max(others + 1, SeqCst);
                if rng.bool() {
                    sleep(Duration::from_micros(rng.u64(..2_000))).await;
                }
                inside.fetch_sub(weight, SeqCst);
                if rng.u8(..100) < 2 { drop(guard) } else { drop(guard.release().await) }
            }
        });
    }
    while let Some(caller) = callers.join_next().await {
        caller.expect("no violation");
    }
    let (_, sections, most) = &*counts;
    StormReport { sections: sections.load(SeqCst), most: most.load(SeqCst) }
}

fn waiter(
    call: impl Future<Output = Result<PermitGuard, LockError>> + Send + 'static,
) -> JoinHandle<Result<PermitGuard, LockError>> {
    tokio::spawn(call)
}

async fn granted(waiter: JoinHandle<Result<PermitGuard, LockError>>) -> PermitGuard {
    soon("a permit", waiter).await.expect("no panic").expect("granted")
}

/// Waits until so many acquisitions are queued in the store.
async fn waits(locks: &LockManager, key: &LockKey, waiting: usize) {
    until("the waiters", async || locks.inspect(key.clone()).await.expect("a reply").waiting >= waiting).await;
}
