//! Replies are lost, a session ends during a wait, and another process revokes a lock.

use std::{sync::Arc, time::Duration};

use tower_lock::{
    LockManager,
    store::{
        AcquireReply, Cursor, EventSink, ForceReleaseRequest, IfBusy, ListRequest, LockStore, ReleaseReply, RenewReply,
        StoreErrorKind, StoreEvent, YieldReply, YieldRequest, ZooKeeperStore,
    },
};
use tower_lock_testkit::{
    Direction, Proxy,
    caller::{Caller, LONG, terms},
    limits,
    locks::key,
    skipped,
    wait::{ms, soon, until},
};

use crate::support::{Environment, environment};

const LEASE: Duration = Duration::from_secs(60);
const SESSION: Duration = Duration::from_secs(610);

/// A store behind a proxy, whose calls have a short timeout.
struct Far {
    proxy: Proxy,
    caller: Caller<ZooKeeperStore>,
    store: Arc<ZooKeeperStore>,
}

impl Far {
    async fn new(environment: &Environment, session: Duration) -> Self {
        let proxy = Proxy::start_raw(environment.servers().address(0)).await;
        let builder = ZooKeeperStore::builder().call_timeout(limits::SHORT).connect_timeout(limits::CONNECT);
        let builder = builder.root(&environment.root).session(session);
        let store = Arc::new(builder.connect(&format!("zookeeper://{}", proxy.address())).await.expect("it is up"));
        Self { proxy, caller: Caller::new(&store, "far"), store }
    }

    /// The server executes the call, and its reply is lost.
    async fn loses_reply<T: std::fmt::Debug, E>(&self, call: impl Future<Output = Result<T, E>>) {
        self.proxy.all().swallow(Direction::Down);
        let reply = call.await;
        assert!(reply.is_err(), "{:?}", reply.ok());
        self.proxy.all().cut();
        self.proxy.all().heal();
        // Not only until the connection is open again.
        until("it is up again", async || self.store.health().await.is_ok()).await;
    }
}

/// The call is made again, and finds what the first one has done.
///
/// Guarantee: G6.
#[tokio::test]
async fn each_call_whose_reply_is_lost_is_made_again() {
    let Some(environment) = environment().await else { return };
    let far = Far::new(&environment, SESSION).await;
    let near = environment.store(SESSION).await;
    let near = Caller::new(&near, "near");
    let (caller, key) = (&far.caller, key());
    let (id, waiter) = (caller.id(), near.id());

    far.loses_reply(caller.acquire(&key, &id, LEASE, IfBusy::Fail)).await;
    let fence = caller.granted(&key, &id, LEASE).await;
    let reply = near.acquire(&key, &waiter, LEASE, IfBusy::Enqueue).await;
    assert!(matches!(reply, Ok(AcquireReply::Queued { ahead: 0, .. })), "one entry alone: {reply:?}");

    far.loses_reply(caller.try_renew(&key, &id)).await;
    assert_eq!(caller.renew(&key, &id).await, RenewReply::Extended);

    // The waiter is behind the holder, so that the next id gets a place behind it.
    let next = caller.id();
    let yields = || {
        let (key, id, next) = (key.clone(), id.clone(), next.clone());
        far.store.yield_to_queue(YieldRequest::new(key, id, fence, next, LEASE, terms(), LONG))
    };
    far.loses_reply(yields()).await;
    let reply = soon("a reply", yields()).await;
    assert!(matches!(reply, Ok(YieldReply::NotHolder(AcquireReply::Queued { .. }))), "{reply:?}");
    let second = near.granted(&key, &waiter, LEASE).await;
    assert!(second > fence);

    // A queued entry is released, and no copy of it is left.
    far.loses_reply(caller.try_release(&key, &next, Duration::ZERO)).await;
    assert_eq!(caller.release(&key, &next, Duration::ZERO).await, ReleaseReply::NotHolder);
    assert_eq!(near.release(&key, &waiter, Duration::ZERO).await, ReleaseReply::Freed);

    let third = caller.granted(&key, &id, LEASE).await;
    assert!(third > second);
    far.loses_reply(caller.try_release(&key, &id, ms(60_000))).await;
    caller.release(&key, &id, ms(60_000)).await;
    let blocked = near.acquire(&key, &waiter, LEASE, IfBusy::Fail).await;
    assert!(matches!(blocked, Ok(AcquireReply::Busy { lease_left, .. }) if lease_left > ms(1_000)), "{blocked:?}");
    let free = || far.store.force_release(ForceReleaseRequest::new(key.clone(), Duration::ZERO, terms()));
    far.loses_reply(free()).await;
    soon("a reply", free()).await.expect("up");
    assert!(near.granted(&key, &waiter, LEASE).await > third);
}

/// Makes blocks by hand beside a holder, with these data, and releases the key. Returns `false`,
/// with a note on stderr, without `zkCli`.
async fn block_by_hand(environment: &Environment, caller: &Caller<ZooKeeperStore>, data: &[&str]) -> bool {
    let id = caller.id();
    caller.granted(&key(), &id, LEASE).await;
    let listed = environment.servers().cli(&[&format!("ls -R {}", environment.root)]);
    let Some(entry) = listed.lines().find(|line| line.contains('~')) else {
        skipped("blocks by hand", "`commons-cli` of `zkCli`");
        return false;
    };
    let prefix = entry.split_once('~').expect("found").0;
    let blocks: Vec<_> = data.iter().map(|data| format!("create -s {prefix}~!- {data}")).collect();
    let made = environment.servers().cli(&blocks.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(made.matches("Created ").count(), data.len(), "{made}");
    caller.release(&key(), &id, Duration::ZERO).await;
    true
}

/// A block that was made by hand, without its time.
#[tokio::test]
async fn block_without_a_time_ends() {
    let Some(environment) = environment().await else { return };
    let store = environment.store(SESSION).await;
    let caller = Caller::new(&store, "a");
    if !block_by_hand(&environment, &caller, &["ten"]).await {
        return;
    }
    until("the end of the block", async || {
        let reply = caller.acquire(&key(), &caller.id(), LEASE, IfBusy::Fail).await;
        matches!(reply, Ok(AcquireReply::Granted { .. }))
    })
    .await;
}

/// Of several blocks the longest one counts, in each order.
#[tokio::test]
async fn longest_block_of_a_key_counts() {
    let Some(environment) = environment().await else { return };
    let store = environment.store(SESSION).await;
    let caller = Caller::new(&store, "a");
    if !block_by_hand(&environment, &caller, &["60000", "1", "60000", "2"]).await {
        return;
    }
    let blocked = caller.acquire(&key(), &caller.id(), LEASE, IfBusy::Fail).await;
    assert!(matches!(blocked, Ok(AcquireReply::Busy { lease_left, .. }) if lease_left > ms(10_000)), "{blocked:?}");
}

/// A block whose end falls into an outage does not stay.
#[tokio::test]
async fn block_ends_after_an_outage() {
    let Some(environment) = environment().await else { return };
    let far = Far::new(&environment, SESSION).await;
    let (key, id) = (key(), far.caller.id());
    far.caller.granted(&key, &id, LEASE).await;
    far.caller.release(&key, &id, ms(1_000)).await;
    far.proxy.all().swallow(Direction::Both);
    tokio::time::sleep(ms(3_000)).await;
    far.proxy.all().cut();
    far.proxy.all().heal();
    // No further call is made for the key.
    until("no node of the key", async || {
        !environment.servers().cli(&[&format!("ls -R {}", environment.root)]).contains('~')
    })
    .await;
}

/// A cursor that no list of this store has returned.
#[tokio::test]
async fn list_refuses_an_unknown_cursor() {
    let Some(environment) = environment().await else { return };
    let store = environment.store(SESSION).await;
    let caller = Caller::new(&store, "a");
    for cursor in ["256", "18446744073709551615", "-1", "x"] {
        let listed = store.list(ListRequest::new(10).after(Cursor::new(cursor))).await;
        assert!(listed.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Refused), "{cursor}: {listed:?}");
    }
    caller.granted(&key(), &caller.id(), LEASE).await;
    let (mut after, mut found) = (None, 0);
    loop {
        let mut request = ListRequest::new(10);
        if let Some(cursor) = after {
            request = request.after(cursor);
        }
        let page = store.list(request).await.expect("a page");
        found += page.entries.len();
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(found, 1);
}

/// A waiter whose session ends gets an entry of its next session.
///
/// Guarantee: G6.
#[tokio::test]
async fn wait_outlasts_the_end_of_its_session() {
    let Some(environment) = environment().await else { return };
    let far = Far::new(&environment, Duration::from_secs(7)).await;
    let far_locks = LockManager::builder(Arc::clone(&far.store)).instance("far").lease(Duration::from_secs(2)).build();
    let [near, _] = environment.instances(Duration::from_secs(2)).await;
    let held = near.lock(key()).await.expect("free");
    let waiter = tokio::spawn(async move { far_locks.lock(key()).wait(limits::BROKEN).await });
    until("a waiter", async || near.inspect(key()).await.is_ok_and(|status| status.waiting == 1)).await;
    far.proxy.all().swallow(Direction::Both);
    until("no waiter", async || near.inspect(key()).await.is_ok_and(|status| status.waiting == 0)).await;
    far.proxy.all().cut();
    far.proxy.all().heal();
    until("a waiter", async || near.inspect(key()).await.is_ok_and(|status| status.waiting == 1)).await;
    let token = held.fencing_token();
    held.release().await.expect("held");
    let next = soon("a grant", waiter).await.expect("no panic").expect("a grant");
    assert!(next.fencing_token() > token);
}

/// Guarantee: G5.
#[tokio::test]
async fn crashed_waiter_delays_those_behind_it_until_its_session_ends() {
    let Some(environment) = environment().await else { return };
    let far = Far::new(&environment, Duration::from_secs(7)).await;
    let [near, next] = environment.instances(Duration::from_secs(2)).await;
    let held = near.lock(key()).await.expect("free");
    let crashed = far.caller.acquire(&key(), &far.caller.id(), Duration::from_secs(2), IfBusy::Enqueue).await;
    assert!(matches!(crashed, Ok(AcquireReply::Queued { .. })), "{crashed:?}");
    let waiter = tokio::spawn(async move { next.lock(key()).wait(limits::BROKEN).await });
    until("both wait", async || near.inspect(key()).await.is_ok_and(|status| status.waiting == 2)).await;
    far.proxy.all().swallow(Direction::Both);
    held.release().await.expect("held");
    let status = near.inspect(key()).await.expect("up");
    assert!(format!("{:?}", status.holders).contains("far:"), "{status:?}");
    assert!(!waiter.is_finished());
    soon("a grant", waiter).await.expect("no panic").expect("a grant").release().await.expect("held");
}

/// A holder of another process learns of its revocation by an event, and not only with its next
/// renewal.
///
/// Guarantee: G8.
#[tokio::test]
async fn revocation_reaches_the_process_of_the_holder() {
    let Some(environment) = environment().await else { return };
    let store = environment.store(SESSION).await;
    let (caller, key) = (Caller::new(&store, "a"), key());
    let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
    let (id, receiver) = (caller.id(), Arc::new(()));
    store.subscribe(EventSink::new(id.manager().to_owned(), &receiver, move |_, event| drop(sender.send(event))));
    caller.granted(&key, &id, LEASE).await;
    let operator = environment.store(SESSION).await;
    // A short section is not watched.
    let short = caller.id();
    caller.granted(&("short",).into(), &short, LEASE).await;
    let revoked = operator.force_release(ForceReleaseRequest::new(("short",).into(), ms(1_000), terms())).await;
    assert!(revoked.is_ok(), "{revoked:?}");
    assert_eq!(caller.renew(&("short",).into(), &short).await, RenewReply::NotHolder);
    // A longer one is: the server lists the nodes that are watched.
    until("a watch", async || environment.servers().watched(0).await.contains(&environment.root)).await;
    let revoked = operator.force_release(ForceReleaseRequest::new(key.clone(), ms(1_000), terms())).await;
    assert!(revoked.is_ok(), "{revoked:?}");
    let event = soon("an event", async {
        loop {
            let event = events.recv().await.expect("it lives");
            if let StoreEvent::Revoked { key, id } = event {
                return (key, id);
            }
        }
    });
    assert_eq!(event.await, (key, id));
}
