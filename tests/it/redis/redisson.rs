//! Messages to Redisson and from it, on raw keys. A connection stands for its client.

use std::{
    future::IntoFuture,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use tokio::time::{Instant, sleep};
use tower_lock::{LockKey, LockManager};
use tower_lock_testkit::{
    Connection, RedisServer, Reply, costs, limits,
    locks::key,
    log::Log,
    wait::{ms, until},
};

use crate::{
    connecting::{smallest_acl, user},
    support::{environment, granted, served},
};

pub(crate) const RAW: &str = "myLock";
const CHANNEL: &str = "redisson_lock__channel:{myLock}";
const OWN_CHANNEL: &str = "tower-lock:lock:in:raw:{myLock}";
const RAW_QUEUE: &str = "tower-lock:lock:q:{myLock}";
const HOLDER: &str = "8b1b3cd2-2f9a-4d6e-9c56-6f0a2a1f0f3e:57";

pub(crate) fn raw() -> LockKey {
    LockKey::raw(RAW).expect("a name")
}

/// A client of Redisson.
#[derive(Clone, Copy)]
pub(crate) struct Redisson<'a> {
    /// The server that has the lock.
    master: &'a RedisServer,
    /// The server at which it waits for messages.
    node: &'a RedisServer,
    /// As it does on a Cluster.
    is_sharded: bool,
    name: &'static str,
    channel: &'static str,
}

/// A client of Redisson that waits.
pub(crate) struct Waiting<'a> {
    connection: Connection,
    client: Redisson<'a>,
}

impl<'a> Redisson<'a> {
    pub(crate) fn at(master: &'a RedisServer) -> Self {
        Self { master, node: master, is_sharded: false, name: RAW, channel: CHANNEL }
    }

    /// The same on a Cluster: it subscribes at any node, or to a sharded channel at the master.
    pub(crate) fn with_node(self, node: Option<&'a RedisServer>) -> Self {
        Self { node: node.unwrap_or(self.master), is_sharded: node.is_none(), ..self }
    }

    pub(crate) async fn waits(self) -> Waiting<'a> {
        let mut connection = self.node.connect().await;
        let command = if self.is_sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" };
        let reply = connection.command(&[command, self.channel]).await.expect("a reply");
        assert_eq!(reply.items()[0].text(), Some(&*command.to_lowercase()), "{reply:?}");
        Waiting { connection, client: self }
    }

    pub(crate) async fn locks(self) {
        self.master.command(&["HSET", self.name, HOLDER, "1"]).await;
        self.master.command(&["PEXPIRE", self.name, "100000"]).await;
    }

    pub(crate) async fn unlocks(self) {
        self.master.command(&["DEL", self.name]).await;
        self.master.command(&["PUBLISH", self.channel, "0"]).await;
    }

    pub(crate) async fn is_free(self) -> bool {
        self.master.command(&["EXISTS", self.name]).await.integer() == Some(0)
    }

    async fn subscribers(self, channel: &str) -> i64 {
        self.master.command(&["PUBSUB", "NUMSUB", channel]).await.items()[1].integer().expect("a number")
    }

    pub(crate) async fn until_queued(self, count: i64) {
        until("queued", async || self.master.command(&["LLEN", RAW_QUEUE]).await.integer() == Some(count)).await;
    }

    /// A wait for a raw key listens to its channel.
    pub(crate) async fn until_listening(self, count: i64) {
        until("listening", async || self.subscribers(OWN_CHANNEL).await == count).await;
    }
}

impl Waiting<'_> {
    /// Whether a message has come. Another one, sent now, comes behind it.
    pub(crate) async fn is_woken(&mut self) -> bool {
        let publish = if self.client.is_sharded { "SPUBLISH" } else { "PUBLISH" };
        self.client.master.command(&[publish, self.client.channel, "mark"]).await;
        let mut texts = Vec::new();
        while texts.last().is_none_or(|last| last != "mark") {
            let message = self.connection.next().await.expect("connected");
            assert!(matches!(message.items()[0].text(), Some("message" | "smessage")), "{message:?}");
            texts.push(message.items()[2].text().expect("a text").to_owned());
        }
        assert!(matches!(texts.len(), 1 | 2) && (texts.len() == 1 || texts[0] == "0"), "{texts:?}");
        texts.len() == 2
    }
}

// --- what holds at each server and on a Cluster ---

pub(crate) async fn each_release_wakes(client: Redisson<'_>, locks: &LockManager) {
    let raw = || LockKey::raw(client.name).expect("a name");
    let mut waiting = client.waits().await;
    locks.lock(raw()).await.expect("free").release().await.expect("held");
    assert!(waiting.is_woken().await, "a release");
    // Redisson asks, and sees the TTL of the block.
    drop(locks.lock(raw()).await.expect("free"));
    let guard = locks.lock(raw()).await.expect("after the lock-delay");
    assert!(waiting.is_woken().await, "a block");
    locks.force_release(raw()).await.expect("up");
    assert!(waiting.is_woken().await, "a force release");
    drop(guard);
    assert!(!waiting.is_woken().await);
    locks.force_release(raw()).await.expect("up");
}

pub(crate) async fn redisson_excludes_and_wakes(client: Redisson<'_>, locks: &LockManager) {
    client.locks().await;
    locks.try_lock(raw()).await.expect_err("held by Redisson");
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    client.until_queued(1).await;
    client.until_listening(1).await;
    // Without messages it asks about once a second.
    let (before, began) = (costs::scripts(client.master).await, Instant::now());
    until("it asks after messages", async || {
        client.master.command(&["PUBLISH", client.channel, "0"]).await;
        sleep(ms(20)).await;
        costs::scripts(client.master).await - before > 2 * began.elapsed().as_secs() + 5
    })
    .await;
    assert!(!waiting.is_finished());
    client.unlocks().await;
    let guard = granted(waiting).await;
    let fields = client.master.command(&["HKEYS", RAW]).await;
    assert!(fields.texts().iter().all(|id| id.starts_with("a:")), "{fields:?}: Redisson sees the lock");
    guard.release().await.expect("held");
    assert!(client.is_free().await);
}

/// The waiters of this crate would keep Redisson out: they use a queue, and it does not.
pub(crate) async fn second_release_leaves_the_key(client: Redisson<'_>, both: &[LockManager; 2]) {
    // Both listen.
    client.locks().await;
    for locks in both {
        locks.lock(raw()).wait(ms(50)).await.expect_err("held");
    }
    client.until_listening(2).await;
    client.unlocks().await;
    let mut waiting = Some(client.waits().await);
    let (mut guard, mut offered_in_a_row) = (both[0].lock(raw()).await.expect("free"), 0);
    for turn in 0..9 {
        if turn == 6 {
            waiting = None;
            until("unsubscribed", async || {
                let sharded = client.master.command(&["PUBSUB", "SHARDNUMSUB", client.channel]).await;
                let sharded = sharded.items().get(1).and_then(Reply::integer);
                sharded.unwrap_or(0) == 0 && client.subscribers(client.channel).await <= 2
            })
            .await;
        }
        let next = tokio::spawn(both[(turn + 1) % 2].lock(raw()).into_future());
        client.until_queued(1).await;
        guard.release().await.expect("held");
        match &mut waiting {
            Some(waiting) => offered_in_a_row = if waiting.is_woken().await { 0 } else { offered_in_a_row + 1 },
            None => assert!(!client.is_free().await, "offered"),
        }
        assert!(offered_in_a_row < 2, "two offers while Redisson waits");
        guard = granted(next).await;
    }
    guard.release().await.expect("held");
}

/// Guarantee: G5.
#[tokio::test]
async fn release_of_a_raw_key_wakes_redisson() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let client = Redisson::at(&environment.redis);
    each_release_wakes(client, &locks).await;
    let (name, channel) = ("shop{7}:x", "redisson_lock__channel:shop{7}:x");
    each_release_wakes(Redisson { name, channel, ..client }, &locks).await;
    environment.wait_until_clean().await;
}

#[tokio::test]
async fn composed_key_sends_nothing_to_redisson() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let mut client = environment.redis.connect().await;
    client.command(&["PSUBSCRIBE", "*redisson*"]).await.expect("a reply");
    let guard = one.lock(key()).await.expect("free");
    let waiter = environment.waiter(&two).await;
    guard.release().await.expect("held");
    served(waiter).await;
    one.force_release(key()).await.expect("up");
    let channels = environment.command(&["PUBSUB", "CHANNELS", "*"]).await;
    assert!(channels.texts().iter().all(|name| !name.contains("redisson") && !name.contains("raw:")), "{channels:?}");
    environment.command(&["PUBLISH", "redisson", "mark"]).await;
    let message = client.next().await.expect("connected");
    assert_eq!(message.items()[3].text(), Some("mark"), "the first one");
}

/// Guarantee: G5.
#[tokio::test]
async fn release_of_redisson_wakes_a_waiter() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    for _ in 0..2 {
        redisson_excludes_and_wakes(Redisson::at(&environment.redis), &locks).await;
    }
    environment.wait_until_clean().await;
}

/// Another connection for messages has the same channels. A process listens only for a key with a
/// waiter, and not for ever.
#[tokio::test]
async fn waiter_listens_after_a_reconnect_and_not_for_ever() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let client = Redisson::at(&environment.redis);
    client.locks().await;
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    client.until_listening(1).await;
    environment.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    until("listening again", async || client.subscribers(OWN_CHANNEL).await == 1).await;
    assert_eq!(client.subscribers(CHANNEL).await, 1);
    client.unlocks().await;
    granted(waiting).await.release().await.expect("held");
    let other = LockKey::raw("other").expect("a name");
    locks.lock(other).await.expect("free").release().await.expect("held");
    assert_eq!(client.subscribers("redisson_lock__channel:{other}").await, 0, "it did not wait");
    client.until_listening(0).await;
    assert_eq!(client.subscribers(CHANNEL).await, 0);
}

/// Guarantee: G5.
#[tokio::test]
async fn flood_of_messages_makes_ten_calls_a_second() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let client = Redisson::at(&environment.redis);
    client.locks().await;
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    client.until_listening(1).await;
    let mut flood = environment.redis.connect().await;
    let (before, began) = (environment.scripts().await, Instant::now());
    for _ in 0..60 {
        for _ in 0..20 {
            flood.command(&["PUBLISH", CHANNEL, "0"]).await.expect("connected");
        }
        sleep(ms(5)).await;
    }
    let scripts = environment.scripts().await - before;
    let tenths = u64::try_from(began.elapsed().as_millis() / 100).expect("few");
    // One at once, and the polls of each second.
    assert!((1..=2 + tenths + tenths / 5).contains(&scripts), "{scripts} scripts in {tenths} tenths of a second");
    client.unlocks().await;
    granted(waiting).await.release().await.expect("held");
}

/// Guarantee: G5.
#[tokio::test]
async fn second_release_leaves_the_key_to_redisson() {
    let Some(environment) = environment().await else { return };
    let both = [environment.direct_instance("a").await, environment.direct_instance("b").await];
    second_release_leaves_the_key(Redisson::at(&environment.redis), &both).await;
    environment.wait_until_clean().await;
}

/// A process that acquires again at once would overtake a thread that has to wake up.
/// Guarantee: G5.
#[tokio::test]
async fn key_left_to_redisson_is_not_taken_by_a_new_waiter() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let client = Redisson::at(&environment.redis);
    let _waiting = client.waits().await;
    let mut reserved = 0;
    until("the key is reserved", async || {
        locks.lock(raw()).await.expect("free").release().await.expect("held");
        let waiting = tokio::spawn(locks.lock(raw()).into_future());
        // The call of the new waiter finds the key free, and enqueues.
        let is_queued = async || environment.command(&["LLEN", RAW_QUEUE]).await.integer() == Some(1);
        until("it has asked", async || is_queued().await || !client.is_free().await).await;
        reserved += u32::from(client.is_free().await);
        // Redisson did not come.
        granted(waiting).await.release().await.expect("held");
        sleep(ms(50)).await;
        reserved == 3
    })
    .await;
}

/// The sections of one process follow each other for a tenth of a second.
#[tokio::test]
async fn local_handoffs_yield_to_redisson() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let mut waiting = Redisson::at(&environment.redis).waits().await;
    let is_over = Arc::new(AtomicBool::new(false));
    let work = [(); 4].map(|()| {
        let (locks, is_over) = (locks.clone(), Arc::clone(&is_over));
        tokio::spawn(async move {
            while !is_over.load(SeqCst) {
                let guard = locks.lock(raw()).await.expect("a grant");
                sleep(ms(2)).await;
                guard.release().await.expect("held");
            }
        })
    });
    for _ in 0..3 {
        let message = waiting.connection.next().await.expect("connected");
        assert_eq!(message.items()[2].text(), Some("0"), "its turn");
    }
    is_over.store(true, SeqCst);
    for work in work {
        work.await.expect("no panic");
    }
}

/// Guarantee: G5.
#[tokio::test]
async fn missing_permission_for_the_channel_is_one_warning() {
    let Some(environment) = environment().await else { return };
    let log = Log::default();
    let _listening = log.listen();
    let url = user(&environment.redis, &smallest_acl_for_raw(false)).await;
    let locks = LockManager::new(limits::redis().connect(&url).await.expect("it is enough"));
    let client = Redisson::at(&environment.redis);
    let warnings = || log.text().lines().filter(|line| line.contains("redisson_lock__channel:*")).count();
    client.locks().await;
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    client.until_queued(1).await;
    until("warned", async || warnings() > 0).await;
    for text in ["the user `locks` of Redis", "Add the ACL rule `&redisson_lock__channel:*`"] {
        assert!(log.text().contains(text), "{}", log.text());
    }
    client.unlocks().await;
    // At the next poll. The release is complete although its message is refused.
    let guard = granted(waiting).await;
    let mut waits = client.waits().await;
    guard.release().await.expect("held");
    assert!(client.is_free().await);
    assert!(!waits.is_woken().await);
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
    let kill = ["CLIENT", "KILL", "TYPE", "pubsub", "USER", "locks"];
    environment.command(&kill).await;
    until("connected again", async || {
        environment.command(&["CLIENT", "LIST", "TYPE", "pubsub"]).await.text().expect("text").contains(" user=locks ")
    })
    .await;
    locks.lock(raw()).await.expect("free").release().await.expect("held");
    // Alone it would hide Redisson. It is refused together with the other one, a reply later.
    until("it does not listen", async || client.subscribers(OWN_CHANNEL).await == 0).await;
    assert_eq!(warnings(), 1, "{}", log.text());
    // With the rule of the guide it is woken.
    user(&environment.redis, &smallest_acl_for_raw(true)).await;
    environment.command(&kill).await;
    client.locks().await;
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    client.until_listening(1).await;
    client.unlocks().await;
    granted(waiting).await.release().await.expect("held");
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
    let mut calls = Vec::new();
    for key in [key(), raw()] {
        for _ in 0..2 {
            locks.try_lock(key.clone()).await.expect("free").release().await.expect("held");
        }
        environment.command(&["CONFIG", "RESETSTAT"]).await;
        environment.proxy.forget_requests();
        for _ in 0..20 {
            locks.try_lock(key.clone()).await.expect("free").release().await.expect("held");
        }
        assert_eq!(environment.requests(), 40, "{key}: no round trip more");
        let commands = ["exists", "time", "set", "hset", "pexpire", "hdel", "lpop", "hget", "publish"];
        calls.push(environment.calls(commands).await);
    }
    assert_eq!(calls, [[20, 20, 20, 20, 20, 20, 20, 0, 0], [20; 9]], "a composed key, and a raw one");
}
