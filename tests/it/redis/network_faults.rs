//! Network faults in store calls, and their bounded effects.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};
use tower_lock::{
    LockError, LockManager, RedisStore,
    store::{AcquireReply, AcquireRequest, AcquisitionIds, IfBusy, QueueConfig, ReleaseReply, ReleaseRequest},
};
use tower_lock_testkit::store::StoreExt;
use tower_lock_testkit::{Direction, NetworkFault, Request};
use tower_lock_testkit::{
    locks::key,
    wait::{ms, soon, until},
};

use crate::support::{Environment, NAME, QUEUE, environment};

fn terms() -> QueueConfig {
    QueueConfig::new(ms(4_000), ms(10_000), 8)
}

/// Identifies a script for one key by the number of its arguments after the key.
fn is_script(arguments: usize) -> impl Fn(&Request) -> bool + Send + Sync + 'static {
    // EVALSHA, hash, number of keys, key ..
    move |request| request.name() == "EVALSHA" && request.parts[2] == b"1" && request.parts.len() == 3 + 1 + arguments
}

const ACQUIRE: usize = 9;
const RELEASE: usize = 5;
const YIELD: usize = 10;

async fn fields(environment: &Environment) -> usize {
    environment.command(&["HLEN", NAME]).await.integer().and_then(|n| n.try_into().ok()).expect("a number")
}

/// Guarantee: G1.
#[tokio::test]
async fn late_release_never_frees_the_next_holder() {
    let Some(environment) = environment().await else { return };
    // The reply is as late as the release: it comes within this timeout.
    let slow = RedisStore::builder().call_timeout(ms(5_000)).connect(&environment.proxy.url()).await.expect("it is up");
    let sound = environment.direct_instance("b").await;
    let late = AcquisitionIds::new("late", 1).next();
    let request = AcquireRequest::new(key(), late.clone(), ms(200), IfBusy::Fail, terms(), ms(500));
    assert!(matches!(slow.acquire_one(request).await, Ok(AcquireReply::Granted { .. })));
    // The release is in flight while the lease ends and the next holder starts.
    environment.proxy.all().next_where(is_script(RELEASE), NetworkFault::Late(ms(1_000)));
    let release = tokio::spawn(slow.release_one(ReleaseRequest::new(key(), late, Duration::ZERO, terms())));
    let guard = sound.lock(key()).await.expect("free when the lease has expired");
    assert_eq!(soon("a reply", release).await.expect("runs").expect("answered"), ReleaseReply::NotHolder);
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
        let waiting = tokio::spawn(two.lock(key()).into_future());
        until("queued", async || environment.command(&["LLEN", QUEUE]).await.integer() == Some(1)).await;
        environment.proxy.all().next_where(is_script(RELEASE), fault);
        let released = tokio::spawn(guard.release());
        environment.proxy.all().next_where(is_script(ACQUIRE), fault);
        let guard = soon("a grant", waiting).await.expect("runs").expect("a grant");
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
    let (slow, sound) = (environment.instance("a").await, environment.direct_instance("b").await);
    environment.proxy.all().next_where(is_script(ACQUIRE), NetworkFault::Late(ms(2_500)));
    let error = slow.try_lock(key()).await.expect_err("no reply in time");
    assert!(matches!(error, LockError::Store(_)), "{error}");
    // Much shorter than the lease of a grant.
    sound.lock(key()).wait(Duration::from_secs(10)).await.expect("free").release().await.expect("held");
    let refused = async || {
        let slow = environment.command(&["INFO", "commandstats"]).await;
        slow.text().is_some_and(|text| text.contains("cmdstat_evalsha"))
    };
    until("it has come", async || refused().await).await;
    sleep(ms(2_000)).await;
    assert_eq!(environment.keys().await, [""; 0], "and no data of it is left");
    sound.try_lock(key()).await.expect("free").release().await.expect("held");
}

/// The acquire ran in time, but its caller had left: the grant is released.
/// Guarantee: G7.
#[tokio::test]
async fn grant_of_a_cancelled_call_is_free_soon() {
    let Some(environment) = environment().await else { return };
    let (slow, sound) = (environment.instance("a").await, environment.direct_instance("b").await);
    environment.proxy.all().delay(Direction::Down, ms(300));
    assert!(timeout(ms(100), slow.lock(key())).await.is_err(), "it was cancelled");
    until("granted", async || fields(&environment).await == 1).await;
    let guard = sound.lock(key()).wait(Duration::from_secs(5)).await.expect("free soon, and not at the end of a lease");
    environment.proxy.all().heal();
    guard.release().await.expect("held");
    environment.wait_until_clean().await;
}

/// The connection breaks, and the acquire runs later in its time. A second acquire of the caller
/// was granted and released.
#[tokio::test]
async fn acquire_that_outlives_its_connection_is_free_soon() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.instance("a").await, environment.direct_instance("b").await);
    environment.proxy.all().next_where(is_script(ACQUIRE), NetworkFault::Orphaned(ms(300)));
    one.lock(key()).await.expect("acquired again").release().await.expect("held");
    let seen = until("it has come", async || fields(&environment).await == 1);
    timeout(ms(2_000), seen).await.ok();
    let guard = two.lock(key()).wait(Duration::from_secs(5)).await.expect("free soon, and not at the end of a lease");
    guard.release().await.expect("held");
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
        sleep(ms(150)).await;
        environment.proxy.all().next_where(is_script(YIELD), fault);
        first.release().await.expect("held");
        let second = soon("a grant", next).await.expect("runs").expect("a grant");
        let other = tokio::spawn(two.lock(key()).into_future());
        until("queued", async || environment.command(&["LLEN", QUEUE]).await.integer() == Some(1)).await;
        sleep(ms(500)).await;
        assert!(!other.is_finished() && second.held_lock().ensure_remaining(ms(1)).is_ok(), "{fault:?}");
        second.release().await.expect("still held");
        soon("a grant", other).await.expect("runs").expect("a grant").release().await.expect("held");
        environment.wait_until_clean().await;
    }
}

/// Two instances that alternate on a key.
async fn alternate(environment: &Environment, times: usize) -> Duration {
    let (one, two) = (environment.instance("a").await, environment.instance("b").await);
    let began = Instant::now();
    let turns = async |locks: &LockManager| {
        for _ in 0..times {
            let guard = locks.lock(key()).wait(Duration::from_secs(60)).await.expect("a grant");
            sleep(ms(5)).await;
            guard.release().await.expect("held");
        }
    };
    soon("all sections", async { tokio::join!(turns(&one), turns(&two)) }).await;
    began.elapsed()
}

#[tokio::test]
async fn lost_message_costs_a_poll_interval_and_no_lease() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.instance("a").await, environment.instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("queued", async || environment.command(&["LLEN", QUEUE]).await.integer() == Some(1)).await;
    environment.proxy.all().drop_pushes();
    let released = Instant::now();
    guard.release().await.expect("held");
    let guard = soon("a grant", waiting).await.expect("runs").expect("a grant");
    let took = released.elapsed();
    // An unclaimed offer lasts three seconds and a lock-delay.
    assert!(took < ms(3_500), "{took:?}");
    guard.release().await.expect("held");
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
    let took = tokio::select! {
        took = alternate(&environment, 20) => took,
        () = killer => unreachable!("it runs until it is aborted"),
    };
    assert!(took < Duration::from_secs(60), "40 handoffs took {took:?}");
    until("it listens again", async || environment.command(&["PUBSUB", "CHANNELS"]).await.items().len() == 1).await;
    drop(listener);
    environment.wait_until_clean().await;
}

#[tokio::test]
async fn duplicated_messages_do_no_harm() {
    let Some(environment) = environment().await else { return };
    environment.proxy.all().double_pushes();
    let (one, two) = (environment.instance("a").await, environment.instance("b").await);
    let mut waited = Duration::ZERO;
    for _ in 0..10 {
        let guard = one.lock(key()).await.expect("free");
        let waiting = tokio::spawn(two.lock(key()).into_future());
        until("queued", async || environment.command(&["LLEN", QUEUE]).await.integer() == Some(1)).await;
        let released = Instant::now();
        assert_eq!(guard.release().await.expect("held"), tower_lock::lock::ReleaseOutcome::HandedOff);
        let guard = soon("a grant", waiting).await.expect("runs").expect("a grant");
        waited += released.elapsed();
        guard.release().await.expect("held");
    }
    assert!(waited < Duration::from_secs(4), "{waited:?}: a poll replaces a lost message");
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
            sleep(ms(10)).await;
        }
    };
    let storm = join_all((0..30).map(async |n: usize| {
        for round in 0..20 {
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

/// Other versions send unknown messages; locks and queues are the same for both.
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
    let longest = join_all(instances.iter().map(async |locks| {
        let mut longest = Duration::ZERO;
        for _ in 0..20 {
            let asked = Instant::now();
            let guard = locks.lock(key()).wait(Duration::from_secs(60)).await.expect("a grant");
            longest = longest.max(asked.elapsed());
            let alone = inside.try_acquire().expect("exclusive");
            sleep(ms(3)).await;
            drop(alone);
            guard.release().await.expect("held");
        }
        longest
    }))
    .await;
    // Two waiters are ahead of each: each of the three handoffs costs at most a poll interval, and
    // no offer.
    assert!(longest.iter().all(|longest| *longest < ms(3 * 3_500)), "{longest:?}");
    environment.wait_until_clean().await;
}
