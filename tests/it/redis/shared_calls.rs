//! Acquires and releases that share a call: its cost, its failures, and the runtimes that send it.

use std::{error::Error, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::{
    runtime::{Builder, Runtime},
    time::sleep,
};
use tower_lock::{
    AcquisitionId, LockError, LockKey, LockManager, RedisStore,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, IfBusy, ReleaseReply, ReleaseRequest, StoreError, StoreErrorKind,
    },
};
use tower_lock_testkit::{
    NetworkFault, Request, limits,
    locks::key,
    runtimes::{end_runtimes_in_child_process, ends_of_runtimes_are_survived},
    store::StoreExt,
    wait::{ms, soon, until},
};

use crate::support::{self, Environment, LONG, environment, hasty, release};

fn acquire(key: &LockKey, id: &AcquisitionId) -> AcquireRequest {
    support::acquire(key, id, IfBusy::Fail)
}

/// A request that waits for its call for a short time.
fn hasty_acquire(key: &LockKey, id: &AcquisitionId) -> AcquireRequest {
    let mut request = acquire(key, id);
    request.valid_for = limits::SHORT;
    request
}

/// Twenty keys, each with an id.
fn twenty(ids: &AcquisitionIds) -> Vec<(LockKey, AcquisitionId)> {
    (0..20).map(|number| (numbered(number), ids.next())).collect()
}

async fn acquire_all(store: &RedisStore, all: &[(LockKey, AcquisitionId)]) -> Vec<Result<AcquireReply, StoreError>> {
    join_all(all.iter().map(|(key, id)| store.acquire_one(acquire(key, id)))).await
}

async fn release_all(store: &RedisStore, all: &[(LockKey, AcquisitionId)]) -> Vec<Result<ReleaseReply, StoreError>> {
    join_all(all.iter().map(|(key, id)| store.release_one(release(key, id)))).await
}

fn numbered(number: usize) -> LockKey {
    LockKey::from(("n", number))
}

/// A call of several requests: more than a lock with its queue, its record and the fence.
fn is_shared(request: &Request) -> bool {
    let keys = request.parts.get(2).and_then(|count| std::str::from_utf8(count).ok()?.parse::<usize>().ok());
    request.name() == "EVALSHA" && keys.is_some_and(|keys| keys > 4)
}

async fn warm(environment: &Environment, locks: &LockManager) {
    support::pass(locks).await;
    environment.wait_until_clean().await;
}

#[tokio::test]
async fn concurrent_acquires_and_releases_share_scripts() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    warm(&environment, &locks).await;
    let before = environment.scripts().await;
    let guards = join_all((0..64).map(|number| locks.try_lock(numbered(number)).into_future())).await;
    let acquired = environment.scripts().await;
    let guards: Vec<_> = guards.into_iter().map(|guard| guard.expect("free")).collect();
    let fences: Vec<_> = guards.iter().map(|guard| guard.fencing_token().as_u64()).collect();
    join_all(guards.into_iter().map(|guard| async { guard.release().await.expect("held") })).await;
    let released = environment.scripts().await;
    // Two may go alone, and the last ones may miss the call of the others. A call that takes long,
    // as on a busy machine, delays no other.
    assert!(acquired - before <= 16, "{} scripts for 64 acquires", acquired - before);
    assert!(released - acquired <= 16, "{} scripts for 64 releases", released - acquired);
    let later = locks.try_lock(numbered(7)).await.expect("free");
    assert!(fences.iter().all(|fence| *fence < later.fencing_token().as_u64()));
    later.release().await.expect("held");
    environment.wait_until_clean().await;
}

/// Guarantee: G9.
#[tokio::test]
async fn key_of_another_type_fails_alone_in_a_shared_call() {
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    environment.command(&["SET", "lock:n:3", "text"]).await;
    let all = twenty(&AcquisitionIds::new("a", 1));
    let before = environment.scripts().await;
    let replies = acquire_all(&store, &all).await;
    assert!(environment.scripts().await - before < 8, "they share calls");
    for (number, reply) in replies.into_iter().enumerate() {
        match reply {
            Ok(reply) => assert!(matches!(reply, AcquireReply::Granted { .. }) && number != 3, "{number}: {reply:?}"),
            Err(error) => {
                let text = error.source().expect("kept").to_string();
                assert!(number == 3 && error.kind() == StoreErrorKind::Refused, "{number}: {text}");
                assert!(text.contains("WRONGTYPE") && text.contains("check its `TYPE`"), "{text}");
            }
        }
    }
    // A queue of another type: the other keys keep their lock-delay.
    environment.command(&["SET", "tower-lock:lock:q:{lock:n:5}", "text"]).await;
    let releases = all[5..].iter().map(|(key, id)| {
        let block_for = if *key == numbered(5) { Duration::ZERO } else { LONG };
        store.release_one(ReleaseRequest::new(key.clone(), id.clone(), block_for, support::TERMS))
    });
    let replies = join_all(releases).await;
    assert!(replies[0].as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Refused), "{:?}", replies[0]);
    for (number, reply) in (6..20).zip(&replies[1..]) {
        assert!(matches!(reply, Ok(ReleaseReply::Freed)), "{number}: {reply:?}");
        let fields = environment.command(&["HKEYS", &format!("lock:n:{number}")]).await;
        assert!(fields.texts().iter().all(|field| field.ends_with(":end")), "{number}: {fields:?}");
        assert_eq!(fields.texts().len(), 1, "{number} keeps its lock-delay");
    }
}

/// Redis refuses a whole call for one of its keys.
/// Guarantee: G9.
#[tokio::test]
async fn key_without_permission_fails_alone_in_a_shared_call() {
    let Some(environment) = environment().await else { return };
    let rules = ["ACL", "SETUSER", "app", "on", ">secret", "~lock:*", "~tower-lock:lock:*", "&*", "+@all"];
    environment.command(&rules).await;
    let url = format!("redis://app:secret@{}", environment.redis.address());
    let store = support::connect(&url).await;
    let mut all = twenty(&AcquisitionIds::new("a", 1));
    all[9].0 = LockKey::raw("other").expect("a name");
    let replies = acquire_all(&store, &all).await;
    let refused =
        replies.iter().position(|reply| reply.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Refused));
    let granted = replies.iter().filter(|reply| matches!(reply, Ok(AcquireReply::Granted { .. }))).count();
    assert_eq!((refused, granted), (Some(9), 19), "{replies:?}");
    let replies = release_all(&store, &all).await;
    let freed = replies.iter().filter(|reply| matches!(reply, Ok(ReleaseReply::Freed))).count();
    assert_eq!((replies[9].is_err(), freed), (true, 19), "{replies:?}");
    environment.wait_until_clean().await;
}

/// Guarantee: G7.
#[tokio::test]
async fn lost_reply_of_a_shared_call_leaves_each_attempt_in_doubt() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let all = twenty(&AcquisitionIds::new("a", 1));
    // Redis knows the scripts.
    acquire_all(&store, &all[..1]).await;
    release_all(&store, &all[..1]).await;
    let all = twenty(&AcquisitionIds::new("a", 2));
    environment.proxy.all().next_where(is_shared, NetworkFault::CutBeforeReply);
    let replies = acquire_all(&store, &all).await;
    let lost =
        replies.iter().filter(|reply| reply.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Unavailable));
    assert!(lost.count() >= 18, "{replies:?}");
    assert_eq!(environment.keys().await.len(), 20, "all of them were executed");
    // A release is repeated: its first call was executed.
    environment.proxy.all().next_where(is_shared, NetworkFault::CutBeforeReply);
    let replies = release_all(&store, &all).await;
    assert!(replies.iter().all(Result::is_ok), "{replies:?}");
    assert_eq!(environment.keys().await, [""; 0]);
    // A manager releases the attempts of callers that have left.
    let locks = LockManager::new(store);
    let faults = environment.proxy.fault_count();
    environment.proxy.all().next_where(is_shared, NetworkFault::CutBeforeReply);
    let calls: Vec<_> = (0..20).map(|number| tokio::spawn(locks.lock(numbered(number)).into_future())).collect();
    until("the reply is lost", async || environment.proxy.fault_count() > faults).await;
    // The first one may have a lock. Its guard is dropped with its handle.
    calls.into_iter().for_each(|call| call.abort());
    environment.wait_until_clean().await;
    until("the outcomes are known", async || locks.size() == (0, 0)).await;
}

/// Two managers of one store are two clients.
/// Guarantee: G1.
#[tokio::test]
async fn managers_of_one_store_exclude_each_other_in_shared_calls() {
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    let (one, two) = (LockManager::new(Arc::clone(&store)), LockManager::new(store));
    for _ in 0..3 {
        // Both wait behind the calls under way.
        let others = (0..4).map(|number| one.try_lock(numbered(number)).into_future());
        let same = [one.try_lock(key()).into_future(), two.try_lock(key()).into_future()];
        let replies = join_all(others.chain(same)).await;
        let [.., first, second] = &replies[..] else { unreachable!("six replies") };
        assert_eq!(usize::from(first.is_ok()) + usize::from(second.is_ok()), 1, "{first:?} {second:?}");
        let refused = first.as_ref().err().or(second.as_ref().err()).expect("one is refused");
        assert!(matches!(refused, LockError::Busy { .. }), "{refused:?}");
        join_all(replies.into_iter().flatten().map(|guard| async { guard.release().await.expect("held") })).await;
    }
    environment.wait_until_clean().await;
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Two calls are under way when their runtime ends, and this is the only request.
/// Guarantee: G5.
#[test]
fn request_is_served_after_a_runtime_with_calls_ended() {
    let (servers, other) = (runtime(), runtime());
    let Some(environment) = servers.block_on(environment()) else { return };
    let store = other.block_on(async { hasty().connect(&environment.redis.url()).await.expect("it is up") });
    let ids = AcquisitionIds::new("a", 1);
    environment.redis.freeze();
    other.block_on(async {
        for number in 0..2 {
            drop(store.acquire_one(hasty_acquire(&numbered(number), &ids.next())));
            drop(store.release_one(release(&numbered(number), &ids.next())));
            // Later requests do not wait for a call that takes long.
            sleep(ms(20)).await;
        }
    });
    // Both calls are under way: the others wait, and no further call wakes them.
    let (acquire, release) = servers.block_on(async {
        let acquire = tokio::spawn(store.acquire_one(hasty_acquire(&key(), &ids.next())));
        let release = tokio::spawn(store.release_one(release(&key(), &ids.next())));
        (acquire, release)
    });
    environment.redis.thaw();
    drop(other);
    servers.block_on(async {
        // With an error, too, the caller goes on.
        let _ = soon("a reply to the acquire", acquire).await.expect("no panic");
        let _ = soon("a reply to the release", release).await.expect("no panic");
        let again = async || store.acquire_one(hasty_acquire(&numbered(9), &ids.next())).await.is_ok();
        until("it works from here", again).await;
    });
}

/// Guarantee: G2.
#[tokio::test]
async fn runtimes_end_while_calls_to_redis_are_under_way() {
    end_runtimes_in_child_process(async |url| limits::redis().connect(url).await.expect("it is up"));
    let Some(environment) = environment().await else { return };
    let test = "shared_calls::runtimes_end_while_calls_to_redis_are_under_way";
    ends_of_runtimes_are_survived(test, &environment.redis.url()).await;
}

/// Guarantee: G15.
#[tokio::test]
async fn acquires_beyond_the_bound_are_refused_while_redis_is_stopped() {
    let Some(environment) = environment().await else { return };
    let store = hasty().connect(&environment.redis.url()).await.expect("it is up");
    let ids = AcquisitionIds::new("a", 1);
    let works = async || {
        let id = ids.next();
        let reply = store.acquire_one(hasty_acquire(&key(), &id)).await;
        let _ = store.release_one(release(&key(), &id)).await;
        matches!(reply, Ok(AcquireReply::Granted { .. }))
    };
    until("it works", works).await;
    environment.redis.freeze();
    let calls = (0..12_000).map(|number| store.acquire_one(hasty_acquire(&numbered(number), &ids.next())));
    let replies = soon("replies", join_all(calls.collect::<Vec<_>>())).await;
    let overloaded = |reply: &Result<AcquireReply, _>| matches!(reply, Err(error) if StoreError::kind(error) == StoreErrorKind::Overloaded);
    assert!(replies.iter().all(|reply| reply.as_ref().is_err_and(|error| error.source().is_some())));
    assert!(replies[10_500..].iter().all(overloaded), "those beyond the bound");
    let count = replies.iter().filter(|reply| overloaded(reply)).count();
    assert!(count >= 11_000, "{count}: two calls were sent, and perhaps two more");
    environment.redis.thaw();
    until("it works again", works).await;
    environment.wait_until_clean().await;
}

/// Guarantee: G15.
#[tokio::test]
async fn releases_of_many_guards_share_scripts_and_none_is_lost() {
    const GUARDS: usize = 1_000;
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let mut guards = Vec::new();
    for part in 0..GUARDS / 100 {
        let part = join_all((part * 100..).take(100).map(|number| locks.lock(numbered(number)).into_future()));
        guards.extend(part.await.into_iter().map(|guard| guard.expect("free")));
    }
    assert_eq!(locks.held_count(), GUARDS);
    let before = environment.scripts().await;
    let released = join_all(guards.into_iter().map(|guard| guard.release().into_future())).await;
    let scripts = environment.scripts().await - before;
    assert!(released.iter().all(Result::is_ok), "{released:?}");
    assert!(scripts < 100, "{scripts} scripts for {GUARDS} releases");
    assert_eq!(locks.shutdown(limits::BROKEN).await, 0);
    assert_eq!(environment.keys().await, [""; 0]);
}
