//! What the network does to calls, and what must not come of it.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};
use tower_lock::{
    LockError, LockManager,
    store::{AcquireReply, AcquireRequest, IfBusy, LockStore, QueueConfig, ReleaseRequest, Released},
    test_util::decisions::AcquisitionIds,
};
use tower_lock_faults::{Direction, NetworkFault, Request};

use crate::support::{LINE, NAME, World, key, ms, soon, until, world};

fn terms() -> QueueConfig {
    QueueConfig::new(ms(4_000), ms(10_000), 8)
}

/// A script by what its arguments tell: how many there are behind its keys.
fn is_script(arguments: usize) -> impl Fn(&Request) -> bool + Send + Sync + 'static {
    // EVALSHA, hash, number of keys, keys ..
    move |request| request.name() == "EVALSHA" && request.parts.len() == 3 + 3 + arguments
}

const ACQUIRE: usize = 7;
const RELEASE: usize = 3;
const YIELD: usize = 8;

async fn fields(world: &World) -> usize {
    world.ask(&["HLEN", NAME]).await.integer().and_then(|n| n.try_into().ok()).expect("a number")
}

#[tokio::test]
async fn late_release_never_frees_the_next_holder() {
    let Some(world) = world().await else { return };
    let (slow, sound) = (world.store().await, world.sound_instance("b").await);
    let late = AcquisitionIds::new("late", 1).next();
    let ask = AcquireRequest::new(key(), late.clone(), ms(200), IfBusy::Fail, terms(), ms(500));
    assert!(matches!(slow.acquire(ask).await, Ok(AcquireReply::Granted { .. })));
    // The release is on its way while the lease ends and somebody else comes.
    world.proxy.all().next_where(is_script(RELEASE), NetworkFault::Late(ms(450)));
    let release = tokio::spawn(slow.release(ReleaseRequest::new(key(), late, Duration::ZERO, terms())));
    let guard = sound.lock(key()).await.expect("free when the lease is over");
    assert_eq!(soon("an answer", release).await.expect("runs").expect("answered"), Released::NotHolder);
    assert!(world.ask(&["HKEYS", NAME]).await.texts()[0].starts_with("b:"));
    guard.release().await.expect("still ours");
    world.is_clean_soon().await;
}

/// A reply that is lost, a request that is sent twice: the field is there once, and gone with the first release.
#[tokio::test]
async fn repeated_acquire_claim_and_release_count_once() {
    let Some(world) = world().await else { return };
    for fault in
        [NetworkFault::CutBeforeReply, NetworkFault::CutInReply(9), NetworkFault::Double, NetworkFault::CutBefore]
    {
        let (one, two) = (world.instance("a").await, world.instance("b").await);
        world.proxy.all().next_where(is_script(ACQUIRE), fault);
        let guard = one.lock(key()).await.expect("free");
        assert_eq!(fields(&world).await, 1, "{fault:?}");
        // Its turn, and the question of whoever has it.
        let waiting = tokio::spawn(two.lock(key()).into_future());
        until("in line", async || world.ask(&["LLEN", LINE]).await.integer() == Some(1)).await;
        world.proxy.all().next_where(is_script(RELEASE), fault);
        let released = tokio::spawn(guard.release());
        world.proxy.all().next_where(is_script(ACQUIRE), fault);
        let guard = soon("its turn", waiting).await.expect("runs").expect("its turn");
        let _ = released.await.expect("runs");
        assert_eq!(fields(&world).await, 1, "{fault:?}");
        assert_eq!(world.ask(&["EXISTS", LINE]).await.integer(), Some(0), "{fault:?}");
        guard.release().await.expect("ours");
        world.is_clean_soon().await;
        assert_eq!(one.held_count() + two.held_count(), 0);
    }
    assert!(world.proxy.fault_count() >= 10, "{} of them", world.proxy.fault_count());
}

/// It comes to Redis long after whoever asked was turned away: it does nothing then.
#[tokio::test]
async fn expired_acquire_leaves_the_key_free() {
    let Some(world) = world().await else { return };
    let (slow, sound) = (world.instance("a").await, world.sound_instance("b").await);
    world.proxy.all().next_where(is_script(ACQUIRE), NetworkFault::Late(ms(2_500)));
    let error = slow.try_lock(key()).await.expect_err("no answer in time");
    assert!(matches!(error, LockError::Store(_)), "{error}");
    sound.lock(key()).wait(ms(200)).await.expect("free").release().await.expect("ours");
    let refused = async || {
        let slow = world.ask(&["INFO", "commandstats"]).await;
        slow.text().is_some_and(|text| text.contains("cmdstat_evalsha"))
    };
    until("it has come", async || refused().await).await;
    sleep(ms(2_000)).await;
    assert_eq!(world.keys().await, [""; 0], "and nothing of it is there");
    sound.try_lock(key()).await.expect("free").release().await.expect("ours");
}

/// It ran in time, but nobody waited for the answer any more: what was granted is given back.
#[tokio::test]
async fn grant_of_a_cancelled_call_is_free_soon() {
    let Some(world) = world().await else { return };
    let (slow, sound) = (world.instance("a").await, world.sound_instance("b").await);
    world.proxy.all().delay(Direction::Down, ms(300));
    assert!(timeout(ms(100), slow.lock(key())).await.is_err(), "it has left");
    until("granted", async || fields(&world).await == 1).await;
    let guard = sound.lock(key()).wait(Duration::from_secs(5)).await.expect("free soon, and not at the end of a lease");
    world.proxy.all().heal();
    guard.release().await.expect("ours");
    world.is_clean_soon().await;
}

/// The connection breaks, and what was sent on it is done later, in its time: whoever asked again has had the key, and given it back.
#[tokio::test]
async fn acquire_that_outlives_its_connection_is_free_soon() {
    let Some(world) = world().await else { return };
    let (one, two) = (world.instance("a").await, world.sound_instance("b").await);
    world.proxy.all().next_where(is_script(ACQUIRE), NetworkFault::Orphaned(ms(300)));
    one.lock(key()).await.expect("asked again").release().await.expect("ours");
    let seen = until("it has come", async || fields(&world).await == 1);
    timeout(ms(2_000), seen).await.ok();
    let guard = two.lock(key()).wait(Duration::from_secs(5)).await.expect("free soon, and not at the end of a lease");
    guard.release().await.expect("ours");
    until("nothing is known of it", async || one.size() == (0, 0)).await;
    world.is_clean_soon().await;
}

/// Two sections at the same time would come of it: one that goes on after the yield, and whoever has lined up since.
#[tokio::test]
async fn duplicated_yield_never_frees_a_running_section() {
    let Some(world) = world().await else { return };
    for fault in [NetworkFault::Again(ms(300)), NetworkFault::Orphaned(ms(300))] {
        let (one, two) = (world.instance("a").await, world.sound_instance("b").await);
        let first = one.lock(key()).await.expect("free");
        let next = tokio::spawn(one.lock(key()).into_future());
        sleep(ms(150)).await;
        world.proxy.all().next_where(is_script(YIELD), fault);
        first.release().await.expect("ours");
        let second = soon("its turn", next).await.expect("runs").expect("its turn");
        let other = tokio::spawn(two.lock(key()).into_future());
        until("in line", async || world.ask(&["LLEN", LINE]).await.integer() == Some(1)).await;
        sleep(ms(500)).await;
        assert!(!other.is_finished() && second.held_lock().ensure_remaining(ms(1)).is_ok(), "{fault:?}");
        second.release().await.expect("ours still");
        soon("its turn", other).await.expect("runs").expect("its turn").release().await.expect("ours");
        world.is_clean_soon().await;
    }
}

/// Two instances that hand a key to each other so often.
async fn hand_overs(world: &World, times: usize) -> Duration {
    let (one, two) = (world.instance("a").await, world.instance("b").await);
    let began = Instant::now();
    let turns = async |locks: &LockManager| {
        for _ in 0..times {
            let guard = locks.lock(key()).wait(Duration::from_secs(60)).await.expect("its turn");
            sleep(ms(5)).await;
            guard.release().await.expect("ours");
        }
    };
    soon("all turns", async { tokio::join!(turns(&one), turns(&two)) }).await;
    began.elapsed()
}

#[tokio::test]
async fn lost_message_costs_a_poll_interval_and_no_lease() {
    let Some(world) = world().await else { return };
    let (one, two) = (world.instance("a").await, world.instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("in line", async || world.ask(&["LLEN", LINE]).await.integer() == Some(1)).await;
    world.proxy.all().drop_pushes();
    let released = Instant::now();
    guard.release().await.expect("ours");
    let guard = soon("its turn", waiting).await.expect("runs").expect("its turn");
    let took = released.elapsed();
    // An offer that nobody comes for is three seconds and a lock-delay.
    assert!(took < ms(3_500), "{took:?}");
    guard.release().await.expect("ours");
}

#[tokio::test]
async fn subscriber_reconnects_and_all_waiters_are_served() {
    let Some(world) = world().await else { return };
    let listener = world.sound_instance("c").await;
    let killer = async {
        loop {
            world.ask(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
            sleep(ms(200)).await;
        }
    };
    let took = tokio::select! {
        took = hand_overs(&world, 20) => took,
        () = killer => unreachable!("it goes on for ever"),
    };
    assert!(took < Duration::from_secs(60), "40 hand-overs took {took:?}");
    until("it listens again", async || world.ask(&["PUBSUB", "CHANNELS"]).await.items().len() == 1).await;
    drop(listener);
    world.is_clean_soon().await;
}

#[tokio::test]
async fn duplicated_messages_do_no_harm() {
    let Some(world) = world().await else { return };
    world.proxy.all().double_pushes();
    let (one, two) = (world.instance("a").await, world.instance("b").await);
    let mut waited = Duration::ZERO;
    for _ in 0..10 {
        let guard = one.lock(key()).await.expect("free");
        let waiting = tokio::spawn(two.lock(key()).into_future());
        until("in line", async || world.ask(&["LLEN", LINE]).await.integer() == Some(1)).await;
        let released = Instant::now();
        assert_eq!(guard.release().await.expect("ours"), Released::HandedOff);
        let guard = soon("its turn", waiting).await.expect("runs").expect("its turn");
        waited += released.elapsed();
        guard.release().await.expect("ours");
    }
    assert!(waited < Duration::from_secs(4), "{waited:?}: who has lost his turn finds it after a second");
    world.is_clean_soon().await;
}

#[tokio::test]
async fn repeated_script_flush_is_not_an_error() {
    let Some(world) = world().await else { return };
    let instances = join_all(["a", "b", "c"].map(|name| world.sound_instance(name))).await;
    let flusher = async {
        let mut connection = world.redis.connect().await;
        loop {
            connection.command(&["SCRIPT", "FLUSH"]).await.expect("an answer");
            sleep(ms(10)).await;
        }
    };
    let storm = join_all((0..30).map(async |n: usize| {
        for turn in 0..20 {
            let guard = instances[n % 3].lock(("storm", (n + turn) % 5)).await.expect("its turn");
            guard.release().await.expect("ours");
        }
    }));
    tokio::select! {
        _ = storm => {}
        () = flusher => unreachable!("it goes on for ever"),
    }
    world.is_clean_soon().await;
}

/// A later version of us says things that this one does not know; and the other way round. Locks and lines are the same for both.
#[tokio::test]
async fn mixed_message_versions_cost_at_most_a_poll_interval() {
    let Some(world) = world().await else { return };
    // Whoever is behind the proxy hears another version.
    world.proxy.all().rewrite_pushes(|push| {
        let mut payload = push.payload.clone();
        payload[0] = b'9';
        payload
    });
    let instances = [world.instance("later").await, world.sound_instance("today").await, world.instance("later").await];
    let inside = Arc::new(tokio::sync::Semaphore::new(1));
    let longest = join_all(instances.iter().map(async |locks| {
        let mut longest = Duration::ZERO;
        for _ in 0..20 {
            let asked = Instant::now();
            let guard = locks.lock(key()).wait(Duration::from_secs(60)).await.expect("its turn");
            longest = longest.max(asked.elapsed());
            let alone = inside.try_acquire().expect("nobody else is in");
            sleep(ms(3)).await;
            drop(alone);
            guard.release().await.expect("ours");
        }
        longest
    }))
    .await;
    // Two are before whoever comes: each of the three turns costs a check-in at most, and no offer.
    assert!(longest.iter().all(|longest| *longest < ms(3 * 3_500)), "{longest:?}");
    world.is_clean_soon().await;
}
