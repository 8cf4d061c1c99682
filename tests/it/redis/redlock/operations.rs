//! What operators do, and what the store refuses.

use std::{panic::AssertUnwindSafe, time::Duration};

use futures_util::{FutureExt, future::join_all};
use tower_lock::{
    LockKey, LockLost, LockManager, ReplayLayer, key,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, ForceReleaseReply, ForceReleaseRequest, IfBusy, ListRequest,
        LockStore, QueueConfig, RenewReply, RenewRequest,
    },
};
use tower_lock_testkit::{
    limits, locks,
    permits::permits_are_refused,
    wait::{ms, soon, until},
};

use super::{LONGEST, servers};

/// There are no messages: the holder notices it by its next renewal.
/// Guarantee: G8.
#[tokio::test]
async fn revoked_lock_is_lost_at_the_next_renewal() {
    let Some(servers) = servers(3).await else { return };
    let store = servers.store().await;
    let locks = LockManager::builder(store).lease(Duration::from_secs(6)).build();
    let other = servers.instance("b").await;
    let guard = locks.lock(locks::key()).await.expect("free");
    let status = other.inspect(locks::key()).await.expect("a majority");
    assert!(status.holder().is_some_and(|holder| holder.connected.is_none() && holder.since.is_some()), "{status}");
    assert!(status.remaining > Duration::from_secs(2), "{status}");
    let reply = other.force_release(locks::key()).await.expect("a majority");
    assert!(reply.holder().is_some(), "{reply:?}");
    assert_eq!(soon("a loss", guard.held_lock().lost()).await, LockLost::Revoked);
    until("it is free after the lock-delay", async || other.try_lock(locks::key()).await.is_ok()).await;
}

/// A majority of the servers does not count holders.
///
/// Guarantee: G22, G25.
#[tokio::test]
async fn redlock_has_no_permits() {
    let Some(servers) = servers(3).await else { return };
    permits_are_refused(&servers.instance("a").await).await;
}

/// A key that a majority holds is listed once, whichever server lacks it; one that is left at a
/// minority is not.
#[tokio::test]
async fn listing_has_the_keys_of_a_majority() {
    const KEYS: usize = 12;
    let Some(mut servers) = servers(3).await else { return };
    let store = servers.store().await;
    let locks = LockManager::new(servers.store().await);
    let mut guards = Vec::new();
    for number in 0..KEYS {
        guards.push(locks.lock(("n", number)).await.expect("free"));
    }
    for number in 0..KEYS {
        let name = format!("lock:n:{number}");
        let held = async || {
            let found = servers.redis.iter().map(async |redis| redis.command(&["EXISTS", &name]).await.integer());
            join_all(found).await.iter().all(|found| *found == Some(1))
        };
        until("all have it", held).await;
        servers.redis[number % 3].command(&["DEL", &name]).await;
        // The rest of a lost lock.
        let rest = format!("lock:rest:{number}");
        servers.redis[number % 3].command(&["HSET", &rest, "z:1", "1700000000000000"]).await;
        servers.redis[number % 3].command(&["PEXPIRE", &rest, "100000"]).await;
    }
    let list = async || {
        let (mut request, mut listed) = (ListRequest::new(5), Vec::new());
        loop {
            let page = store.list(request.clone()).await.expect("a majority");
            listed.extend(page.entries.into_iter().map(|entry| (entry.key, entry.status.holders.len())));
            let Some(next) = page.next else { break };
            request = request.after(next);
        }
        listed.sort();
        listed
    };
    let mut expected: Vec<_> = (0..KEYS).map(|number| (LockKey::from(("n", number)), 1)).collect();
    expected.sort();
    let mut listed = list().await;
    // One that moves in the table of its server meanwhile may be listed twice.
    listed.dedup();
    assert_eq!(listed, expected);
    servers.redis[0].kill();
    let held: Vec<_> = (0..KEYS).filter(|number| number % 3 == 0).map(|number| LockKey::from(("n", number))).collect();
    let listed = list().await;
    assert!(held.iter().all(|key| listed.iter().any(|(listed, _)| listed == key)), "both others have it");
    servers.redis[0].restart_empty().await;
}

/// Guarantee: G3.
#[tokio::test]
async fn block_after_a_release_is_kept_by_a_majority() {
    let Some(servers) = servers(3).await else { return };
    let (one, two) = (servers.instance("a").await, servers.instance("b").await);
    let guard = one.lock(locks::key()).min_hold(Duration::from_secs(60)).await.expect("free");
    until("each server has granted it", async || servers.holding().await == 3).await;
    guard.release().await.expect("held");
    servers.redis[1].kill();
    let status = two.inspect(locks::key()).await.expect("a majority");
    assert!(status.holder().is_none() && status.remaining > Duration::from_secs(30), "{status}");
    assert!(two.try_lock(locks::key()).await.is_err());
    let reply = two.force_release(locks::key()).await.expect("a majority");
    assert!(matches!(reply, ForceReleaseReply::Unblocked { .. }), "{reply:?}");
    two.try_lock(locks::key()).await.expect("free").release().await.expect("held");
}

/// Guarantee: G18.
#[tokio::test]
async fn layer_and_once_without_records_name_the_store() {
    let Some(servers) = servers(3).await else { return };
    let locks = servers.instance("a").await;
    let outcome = locks.once(("digest", 7)).run(async |_| ()).await;
    let error = format!("{:?}", outcome.expect_err("no records"));
    let reason = "`RedlockStore` keeps no records: use";
    assert!(error.contains("the redlock store") && error.contains(reason), "{error}");
    let layer = AssertUnwindSafe(async { ReplayLayer::new(&locks, key::fixed(("all",))) }).catch_unwind().await;
    let panic = layer.expect_err("no records");
    let text = panic.downcast_ref::<String>().expect("a text");
    assert!(text.starts_with("a `ReplayLayer` needs a store that keeps records: ") && text.contains(reason), "{text}");
}

/// A raw key is the name of a lock of another program at each server.
#[tokio::test]
async fn raw_key_excludes_locks_of_redisson_and_wakes_its_waiters() {
    let Some(servers) = servers(3).await else { return };
    let locks = servers.instance("a").await;
    let key = LockKey::raw("myLock").expect("a name");
    let mut waiter = servers.redis[0].connect().await;
    waiter.command(&["SUBSCRIBE", "redisson_lock__channel:{myLock}"]).await.expect("subscribed");
    for server in [0, 2] {
        servers.redis[server].command(&["HSET", "myLock", "uuid:7", "1"]).await;
        servers.redis[server].command(&["PEXPIRE", "myLock", "100000"]).await;
    }
    assert!(locks.try_lock(key.clone()).await.is_err(), "a majority is another program's");
    servers.redis[2].command(&["DEL", "myLock"]).await;
    locks.try_lock(key).await.expect("a majority").release().await.expect("held");
    // It had no lock at this server: only where it had one does it wake others.
    servers.redis[0].command(&["DEL", "myLock"]).await;
    let guard = locks.try_lock(LockKey::raw("myLock").expect("a name")).await.expect("free");
    until("all have it", async || servers.redis[0].command(&["EXISTS", "myLock"]).await.integer() == Some(1)).await;
    guard.release().await.expect("held");
    let message = soon("a message", waiter.next()).await.expect("open");
    assert_eq!(message.texts(), ["0", "message", "redisson_lock__channel:{myLock}"]);
}

/// Each key of one call has the decision of its own majority.
#[tokio::test]
async fn keys_of_one_call_are_decided_each_for_itself() {
    let Some(servers) = servers(3).await else { return };
    let store = servers.store().await;
    let ids = AcquisitionIds::new("a", 1);
    let terms = QueueConfig::new(ms(4_000), ms(10_000), 16);
    let key = |number: usize| LockKey::from(("n", number));
    // The first one at one server, the second one at two; the third one has another type.
    for (server, number) in [(0, 0), (0, 1), (1, 1)] {
        servers.redis[server].command(&["HSET", &format!("lock:n:{number}"), "other", "1"]).await;
    }
    servers.redis[2].command(&["SET", "lock:n:2", "text"]).await;
    for server in [1, 2] {
        servers.redis[server].command(&["SET", "lock:n:3", "text"]).await;
    }
    let requests: Vec<_> = (0..5).map(|number| (key(number), ids.next())).collect();
    let acquire = requests
        .iter()
        .map(|(key, id)| AcquireRequest::new(key.clone(), id.clone(), LONGEST, IfBusy::Fail, terms, limits::CALL));
    let mut replies = Vec::new();
    for reply in store.acquire(acquire.collect()) {
        replies.push(match reply.await {
            Ok(AcquireReply::Granted { .. }) => "granted".to_owned(),
            Ok(AcquireReply::Busy { .. }) => "busy".to_owned(),
            other => format!("{other:?}"),
        });
    }
    assert_eq!(replies[..3], ["granted", "busy", "granted"]);
    assert!(replies[3].contains("WRONGTYPE"), "{}", replies[3]);
    assert_eq!(replies[4], "granted");
    let renewals = requests.iter().map(|(key, id)| RenewRequest::new(key.clone(), id.clone(), LONGEST));
    let renewed = store.renew(renewals.collect()).await.expect("a majority");
    use RenewReply::{Extended, NotHolder};
    assert_eq!(renewed, [Extended, NotHolder, Extended, NotHolder, Extended]);
    let force = ForceReleaseRequest::new(key(1), Duration::ZERO, terms);
    let forced = store.force_release(force).await.expect("a majority");
    assert!(matches!(forced, ForceReleaseReply::Revoked { .. }), "{forced:?}");
}
