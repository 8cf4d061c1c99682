//! Network faults in store calls, and their bounded effects.

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_lock::{
    LockError, LockManager,
    lock::ReleaseOutcome,
    store::{AcquireReply, AcquireRequest, AcquisitionIds, IfBusy, ReleaseReply},
};
use tower_lock_testkit::{
    Direction, NetworkFault, Request, limits,
    locks::key,
    store::StoreExt,
    wait::{ms, soon, until},
};

use crate::support::{Environment, LONG, NAME, QUEUE, TERMS, environment, granted, pass, release, served};

/// Identifies a script for one lock, its queue and the fence, by the number of its arguments.
fn is_script(arguments: usize) -> impl Fn(&Request) -> bool + Send + Sync + 'static {
    // EVALSHA, hash, number of keys, key ..
    move |request| request.name() == "EVALSHA" && request.parts[2] == b"3" && request.parts.len() == 3 + 3 + arguments
}

const ACQUIRE: usize = 9;
const RELEASE: usize = 5;
const YIELD: usize = 11;

async fn fields(environment: &Environment) -> usize {
    environment.command(&["HLEN", NAME]).await.integer().and_then(|n| n.try_into().ok()).expect("a number")
}

/// Guarantee: G1.
#[tokio::test]
async fn late_release_never_frees_the_next_holder() {
    let Some(environment) = environment().await else { return };
    let (slow, sound) = (environment.store().await, environment.direct_instance("b").await);
    let late = AcquisitionIds::new("late", 1).next();
    let request = AcquireRequest::new(key(), late.clone(), ms(200), IfBusy::Fail, TERMS, LONG);
    assert!(matches!(slow.acquire_one(request).await, Ok(AcquireReply::Granted { .. })));
    // The release is in flight while the lease ends and the next holder starts.
    environment.proxy.all().hold(Direction::Up);
    let release = tokio::spawn(slow.release_one(release(&key(), &late)));
    let guard = sound.lock(key()).await.expect("free when the lease has expired");
    environment.proxy.all().heal();
    let released = soon("a reply", release).await.expect("runs");
    assert!(matches!(released, Ok(ReleaseReply::NotHolder) | Err(_)), "{released:?}");
    assert!(environment.command(&["HKEYS", NAME]).await.texts()[0].starts_with("b:"));
    guard.release().await.expect("still held");
    environment.wait_until_clean().await;
}

/// A lost reply or a duplicated request: the field exists once, and the first release removes it.
/// Guarantee: G1.
#[tokio::test]
async fn repeated_acquire_claim_and_release_count_once() {
    let Some(environment) = environment().await else { return };
    for fault in
        [NetworkFault::CutBeforeReply, NetworkFault::CutInReply(9), NetworkFault::Double, NetworkFault::CutBefore]
    {
        let (one, two) = (environment.instance("a").await, environment.instance("b").await);
        environment.proxy.all().next_where(is_script(ACQUIRE), fault);
        let guard = one.lock(key()).await.expect("free");
        assert_eq!(fields(&environment).await, 1, "{fault:?}");
        // A queued client, and the acquire of the holder.
        let waiting = environment.waiter(&two).await;
        environment.proxy.all().next_where(is_script(RELEASE), fault);
        let released = tokio::spawn(guard.release());
        environment.proxy.all().next_where(is_script(ACQUIRE), fault);
        let guard = granted(waiting).await;
        let _ = released.await.expect("runs");
        assert_eq!(fields(&environment).await, 1, "{fault:?}");
        assert_eq!(environment.command(&["EXISTS", QUEUE]).await.integer(), Some(0), "{fault:?}");
        guard.release().await.expect("held");
        environment.wait_until_clean().await;
        assert_eq!(one.held_count() + two.held_count(), 0);
    }
    assert!(environment.proxy.fault_count() >= 10, "{} of them", environment.proxy.fault_count());
}

/// The acquire arrives after its caller was rejected: it does nothing.
/// Guarantee: G2.
#[tokio::test]
async fn expired_acquire_leaves_the_key_free() {
    let Some(environment) = environment().await else { return };
    let (slow, sound) = (environment.hasty_instance("a").await, environment.direct_instance("b").await);
    pass(&sound).await;
    let before = environment.scripts().await;
    environment.proxy.all().next_where(is_script(ACQUIRE), NetworkFault::Late(limits::OUTAGE));
    let error = slow.try_lock(key()).await.expect_err("no reply in time");
    assert!(matches!(error, LockError::Store(_)), "{error}");
    pass(&sound).await;
    until("it has come", async || environment.scripts().await > before + 2).await;
    environment.wait_until_clean().await;
    sound.try_lock(key()).await.expect("free").release().await.expect("held");
}

/// The acquire ran in time, but its caller had left: the grant is released.
/// Guarantee: G7.
#[tokio::test]
async fn grant_of_a_cancelled_call_is_free_soon() {
    let Some(environment) = environment().await else { return };
    let (slow, sound) = (environment.instance_without_renewals("a").await, environment.direct_instance("b").await);
    pass(&sound).await;
    environment.proxy.all().hold(Direction::Down);
    let cancelled = tokio::spawn(slow.lock(key()).into_future());
    until("granted", async || fields(&environment).await == 1).await;
    cancelled.abort();
    environment.proxy.all().heal();
    pass(&sound).await;
    environment.wait_until_clean().await;
}

/// The connection breaks, and the acquire runs later in its time. A second acquire of the caller
/// was granted and released.
#[tokio::test]
async fn acquire_that_outlives_its_connection_is_free_soon() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.instance_without_renewals("a").await, environment.direct_instance("b").await);
    pass(&two).await;
    let before = environment.scripts().await;
    environment.proxy.all().next_where(is_script(ACQUIRE), NetworkFault::Orphaned(ms(300)));
    pass(&one).await;
    until("it has come", async || environment.scripts().await > before + 2).await;
    pass(&two).await;
    until("the outcome is unknown", async || one.size() == (0, 0)).await;
    environment.wait_until_clean().await;
}

/// A copy would allow two sections at once: the one that continued after the yield, and a new
/// waiter.
#[tokio::test]
async fn duplicated_yield_never_frees_a_running_section() {
    let Some(environment) = environment().await else { return };
    for fault in [NetworkFault::Again(ms(300)), NetworkFault::Orphaned(ms(300))] {
        let (one, two) = (environment.instance("a").await, environment.direct_instance("b").await);
        let first = one.lock(key()).await.expect("free");
        let next = tokio::spawn(one.lock(key()).into_future());
        until("it waits", async || one.inspect(key()).await.is_ok_and(|key| key.waiting_locally == 1)).await;
        environment.proxy.all().next_where(is_script(YIELD), fault);
        first.release().await.expect("held");
        let second = granted(next).await;
        let other = environment.waiter(&two).await;
        sleep(ms(500)).await;
        assert!(!other.is_finished() && second.held_lock().ensure_remaining(ms(1)).is_ok(), "{fault:?}");
        second.release().await.expect("still held");
        served(other).await;
        environment.wait_until_clean().await;
    }
}

/// Two instances that alternate on a key.
async fn alternate(environment: &Environment, times: usize) {
    let (one, two) = (environment.instance("a").await, environment.instance("b").await);
    let turns = async |locks: &LockManager| {
        for _ in 0..times {
            let guard = locks.lock(key()).await.expect("a grant");
            sleep(ms(5)).await;
            guard.release().await.expect("held");
        }
    };
    soon("all sections", async { tokio::join!(turns(&one), turns(&two)) }).await;
}

/// An unclaimed offer would last for three seconds and a lock-delay, and the next grant has another
/// fence.
#[tokio::test]
async fn lost_message_costs_a_poll_interval_and_no_lease() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.instance("a").await, environment.instance("b").await);
    environment.proxy.all().drop_pushes();
    // A stall of the machine may outlast an offer.
    until("an offer is claimed at a poll", async || {
        let guard = one.lock(key()).await.expect("free");
        let waiting = environment.waiter(&two).await;
        guard.release().await.expect("held");
        let offered = environment.command(&["HVALS", NAME]).await;
        let guard = granted(waiting).await;
        let claimed = environment.command(&["HVALS", NAME]).await;
        guard.release().await.expect("held");
        offered.texts() == claimed.texts()
    })
    .await;
}

#[tokio::test]
async fn subscriber_reconnects_and_all_waiters_are_served() {
    let Some(environment) = environment().await else { return };
    let listener = environment.direct_instance("c").await;
    let killer = async {
        loop {
            environment.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
            sleep(ms(200)).await;
        }
    };
    tokio::select! {
        () = alternate(&environment, 5) => {}
        () = killer => unreachable!("it runs until it is aborted"),
    }
    until("it listens again", async || environment.listeners().await == 1).await;
    drop(listener);
    environment.wait_until_clean().await;
}

#[tokio::test]
async fn duplicated_messages_do_no_harm() {
    let Some(environment) = environment().await else { return };
    environment.proxy.all().double_pushes();
    let (one, two) = (environment.instance("a").await, environment.instance("b").await);
    for _ in 0..3 {
        let guard = one.lock(key()).await.expect("free");
        let waiting = environment.waiter(&two).await;
        assert_eq!(guard.release().await.expect("held"), ReleaseOutcome::HandedOff);
        served(waiting).await;
    }
    environment.wait_until_clean().await;
}

#[tokio::test]
async fn repeated_script_flush_is_not_an_error() {
    let Some(environment) = environment().await else { return };
    let instances = join_all(["a", "b", "c"].map(|name| environment.direct_instance(name))).await;
    let flusher = async {
        let mut connection = environment.redis.connect().await;
        loop {
            connection.command(&["SCRIPT", "FLUSH"]).await.expect("a reply");
            sleep(ms(2)).await;
        }
    };
    let storm = join_all((0..12).map(async |n: usize| {
        for round in 0..10 {
            let guard = instances[n % 3].lock(("storm", (n + round) % 5)).await.expect("a grant");
            guard.release().await.expect("held");
        }
    }));
    tokio::select! {
        _ = storm => {}
        () = flusher => unreachable!("it runs until it is aborted"),
    }
    environment.wait_until_clean().await;
}

/// Other versions send unknown messages; locks and queues are the same for both. An offer is
/// claimed at a poll, and does not expire.
#[tokio::test]
async fn mixed_message_versions_cost_at_most_a_poll_interval() {
    let Some(environment) = environment().await else { return };
    // Instances behind the proxy get messages of another version.
    environment.proxy.all().rewrite_pushes(|push| {
        let mut payload = push.payload.clone();
        payload[0] = b'9';
        payload
    });
    let instances = [
        environment.instance("later").await,
        environment.direct_instance("today").await,
        environment.instance("later").await,
    ];
    let inside = Arc::new(tokio::sync::Semaphore::new(1));
    let sections = join_all(instances.iter().map(async |locks| {
        for _ in 0..4 {
            let guard = locks.lock(key()).await.expect("a grant");
            let alone = inside.try_acquire().expect("exclusive");
            sleep(ms(3)).await;
            drop(alone);
            guard.release().await.expect("held");
        }
    }));
    soon("all sections", sections).await;
    environment.wait_until_clean().await;
}
