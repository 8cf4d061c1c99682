//! Messages to Redisson and from it, on raw keys. A connection stands for its client.

use std::{future::IntoFuture, time::Duration};

use tokio::time::{Instant, sleep, timeout};
use tower_lock::{LockKey, LockManager, RedisStore};
use tower_lock_testkit::{
    Connection,
    locks::key,
    log::Log,
    wait::{ms, soon, until},
};

use crate::{
    connecting::{smallest_acl, user},
    support::{Environment, environment},
};

const RAW: &str = "myLock";
const CHANNEL: &str = "redisson_lock__channel:{myLock}";
const OWN_CHANNEL: &str = "tower-lock:lock:in:raw:{myLock}";
const RAW_QUEUE: &str = "tower-lock:lock:q:{myLock}";
const JAVA: &str = "8b1b3cd2-2f9a-4d6e-9c56-6f0a2a1f0f3e:57";

fn raw() -> LockKey {
    LockKey::raw(RAW).expect("a name")
}

/// A client of Redisson that waits.
async fn java_waits(environment: &Environment, channel: &str) -> Connection {
    let mut java = environment.redis.connect().await;
    let reply = java.command(&["SUBSCRIBE", channel]).await.expect("a reply");
    assert_eq!(reply.items()[0].text(), Some("subscribe"), "{reply:?}");
    java
}

/// The payload of the next message. `None`: there is none.
async fn message(java: &mut Connection, limit: Duration) -> Option<String> {
    let message = timeout(limit, java.next()).await.ok()?.expect("connected");
    assert_eq!(message.items()[0].text(), Some("message"), "{message:?}");
    message.items()[2].text().map(ToOwned::to_owned)
}

async fn java_locks(environment: &Environment) {
    environment.command(&["HSET", RAW, JAVA, "1"]).await;
    environment.command(&["PEXPIRE", RAW, "30000"]).await;
}

async fn java_unlocks(environment: &Environment) {
    environment.command(&["DEL", RAW]).await;
    environment.command(&["PUBLISH", CHANNEL, "0"]).await;
}

async fn is_free(environment: &Environment) -> bool {
    environment.command(&["EXISTS", RAW]).await.integer() == Some(0)
}

async fn subscribers(environment: &Environment, channel: &str) -> i64 {
    environment.command(&["PUBSUB", "NUMSUB", channel]).await.items()[1].integer().expect("a number")
}

async fn until_queued(environment: &Environment, count: i64) {
    until("queued", async || environment.command(&["LLEN", RAW_QUEUE]).await.integer() == Some(count)).await;
}

/// The first use of a raw key listens to its channel, and so does a wait.
async fn until_listening(environment: &Environment, count: i64) {
    until("listening", async || subscribers(environment, OWN_CHANNEL).await == count).await;
}

/// Guarantee: G5.
#[tokio::test]
async fn release_of_a_raw_key_wakes_redisson() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    for (name, channel) in [(RAW, CHANNEL), ("shop{7}:x", "redisson_lock__channel:shop{7}:x")] {
        let raw = || LockKey::raw(name).expect("a name");
        let mut java = java_waits(&environment, channel).await;
        locks.lock(raw()).await.expect("free").release().await.expect("held");
        assert_eq!(message(&mut java, ms(5_000)).await.as_deref(), Some("0"), "a release");
        // Redisson asks, and sees the TTL of the block.
        drop(locks.lock(raw()).await.expect("free"));
        assert_eq!(message(&mut java, ms(5_000)).await.as_deref(), Some("0"), "a block");
        let guard = soon("after the lock-delay", locks.lock(raw()).into_future()).await.expect("free");
        locks.force_release(raw()).await.expect("up");
        assert_eq!(message(&mut java, ms(5_000)).await.as_deref(), Some("0"), "a force release");
        drop(guard);
        assert_eq!(message(&mut java, ms(100)).await, None);
    }
    environment.wait_until_clean().await;
}

#[tokio::test]
async fn composed_key_sends_nothing_to_redisson() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let mut java = environment.redis.connect().await;
    java.command(&["PSUBSCRIBE", "redisson*"]).await.expect("a reply");
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("queued", async || one.inspect(key()).await.expect("up").waiting == 1).await;
    guard.release().await.expect("held");
    soon("a grant", waiting).await.expect("no panic").expect("a grant").release().await.expect("held");
    one.force_release(key()).await.expect("up");
    let channels = environment.command(&["PUBSUB", "CHANNELS", "*"]).await;
    assert!(channels.texts().iter().all(|name| !name.contains("redisson") && !name.contains("raw:")), "{channels:?}");
    assert!(timeout(ms(200), java.next()).await.is_err(), "no message");
}

/// Guarantee: G5.
#[tokio::test]
async fn release_of_redisson_wakes_a_waiter() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let mut waits = Vec::new();
    for _ in 0..10 {
        java_locks(&environment).await;
        let waiting = tokio::spawn(locks.lock(raw()).into_future());
        until_queued(&environment, 1).await;
        until_listening(&environment, 1).await;
        // Its poll is a second after the last one.
        sleep(ms(150)).await;
        let freed_at = Instant::now();
        java_unlocks(&environment).await;
        let guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
        waits.push(freed_at.elapsed());
        guard.release().await.expect("held");
    }
    waits.sort_unstable();
    assert!(waits[5] < ms(300), "half of them are not polls: {waits:?}");
    environment.wait_until_clean().await;
}

/// Another connection for messages has the same channels.
#[tokio::test]
async fn waiter_is_woken_after_a_reconnect() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    java_locks(&environment).await;
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    until_listening(&environment, 1).await;
    environment.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    until("disconnected", async || subscribers(&environment, CHANNEL).await == 0).await;
    until_listening(&environment, 1).await;
    assert_eq!(subscribers(&environment, CHANNEL).await, 1);
    java_unlocks(&environment).await;
    soon("a grant", waiting).await.expect("no panic").expect("a grant").release().await.expect("held");
}

/// A process listens only for a key with a waiter, and not for ever.
#[tokio::test]
async fn channel_of_a_key_without_waiters_is_unsubscribed() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    java_locks(&environment).await;
    locks.lock(raw()).wait(ms(100)).await.expect_err("held");
    until_listening(&environment, 1).await;
    let other = LockKey::raw("other").expect("a name");
    locks.lock(other).await.expect("free").release().await.expect("held");
    assert_eq!(subscribers(&environment, "redisson_lock__channel:{other}").await, 0, "it did not wait");
    timeout(Duration::from_secs(60), until_listening(&environment, 0)).await.expect("after ten seconds");
    assert_eq!(subscribers(&environment, CHANNEL).await, 0);
}

/// Guarantee: G5.
#[tokio::test]
async fn flood_of_messages_makes_ten_calls_a_second() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    java_locks(&environment).await;
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    until_listening(&environment, 1).await;
    let (before, began) = (environment.scripts().await, Instant::now());
    for _ in 0..5_000 {
        environment.command(&["PUBLISH", CHANNEL, "0"]).await;
    }
    let scripts = environment.scripts().await - before;
    let tenths = u64::try_from(began.elapsed().as_millis() / 100).expect("few");
    // One at once, and the polls of each second.
    assert!((1..=2 + tenths + tenths / 5).contains(&scripts), "{scripts} scripts in {tenths} tenths of a second");
    java_unlocks(&environment).await;
    soon("a grant", waiting).await.expect("no panic").expect("a grant").release().await.expect("held");
}

/// The waiters of this crate would keep Redisson out: they use a queue, and it does not.
/// Guarantee: G5.
#[tokio::test]
async fn second_release_leaves_the_key_to_redisson() {
    let Some(environment) = environment().await else { return };
    let (a, b) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let both = [a, b];
    // Both listen.
    java_locks(&environment).await;
    for locks in &both {
        locks.lock(raw()).wait(ms(50)).await.expect_err("held");
    }
    until_listening(&environment, 2).await;
    java_unlocks(&environment).await;
    let mut java = java_waits(&environment, CHANNEL).await;
    let (mut guard, mut turn) = (both[0].lock(raw()).await.expect("free"), 0);
    let (mut left, mut offered_in_a_row) = (0, 0);
    for _ in 0..12 {
        let waiting = tokio::spawn(both[1 - turn].lock(raw()).into_future());
        until_queued(&environment, 1).await;
        guard.release().await.expect("held");
        if is_free(&environment).await {
            assert_eq!(message(&mut java, ms(5_000)).await.as_deref(), Some("0"));
            (left, offered_in_a_row) = (left + 1, 0);
            // Redisson has its turn.
            java_locks(&environment).await;
            java_unlocks(&environment).await;
            assert_eq!(message(&mut java, ms(5_000)).await.as_deref(), Some("0"), "its own");
        } else {
            offered_in_a_row += 1;
            assert!(offered_in_a_row < 2, "two offers while Redisson waits");
        }
        guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
        turn = 1 - turn;
    }
    assert!((5..=12).contains(&left), "{left} of 12");
    drop(java);
    until("unsubscribed", async || subscribers(&environment, CHANNEL).await == 2).await;
    // Without it, each release is an offer.
    for _ in 0..4 {
        let waiting = tokio::spawn(both[1 - turn].lock(raw()).into_future());
        until_queued(&environment, 1).await;
        guard.release().await.expect("held");
        assert!(!is_free(&environment).await, "offered");
        guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
        turn = 1 - turn;
    }
    guard.release().await.expect("held");
    environment.wait_until_clean().await;
}

/// A process that acquires again at once would overtake a thread that has to wake up.
/// Guarantee: G5.
#[tokio::test]
async fn key_left_to_redisson_is_not_taken_by_a_new_waiter() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let _java = java_waits(&environment, CHANNEL).await;
    let mut reserved = 0;
    for _ in 0..10 {
        locks.lock(raw()).await.expect("free").release().await.expect("held");
        let waiting = tokio::spawn(locks.lock(raw()).into_future());
        // The call of the new waiter finds the key free, and enqueues.
        let is_queued = async || environment.command(&["LLEN", RAW_QUEUE]).await.integer() == Some(1);
        until("it has asked", async || is_queued().await || !is_free(&environment).await).await;
        reserved += u32::from(is_free(&environment).await);
        // Redisson did not come.
        soon("a grant", waiting).await.expect("no panic").expect("a grant").release().await.expect("held");
        sleep(ms(50)).await;
    }
    assert!(reserved >= 5, "{reserved} of 10");
}

/// The sections of one process follow each other for a tenth of a second.
#[tokio::test]
async fn local_handoffs_yield_to_redisson() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let mut java = java_waits(&environment, CHANNEL).await;
    let work = (0..4).map(|_| {
        let locks = locks.clone();
        tokio::spawn(async move {
            for _ in 0..150 {
                let guard = locks.lock(raw()).await.expect("a grant");
                sleep(ms(2)).await;
                guard.release().await.expect("held");
            }
        })
    });
    let work: Vec<_> = work.collect();
    // More than a second of work.
    let mut turns = 0;
    while let Some(text) = message(&mut java, ms(1_000)).await {
        assert_eq!(text, "0");
        turns += 1;
        if work.iter().all(tokio::task::JoinHandle::is_finished) {
            break;
        }
    }
    for task in work {
        task.await.expect("no panic");
    }
    assert!(turns >= 5, "{turns} turns in a second");
}

/// Guarantee: G5.
#[tokio::test]
async fn missing_permission_for_the_channel_is_one_warning() {
    let Some(environment) = environment().await else { return };
    let log = Log::default();
    let _listening = log.listen();
    let url = user(&environment.redis, &smallest_acl_for_raw(false)).await;
    let locks = LockManager::new(RedisStore::connect(&url).await.expect("it is enough"));
    let warnings = || log.text().lines().filter(|line| line.contains("redisson_lock__channel:*")).count();
    java_locks(&environment).await;
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    until_queued(&environment, 1).await;
    until("warned", async || warnings() > 0).await;
    for text in ["the user `locks` of Redis", "Add the ACL rule `&redisson_lock__channel:*`"] {
        assert!(log.text().contains(text), "{}", log.text());
    }
    java_unlocks(&environment).await;
    let guard = soon("at the next poll", waiting).await.expect("no panic").expect("a grant");
    // The release is complete although its message is refused.
    let mut java = java_waits(&environment, CHANNEL).await;
    guard.release().await.expect("held");
    assert!(is_free(&environment).await);
    assert_eq!(message(&mut java, ms(100)).await, None);
    for name in ["second", "third"] {
        let raw = || LockKey::raw(name).expect("a name");
        let other = environment.direct_instance("b").await;
        let guard = locks.lock(raw()).await.expect("free");
        other.try_lock(raw()).await.expect_err("held");
        guard.release().await.expect("held");
        let guard = other.try_lock(raw()).await.expect("free");
        locks.lock(raw()).wait(ms(200)).await.expect_err("held");
        guard.release().await.expect("held");
    }
    environment.command(&["CLIENT", "KILL", "TYPE", "pubsub", "USER", "locks"]).await;
    sleep(ms(1_500)).await;
    assert_eq!(subscribers(&environment, OWN_CHANNEL).await, 0, "alone it would hide Redisson");
    assert_eq!(warnings(), 1, "{}", log.text());
    // With the rule of the guide it is woken.
    user(&environment.redis, &smallest_acl_for_raw(true)).await;
    environment.command(&["CLIENT", "KILL", "TYPE", "pubsub", "USER", "locks"]).await;
    java_locks(&environment).await;
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    until_listening(&environment, 1).await;
    java_unlocks(&environment).await;
    soon("a grant", waiting).await.expect("no panic").expect("a grant").release().await.expect("held");
}

/// The ACL of the guide, for the names of this test.
fn smallest_acl_for_raw(with_channel: bool) -> Vec<String> {
    let names = ["~myLock", "~second", "~third"].map(ToOwned::to_owned);
    let channel = with_channel.then(|| "&redisson_lock__channel:*".to_owned());
    smallest_acl().into_iter().chain(names).chain(channel).collect()
}

#[tokio::test]
async fn redisson_costs_a_raw_key_commands_and_no_round_trip() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    // A raw key was used before.
    locks.lock(raw()).await.expect("free").release().await.expect("held");
    until_listening(&environment, 1).await;
    let mut calls = Vec::new();
    for key in [key(), raw()] {
        locks.try_lock(key.clone()).await.expect("free").release().await.expect("held");
        environment.command(&["CONFIG", "RESETSTAT"]).await;
        environment.proxy.forget_requests();
        for _ in 0..100 {
            locks.try_lock(key.clone()).await.expect("free").release().await.expect("held");
        }
        let requests = environment.proxy.requests();
        let asked = |name: &str| !["PING", "PUBSUB", "ROLE"].contains(&name);
        let sent: Vec<_> = requests.iter().filter(|(name, _)| asked(name)).collect();
        assert_eq!(sent, [(&"EVALSHA".to_owned(), &200)], "{key}: no round trip more");
        let stats = environment.command(&["INFO", "commandstats"]).await;
        let count = |command: &str| {
            let prefix = format!("cmdstat_{command}:calls=");
            let line = stats.text().expect("text").lines().find_map(|line| line.strip_prefix(&prefix));
            line.map_or(0, |line| line.split(',').next().expect("a number").parse::<u64>().expect("a number"))
        };
        calls.push(["exists", "time", "set", "hset", "pexpire", "hdel", "lpop", "hget", "publish"].map(count));
    }
    assert_eq!(calls[0], [100, 100, 100, 100, 100, 100, 100, 0, 0], "a composed key");
    assert_eq!(calls[1], [100, 100, 100, 100, 100, 100, 100, 100, 100], "a raw key");
}
