//! What locks cost Redis: counted there, and not timed.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;
use tower_lock::{LockError, LockManager};

use crate::support::{World, key, world};

/// Scripts are known to the server, and everybody is heard.
async fn warm(world: &World, instances: &[LockManager]) {
    for locks in instances {
        locks.lock(key()).await.expect("free").release().await.expect("given back");
    }
    let _ = instances[0].lock(key()).await.expect("free");
    world.is_clean_soon().await;
}

#[tokio::test]
async fn uncontended_lock_costs_two_round_trips_and_scripts() {
    let Some(world) = world().await else { return };
    let locks = world.instance("a").await;
    warm(&world, std::slice::from_ref(&locks)).await;
    let before = world.scripts().await;
    world.proxy.forget_requests();
    for _ in 0..100 {
        locks.try_lock(key()).await.expect("free").release().await.expect("given back");
    }
    assert_eq!(world.scripts().await - before, 200);
    let requests = world.proxy.requests();
    // Each connection is asked for a sign of life once a second.
    let asked = |name: &str| !["EVALSHA", "PING", "PUBSUB"].contains(&name);
    let others: u64 = requests.iter().filter(|(name, _)| asked(name)).map(|(_, n)| n).sum();
    assert_eq!((requests["EVALSHA"], others), (200, 0), "{requests:?}");
}

#[tokio::test]
async fn handoff_between_processes_costs_three_scripts() {
    let Some(world) = world().await else { return };
    for contenders in [2, 8, 32] {
        let instances = join_all((0..contenders).map(|n| world.sound_instance(["a", "b"][n % 2]))).await;
        warm(&world, &instances).await;
        let (before, began) = (world.scripts().await, Instant::now());
        let sections = 640 / contenders;
        join_all(instances.iter().map(async |locks| {
            for _ in 0..sections {
                locks.lock(key()).wait(Duration::from_secs(60)).await.expect("its turn").release().await.expect("ours");
            }
        }))
        .await;
        let scripts = world.scripts().await - before;
        // Who waits asks about once a second; on a slow machine more do so.
        let check_ins = u64::try_from(contenders).expect("few") * 2 * (began.elapsed().as_secs() + 1);
        let sections = u64::try_from(sections * contenders).expect("few");
        eprintln!("{contenders} contenders: {scripts} scripts for {sections} sections in {:?}", began.elapsed());
        assert!(scripts <= 3 * sections + check_ins, "{contenders} contenders: {scripts} for {sections}");
        world.is_clean_soon().await;
    }
}

#[tokio::test]
async fn local_handoff_costs_one_script_per_100_ms_or_1000() {
    let Some(world) = world().await else { return };
    let locks = world.instance("a").await;
    warm(&world, std::slice::from_ref(&locks)).await;
    let (before, began) = (world.scripts().await, Instant::now());
    join_all((0..50).map(async |_| {
        for _ in 0..60 {
            locks.lock(key()).await.expect("its turn").release().await.expect("ours");
        }
    }))
    .await;
    let (scripts, tenths) = (world.scripts().await - before, began.elapsed().as_millis() / 100);
    assert!(
        u128::from(scripts) <= 2 + 3 + tenths,
        "{scripts} scripts for 3 000 sections in {tenths} tenths of a second"
    );
}

#[tokio::test]
async fn local_rejection_sends_nothing() {
    let Some(world) = world().await else { return };
    let locks = world.instance("a").await;
    let guard = locks.try_lock(key()).await.expect("free");
    world.proxy.forget_requests();
    for _ in 0..100 {
        assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })));
    }
    assert_eq!(world.proxy.requests().get("EVALSHA"), None);
    guard.release().await.expect("ours");
}
