//! The data in Redis, for operators and for services in other languages.

use std::time::{Duration, SystemTime};

use tower_lock::{
    AcquisitionId, LockError, LockKey,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, DeleteRecordReply, IfBusy, LockStore, QueueConfig, ReleaseReply,
        RenewReply, RenewRequest,
    },
};
use tower_lock_testkit::{
    Direction,
    locks::key,
    store::{StoreExt, open_sink},
    wait::{ms, soon, until},
};

use crate::support::{LONG, NAME, QUEUE, environment, granted, pass, release, served};

/// The format of Redisson: a hash with one field and a TTL.
#[tokio::test]
async fn lock_is_a_hash_of_one_field_with_a_ttl() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.direct_instance("api-7f3").await, environment.direct_instance("api-9c1").await);
    let guard = one.lock(key()).await.expect("free");
    let hash = environment.command(&["HGETALL", NAME]).await;
    let [field, fence] = hash.items() else { panic!("{hash:?}") };
    let (field, fence) = (field.text().expect("text"), fence.text().expect("text"));
    let id = field.strip_prefix("api-7f3:").and_then(|rest| rest.split_once(':')).expect("instance:random:number");
    assert!(id.0.len() == 16 && id.1.parse::<u64>().is_ok(), "{field}");
    assert_eq!(fence.parse::<u64>().expect("a number") << 10, guard.fencing_token().as_u64());
    let ttl = environment.command(&["PTTL", NAME]).await.integer().expect("a number");
    assert!((1..=31_000).contains(&ttl), "a lease and a lock-delay: {ttl}");

    let waiting = environment.waiter(&two).await;
    let queue = environment.command(&["LRANGE", QUEUE, "0", "-1"]).await;
    assert!(queue.texts()[0].starts_with("api-9c1:"), "{queue:?}");
    let ttl = environment.command(&["PTTL", QUEUE]).await.integer().expect("a number");
    assert!((1..=10_000).contains(&ttl), "the queue has a TTL, too: {ttl}");
    guard.release().await.expect("held");
    let guard = granted(waiting).await;
    assert_eq!(environment.command(&["EXISTS", QUEUE]).await.integer(), Some(0));
    // A dropped guard blocks the key for the lock-delay, without a holder.
    drop(guard);
    until("kept, or the lock-delay has passed", async || {
        let fields = environment.command(&["HKEYS", NAME]).await;
        fields.texts().iter().all(|field| field.ends_with(":end"))
    })
    .await;
    let ttl = environment.command(&["PTTL", NAME]).await.integer().expect("a number");
    assert!((-2..=1_000).contains(&ttl), "{ttl}");
    environment.wait_until_clean().await;
}

/// Guarantee: G5.
#[tokio::test]
async fn redisson_lock_excludes_and_is_not_touched() {
    let Some(environment) = environment().await else { return };
    let name = LockKey::raw("myLock").expect("a name");
    let java = "8b1b3cd2-2f9a-4d6e-9c56-6f0a2a1f0f3e:57";
    environment.command(&["HSET", "myLock", java, "2"]).await;
    environment.command(&["PEXPIRE", "myLock", "600000"]).await;
    let locks = environment.direct_instance("a").await;
    match locks.try_lock(name.clone()).await {
        Err(LockError::Busy { lease_left, .. }) => assert!(lease_left <= LONG && lease_left > ms(0)),
        other => panic!("{other:?}"),
    }
    let state = locks.inspect(name.clone()).await.expect("a reply");
    assert_eq!(state.holder().map(|holder| (holder.id.to_string(), holder.since)), Some((java.to_owned(), None)));
    assert_eq!(environment.command(&["HGETALL", "myLock"]).await.texts(), ["2", java], "as it was");
    let waiting = tokio::spawn(locks.lock(name.clone()).into_future());
    until("queued", async || environment.command(&["LLEN", "tower-lock:lock:q:{myLock}"]).await.integer() == Some(1))
        .await;
    // It deletes its lock directly, without a look at the queue.
    environment.command(&["DEL", "myLock"]).await;
    let guard = granted(waiting).await;
    assert_eq!(environment.command(&["HLEN", "myLock"]).await.integer(), Some(1));
    guard.release().await.expect("held");
    environment.wait_until_clean().await;
}

/// This crate never writes such a lock, and never deletes it.
#[tokio::test]
async fn lock_without_a_ttl_excludes_until_deleted() {
    let Some(environment) = environment().await else { return };
    environment.command(&["HSET", NAME, "foreign", "1"]).await;
    let locks = environment.direct_instance("a").await;
    assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })));
    let error = locks.lock(key()).wait(ms(300)).await.expect_err("for ever");
    assert!(matches!(error, LockError::TimedOut { .. }), "{error}");
    assert_eq!(locks.inspect(key()).await.expect("a reply").remaining, Duration::MAX);
    assert_eq!(environment.command(&["PTTL", NAME]).await.integer(), Some(-1), "not touched");
    environment.command(&["DEL", NAME]).await;
    pass(&locks).await;
    environment.wait_until_clean().await;
}

/// A later version may let several acquisitions hold one key, with an end of their own each.
#[tokio::test]
async fn lock_of_an_unknown_form_is_busy() {
    let Some(environment) = environment().await else { return };
    let record = "tower-lock:lock:r:{lock:k}";
    environment.command(&["HSET", NAME, "a:01:1", "1700000000123456 1/4 1700000030123"]).await;
    environment.command(&["HSET", NAME, "b:01:1", "1700000000123457 2/4 1700000030123"]).await;
    environment.command(&["PEXPIRE", NAME, "600000"]).await;
    environment.command(&["HSET", record, "id", "c:01:1", "head", "text"]).await;
    let before = environment.command(&["HGETALL", NAME]).await;
    let locks = environment.direct_instance("a").await;
    assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })));
    let error = locks.lock(key()).wait(ms(300)).await.expect_err("held by others");
    assert!(matches!(error, LockError::TimedOut { .. }), "{error}");
    assert!(locks.inspect(key()).await.expect("a reply").holder().is_some());
    let store = environment.direct_store().await;
    let c = AcquisitionId::from_text("c:01:1");
    let renewed = store.renew(vec![RenewRequest::new(key(), c.clone(), LONG)]).await;
    assert_eq!(renewed.expect("a reply"), [RenewReply::NotHolder]);
    let released = store.release_one(release(&key(), &c)).await;
    assert_eq!(released.expect("a reply"), ReleaseReply::NotHolder);
    assert_eq!(store.delete_record(key()).await.expect("a reply"), DeleteRecordReply::Busy);
    assert_eq!(environment.command(&["HGETALL", NAME]).await.texts(), before.texts(), "as it was");
}

#[tokio::test]
async fn inspect_works_from_any_instance() {
    let Some(environment) = environment().await else { return };
    let [one, two, three] = [
        environment.instance_without_renewals("one").await,
        environment.direct_instance("two").await,
        environment.direct_instance("3").await,
    ];
    let before = SystemTime::now();
    let guard = one.lock(key()).await.expect("free");
    let waiting = environment.waiter(&two).await;
    let state = three.inspect(key()).await.expect("a reply");
    assert_eq!(state.holder().expect("held").id.instance(), "one");
    let since = state.holder().and_then(|holder| holder.since).expect("held");
    assert!(since >= before - Duration::from_secs(1) && since <= SystemTime::now() + Duration::from_secs(1));
    assert_eq!(state.waiting, 1);
    assert!(state.remaining > Duration::ZERO && state.remaining <= LONG + Duration::from_secs(1));

    // Revoked by another instance: a message notifies its holder, before the next renewal.
    let revoked = three.force_release(key()).await.expect("a reply");
    let thrown_out = revoked.holder().expect("held");
    assert_eq!(thrown_out.instance(), "one");
    soon("it is notified", guard.held_lock().lost()).await;
    let guard = granted(waiting).await;
    assert_eq!(three.inspect(key()).await.expect("a reply").holder().expect("held").id.instance(), "two");
    guard.release().await.expect("held");
    environment.wait_until_clean().await;
}

/// Its holder does not know yet: the reply is in flight.
#[tokio::test]
async fn key_revoked_before_its_grant_arrives_never_starts() {
    let Some(environment) = environment().await else { return };
    let (one, two, three) = (
        environment.instance("one").await,
        environment.direct_instance("two").await,
        environment.direct_instance("3").await,
    );
    pass(&one).await;
    let listens = environment.proxy.subscribers();
    for number in environment.proxy.connections().into_iter().filter(|number| !listens.contains(number)) {
        environment.proxy.connection(number).hold(Direction::Down);
    }
    let going = tokio::spawn(one.lock(key()).into_future());
    until("granted", async || environment.command(&["EXISTS", NAME]).await.integer() == Some(1)).await;
    assert_eq!(three.force_release(key()).await.expect("a reply").holder().expect("held").instance(), "one");
    let other = two.lock(key()).await.expect("after the lock-delay");
    environment.proxy.all().heal();
    environment.wait_until_queued(1).await;
    assert!(!going.is_finished(), "two at the same time");
    other.release().await.expect("held");
    served(going).await;
    environment.wait_until_clean().await;
}

/// Even if it is full and is swept for dead entries.
#[tokio::test]
async fn queue_has_a_ttl_and_drops_dead_waiters_when_full() {
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    let living = AcquisitionIds::new("living", 1);
    store.subscribe(open_sink(living.next().manager()));
    let request = async |owner: AcquisitionId| {
        let queue = QueueConfig::new(LONG, LONG, 3);
        let request = AcquireRequest::new(key(), owner, LONG, IfBusy::Enqueue, queue, LONG);
        store.acquire_one(request).await.expect("a reply")
    };
    request(living.next()).await;
    let dead = AcquisitionIds::new("dead", 2);
    for owner in [living.next(), dead.next(), living.next()] {
        assert!(matches!(request(owner).await, AcquireReply::Queued { .. }));
    }
    assert!(matches!(request(living.next()).await, AcquireReply::Queued { ahead: 2, .. }), "in place of the dead one");
    assert!(matches!(request(living.next()).await, AcquireReply::QueueFull { .. }));
    assert!(environment.command(&["PTTL", QUEUE]).await.integer().is_some_and(|ttl| ttl > 0));
}

/// Names that differ only in their braces are two locks.
#[tokio::test]
async fn name_and_braced_name_have_separate_queues() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let raw = |name: &str| LockKey::raw(name).expect("a name");
    let guard = one.lock(raw("order")).await.expect("free");
    let waiting = tokio::spawn(two.lock(raw("order")).into_future());
    until("queued", async || one.inspect(raw("order")).await.expect("a reply").waiting == 1).await;
    assert_eq!(one.inspect(raw("{order}")).await.expect("a reply").waiting, 0);
    one.try_lock(raw("{order}")).await.expect("free").release().await.expect("held");
    guard.release().await.expect("held");
    served(waiting).await;
    environment.wait_until_clean().await;
}

/// The procedure of the guide for an operator with `redis-cli`.
#[tokio::test]
async fn lock_deleted_by_redis_cli_is_lost_by_its_holder() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.instance_without_renewals("one").await, environment.direct_instance("two").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = environment.waiter(&two).await;
    let owner = environment.command(&["HKEYS", NAME]).await.texts()[0].to_owned();
    let inbox = format!("tower-lock:lock:in:{}", owner.rsplit_once(':').expect("a number behind it").0);
    environment.command(&["DEL", NAME]).await;
    let message = format!("1 revoked 0 {owner} {NAME}");
    assert_eq!(environment.command(&["PUBLISH", &inbox, &message]).await.integer(), Some(1));
    soon("it is notified", guard.held_lock().lost()).await;
    served(waiting).await;
    environment.wait_until_clean().await;
}
