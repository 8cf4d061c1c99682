//! Processes of the recorded version and of the current one share a real server. The recorded ones
//! are played by their scripts (`tests/simulator/recorded/`).

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::Instant};
use tower_lock::{
    AcquisitionId, RedisStore,
    store::{
        AcquireReply, AcquireRequest, EventSink, ForceReleaseReply, ForceReleaseRequest, IfBusy, LockStore,
        QueueConfig, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreEvent, YieldReply, YieldRequest,
    },
};
use tower_lock_testkit::store::StoreExt;
use tower_lock_testkit::{Connection, Reply};
use tower_lock_testkit::{
    locks::key,
    wait::{ms, soon, until},
};

use crate::support::{Environment, NAME, QUEUE, environment};

const RECORD: &str = "tower-lock:lock:r:{lock:k}";
const INBOXES: &str = "tower-lock:lock:in:";

const FENCES: &str = "tower-lock:lock:f";
const LEASE: Duration = ms(30_000);
const TERMS: QueueConfig = QueueConfig::new(ms(20_000), ms(20_000), 8);

macro_rules! recorded {
    ($name:literal) => {
        include_str!(concat!("../../simulator/recorded/scripts/", $name, ".lua"))
    };
}

/// A process of either version, with its own ids and channel.
enum Process {
    Recorded {
        calls: Connection,
        messages: Connection,
    },
    Current {
        store: RedisStore,
        messages: mpsc::UnboundedReceiver<StoreEvent>,
        /// Keeps the sink open.
        _sender: Arc<mpsc::UnboundedSender<StoreEvent>>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grant {
    Granted(u64),
    Queued(usize),
}

impl Process {
    async fn recorded(environment: &Environment) -> Self {
        let mut messages = environment.redis.connect().await;
        messages.command(&["SUBSCRIBE", "tower-lock:lock:in:recorded:01"]).await.expect("a reply");
        Self::Recorded { calls: environment.redis.connect().await, messages }
    }

    async fn current(environment: &Environment) -> Self {
        let store = RedisStore::connect(&environment.redis.url()).await.expect("it is up");
        let (send, messages) = mpsc::unbounded_channel();
        let sender = Arc::new(send);
        let receive = |send: &Arc<mpsc::UnboundedSender<StoreEvent>>, event| drop(send.send(event));
        store.subscribe(EventSink::new("current:01", &sender, receive));
        Self::Current { store, messages, _sender: sender }
    }

    async fn pair(environment: &Environment, recorded_first: bool) -> (Self, Self) {
        let (recorded, current) = (Self::recorded(environment).await, Self::current(environment).await);
        if recorded_first { (recorded, current) } else { (current, recorded) }
    }

    fn id(&self, number: u64) -> String {
        match self {
            Self::Recorded { .. } => format!("recorded:01:{number}"),
            Self::Current { .. } => format!("current:01:{number}"),
        }
    }

    async fn acquire(&mut self, id: &str) -> Grant {
        match self {
            Self::Recorded { calls, .. } => {
                let until = until_later(calls).await;
                let args = [FENCES, &until, "20000", "20000", "8", id, "30000", "enqueue", QUEUE];
                let reply = eval(calls, recorded!("acquire"), &[NAME], &args).await;
                recorded_grant(&reply)
            }
            Self::Current { store, .. } => {
                let request =
                    AcquireRequest::new(key(), AcquisitionId::from_text(id), LEASE, IfBusy::Enqueue, TERMS, ms(5_000));
                current_grant(store.acquire_one(request).await.expect("a reply"))
            }
        }
    }

    /// `None`: the holder continues under a new fence.
    async fn yields(&mut self, id: &str, fence: u64, next: &str) -> Option<Grant> {
        match self {
            Self::Recorded { calls, .. } => {
                let until = until_later(calls).await;
                let fence = fence.to_string();
                let args = [FENCES, &until, "20000", "20000", "8", next, "30000", id, &fence, QUEUE];
                let reply = eval(calls, recorded!("yield"), &[NAME], &args).await;
                (reply.items()[1].text() != Some("extended")).then(|| recorded_grant(&reply))
            }
            Self::Current { store, .. } => {
                let (id, next) = (AcquisitionId::from_text(id), AcquisitionId::from_text(next));
                let request = YieldRequest::new(key(), id, fence, next, LEASE, TERMS, ms(5_000));
                match store.yield_to_queue(request).await.expect("a reply") {
                    YieldReply::NotHolder(acquired) => Some(current_grant(acquired)),
                    _ => None,
                }
            }
        }
    }

    async fn release(&mut self, id: &str, block_for: Duration) -> &'static str {
        match self {
            Self::Recorded { calls, .. } => {
                let args = [FENCES, "20000", id, &block_for.as_millis().to_string(), QUEUE];
                let reply = eval(calls, recorded!("release"), &[NAME], &args).await;
                match reply.text().or_else(|| reply.items()[0].text()) {
                    Some("freed") => "freed",
                    Some("handed off") => "offered",
                    Some("not holder") => "not holder",
                    _ => panic!("{reply:?}"),
                }
            }
            Self::Current { store, .. } => {
                let request = ReleaseRequest::new(key(), AcquisitionId::from_text(id), block_for, TERMS);
                match store.release_one(request).await.expect("a reply") {
                    ReleaseReply::Freed => "freed",
                    ReleaseReply::HandedOff => "offered",
                    ReleaseReply::NotHolder => "not holder",
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    async fn renews(&mut self, id: &str, lease: Duration) -> bool {
        match self {
            Self::Recorded { calls, .. } => {
                let reply = eval(calls, recorded!("renew"), &[NAME], &[id, &lease.as_millis().to_string()]).await;
                reply.items()[0].integer().expect("a number") == 1
            }
            Self::Current { store, .. } => {
                let request = RenewRequest::new(key(), AcquisitionId::from_text(id), lease);
                store.renew(vec![request]).await.expect("a reply") == [RenewReply::Extended]
            }
        }
    }

    /// The id that was revoked. `None`: a lock-delay was ended.
    async fn force_release(&mut self, block_for: Duration) -> Option<String> {
        match self {
            Self::Recorded { calls, .. } => {
                let args = [FENCES, &block_for.as_millis().to_string(), "20000", QUEUE];
                let reply = eval(calls, recorded!("force"), &[NAME], &args).await;
                match reply.items() {
                    [revoked, id] if revoked.text() == Some("revoked") => id.text().map(str::to_owned),
                    [unblocked, _] if unblocked.text() == Some("unblocked") => None,
                    _ => panic!("{reply:?}"),
                }
            }
            Self::Current { store, .. } => {
                match store.force_release(ForceReleaseRequest::new(key(), block_for, TERMS)).await.expect("a reply") {
                    ForceReleaseReply::Revoked { holder } => Some(holder.to_string()),
                    ForceReleaseReply::Unblocked { .. } => None,
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    /// The id and the fence of the holder, and the number of waiters.
    async fn inspect(&mut self) -> (Option<(String, u64)>, usize) {
        match self {
            Self::Recorded { calls, .. } => {
                let reply = eval(calls, recorded!("inspect"), &[NAME], &[INBOXES, QUEUE, RECORD]).await;
                let [_, waiting, _, _, holder @ ..] = reply.items() else { panic!("{reply:?}") };
                let text = |reply: &Reply| reply.text().expect("text").to_owned();
                let holder = match holder {
                    [id, fence] if !text(id).ends_with(":end") => {
                        Some((text(id), text(fence).parse().expect("a number")))
                    }
                    _ => None,
                };
                (holder, waiting.integer().and_then(|waiting| waiting.try_into().ok()).expect("a number"))
            }
            Self::Current { store, .. } => {
                let inspected = store.inspect(key()).await.expect("a reply");
                (inspected.holder().map(|holder| (holder.id.to_string(), holder.fence)), inspected.waiting)
            }
        }
    }

    /// The next message to this process: its kind and id.
    async fn message(&mut self) -> (&'static str, String) {
        let message = async {
            match self {
                Self::Recorded { messages, .. } => {
                    let message = messages.next().await.expect("a message");
                    let payload = message.items()[2].text().expect("text");
                    let [format, event, _, id, lock] = payload.split(' ').collect::<Vec<_>>()[..] else {
                        panic!("{payload}")
                    };
                    assert_eq!((format, lock), ("1", NAME), "{payload}");
                    match event {
                        "offered" => ("offered", id.to_owned()),
                        "revoked" => ("revoked", id.to_owned()),
                        _ => panic!("{payload}"),
                    }
                }
                Self::Current { messages, .. } => loop {
                    let (event, of, id) = match messages.recv().await.expect("a message") {
                        StoreEvent::Offered { key, id: owner } => ("offered", key, owner),
                        StoreEvent::Revoked { key, id: owner } => ("revoked", key, owner),
                        // A new connection.
                        _ => continue,
                    };
                    assert_eq!(of, key());
                    break (event, id.to_string());
                },
            }
        };
        soon("a message", message).await
    }
}

async fn eval(connection: &mut Connection, script: &str, keys: &[&str], args: &[&str]) -> Reply {
    let count = keys.len().to_string();
    let words = [&["EVAL", script, &count], keys, args].concat();
    let reply = connection.command(&words).await.expect("a reply");
    assert!(!matches!(reply, Reply::Error(_)), "{reply:?}");
    reply
}

/// The expiry of a call by the server clock, in microseconds.
async fn until_later(connection: &mut Connection) -> String {
    let time = connection.command(&["TIME"]).await.expect("a reply");
    let seconds = time.items()[0].integer().expect("a number");
    format!("{}000000", seconds + 5)
}

fn recorded_grant(reply: &Reply) -> Grant {
    if let Some(now) = reply.text() {
        return Grant::Granted(now.parse().expect("a fence"));
    }
    let [_now, result, rest @ ..] = reply.items() else { panic!("{reply:?}") };
    match (result.text(), rest) {
        (Some("granted"), [fence]) => Grant::Granted(fence.text().expect("a text").parse().expect("a fence")),
        (Some("queued"), [_left, ahead]) => Grant::Queued(ahead.integer().expect("a number").try_into().expect("few")),
        _ => panic!("{reply:?}"),
    }
}

fn current_grant(acquired: AcquireReply) -> Grant {
    match acquired {
        AcquireReply::Granted { fence } => Grant::Granted(fence),
        AcquireReply::Queued { ahead, .. } => Grant::Queued(ahead),
        other => panic!("{other:?}"),
    }
}

fn fence(grant: Grant) -> u64 {
    let Grant::Granted(fence) = grant else { panic!("{grant:?}") };
    fence
}

#[tokio::test]
async fn key_passes_between_versions_in_queue_order() {
    let Some(environment) = environment().await else { return };
    for recorded_first in [true, false] {
        let (mut one, mut two) = Process::pair(&environment, recorded_first).await;
        let [a, b, c] = [one.id(1), two.id(1), one.id(2)];
        let first = fence(one.acquire(&a).await);
        assert_eq!(one.acquire(&a).await, Grant::Granted(first), "repeated");
        assert_eq!(two.acquire(&b).await, Grant::Queued(0));
        assert_eq!(one.acquire(&c).await, Grant::Queued(1));
        assert_eq!(two.acquire(&b).await, Grant::Queued(0), "repeated");
        for process in [&mut one, &mut two] {
            assert_eq!(process.inspect().await, (Some((a.clone(), first)), 2));
        }

        assert_eq!(one.release(&a, ms(0)).await, "offered");
        assert_eq!(two.message().await, ("offered", b.clone()));
        let second = fence(two.acquire(&b).await);
        assert!(second > first, "{second} after {first}");
        for process in [&mut one, &mut two] {
            assert_eq!(process.inspect().await, (Some((b.clone(), second)), 1));
        }

        // The other process is served between two sections of one process.
        let next = two.id(2);
        assert_eq!(two.yields(&b, second, &next).await, Some(Grant::Queued(0)));
        assert_eq!(one.message().await, ("offered", c.clone()));
        let third = fence(one.acquire(&c).await);
        assert!(third > second, "{third} after {second}");

        // A waiter of the other version cancels.
        assert_eq!(two.release(&next, ms(0)).await, "not holder");
        assert_eq!(one.yields(&c, third, &one.id(3)).await, None, "the queue is empty");
        assert_eq!(one.release(&c, ms(0)).await, "freed");
        assert_eq!(two.release(&c, ms(0)).await, "not holder");
        environment.wait_until_clean().await;
    }
}

/// Each version finds the grant of the other under its id.
#[tokio::test]
async fn grant_of_one_version_works_with_the_other() {
    let Some(environment) = environment().await else { return };
    for recorded_first in [true, false] {
        let (mut one, mut two) = Process::pair(&environment, recorded_first).await;
        let [a, b] = [one.id(1), two.id(1)];
        let granted = one.acquire(&a).await;
        assert!(two.renews(&a, ms(90_000)).await);
        let left = environment.command(&["PTTL", NAME]).await.integer().expect("a number");
        assert!((60_000..=90_000).contains(&left), "{left}");
        assert!(one.renews(&a, ms(10)).await);
        assert!(environment.command(&["PTTL", NAME]).await.integer() > Some(30_000), "a renewal shortens no lease");
        assert!(!two.renews(&b, LEASE).await);
        assert_eq!(two.acquire(&a).await, granted);
        // A copy of a yield that was done: the fence is a later one.
        let fence = fence(granted);
        assert_eq!(two.yields(&a, fence - 1, &b).await, None);
        assert_eq!(one.inspect().await, (Some((a.clone(), fence)), 0), "a copy changes nothing");
        assert_eq!(two.release(&a, ms(0)).await, "freed");
        assert!(!one.renews(&a, LEASE).await);
        environment.wait_until_clean().await;
    }
}

#[tokio::test]
async fn key_is_revoked_from_a_holder_of_the_other_version() {
    let Some(environment) = environment().await else { return };
    for recorded_first in [true, false] {
        let (mut one, mut two) = Process::pair(&environment, recorded_first).await;
        let [a, b] = [one.id(1), two.id(1)];
        fence(one.acquire(&a).await);
        assert_eq!(two.acquire(&b).await, Grant::Queued(0));
        assert_eq!(two.force_release(ms(60_000)).await.as_ref(), Some(&a));
        assert_eq!(one.message().await, ("revoked", a.clone()));
        assert!(!one.renews(&a, LEASE).await);
        assert_eq!(one.release(&a, ms(0)).await, "not holder");
        for process in [&mut one, &mut two] {
            assert_eq!(process.inspect().await, (None, 1), "blocked");
        }
        // A second call within that time has the same reply in either version.
        assert_eq!(one.force_release(ms(60_000)).await.as_ref(), Some(&a));
        assert_eq!(one.message().await, ("revoked", a.clone()));
        assert_eq!(two.acquire(&b).await, Grant::Queued(0));
        // A shorter one ends it.
        assert_eq!(one.force_release(ms(1_000)).await, None);
        assert_eq!(two.message().await, ("offered", b.clone()));
        fence(two.acquire(&b).await);
        assert_eq!(two.release(&b, ms(0)).await, "freed");
        environment.wait_until_clean().await;
    }
}

#[tokio::test]
async fn lock_delay_of_one_version_blocks_the_other() {
    let Some(environment) = environment().await else { return };
    for recorded_first in [true, false] {
        let (mut one, mut two) = Process::pair(&environment, recorded_first).await;
        let [a, b] = [one.id(1), two.id(1)];
        fence(one.acquire(&a).await);
        assert_eq!(one.release(&a, ms(60_000)).await, "freed");
        assert_eq!(two.acquire(&b).await, Grant::Queued(0), "blocked");
        assert_eq!(two.inspect().await, (None, 1));
        assert!(!two.renews(&a, LEASE).await);
        assert_eq!(two.release(&a, ms(0)).await, "not holder");
        assert_eq!(two.force_release(ms(60_000)).await, None);
        assert_eq!(two.message().await, ("offered", b.clone()));
        fence(two.acquire(&b).await);
        assert_eq!(two.release(&b, ms(2_000)).await, "freed");
        assert_eq!(one.acquire(&one.id(2)).await, Grant::Queued(0), "blocked");
        until("granted", async || matches!(one.acquire(&one.id(2)).await, Grant::Granted(_))).await;
        assert_eq!(one.release(&one.id(2), ms(0)).await, "freed");
        environment.wait_until_clean().await;
    }
}

/// A whole process of the current version: its waiters and holders understand the messages.
#[tokio::test]
async fn current_version_shares_a_server_with_the_recorded_one() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("current").await;
    let mut old = Process::recorded(&environment).await;
    let [a, b] = [old.id(1), old.id(2)];
    let first = fence(old.acquire(&a).await);
    let waiting = tokio::spawn(locks.lock(key()).into_future());
    until("queued", async || environment.command(&["LLEN", QUEUE]).await.integer() == Some(1)).await;
    assert_eq!(old.release(&a, ms(0)).await, "offered");
    let guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
    assert!(guard.fencing_token().as_u64() > first << 10);

    assert_eq!(old.acquire(&b).await, Grant::Queued(0));
    guard.release().await.expect("held");
    assert_eq!(old.message().await, ("offered", b.clone()));
    fence(old.acquire(&b).await);
    let revoked = locks.force_release(key()).await.expect("a reply");
    assert_eq!(revoked.holder().map(ToString::to_string), Some(b.clone()));
    assert_eq!(old.message().await, ("revoked", b));

    let guard = soon("after the lock-delay", locks.lock(key()).into_future()).await.expect("a grant");
    let holder = old.inspect().await.0.expect("held").0;
    let revoked_at = Instant::now();
    assert_eq!(old.force_release(ms(1_000)).await, Some(holder));
    soon("revoked", guard.held_lock().lost()).await;
    assert!(revoked_at.elapsed() < ms(6_000), "by the message, before the next renewal: {:?}", revoked_at.elapsed());
    drop(guard);
    environment.wait_until_clean().await;
}
