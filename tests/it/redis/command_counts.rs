//! The cost of locks in Redis commands, counted on the server.

use std::{future::IntoFuture, time::Duration};

use futures_util::future::join_all;
use tokio::time::Instant;
use tower_lock::{LockError, LockManager};
use tower_lock_testkit::{locks::key, wait::until};

use crate::support::{Environment, environment};

/// Loads the scripts and waits for the subscriptions.
async fn warm(environment: &Environment, instances: &[LockManager]) {
    for locks in instances {
        locks.lock(key()).await.expect("free").release().await.expect("released");
    }
    let _ = instances[0].lock(key()).await.expect("free");
    environment.wait_until_clean().await;
}

#[tokio::test]
async fn uncontended_lock_costs_two_round_trips_and_scripts() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    warm(&environment, std::slice::from_ref(&locks)).await;
    let before = environment.scripts().await;
    environment.proxy.forget_requests();
    for _ in 0..100 {
        locks.try_lock(key()).await.expect("free").release().await.expect("released");
    }
    assert_eq!(environment.scripts().await - before, 200);
    let requests = environment.proxy.requests();
    // The store checks each connection once a second.
    let asked = |name: &str| !["EVALSHA", "PING", "PUBSUB", "ROLE"].contains(&name);
    let others: u64 = requests.iter().filter(|(name, _)| asked(name)).map(|(_, n)| n).sum();
    assert_eq!((requests["EVALSHA"], others), (200, 0), "{requests:?}");
}

/// Guarantee: G21.
#[tokio::test]
async fn several_free_keys_cost_two_scripts_and_round_trips() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    warm(&environment, std::slice::from_ref(&locks)).await;
    for count in [1, 2, 16, 64_u64] {
        let (before, keys) = (environment.scripts().await, || (0..count).map(|number| ("several", number)));
        environment.proxy.forget_requests();
        for round in 0..20 {
            let call = if round % 2 == 0 { locks.lock_all(keys()) } else { locks.try_lock_all(keys()) };
            call.await.expect("free").release().await.expect("released");
        }
        assert_eq!(environment.scripts().await - before, 40, "{count} keys");
        assert_eq!(environment.proxy.requests()["EVALSHA"], 40, "{count} keys");
    }
}

/// With one busy key: all together, the busy one with its offer, and the rest together. Greater
/// keys are released meanwhile, and all of them at the end.
/// Guarantee: G21.
#[tokio::test]
async fn wait_for_one_of_several_keys_costs_few_scripts() {
    let Some(environment) = environment().await else { return };
    let (locks, other) = (environment.instance("a").await, environment.direct_instance("b").await);
    warm(&environment, &[locks.clone(), other.clone()]).await;
    // Their order is that of their texts.
    let key = |number: u64| ("several", format!("{number:02}"));
    for (count, busy) in [(1, 0), (2, 0), (2, 1), (3, 1), (16, 0), (16, 7), (16, 15_u64)] {
        let held = other.try_lock(key(busy)).await.expect("free");
        environment.proxy.forget_requests();
        let began = Instant::now();
        let call = tokio::spawn(locks.lock_all((0..count).map(key)).into_future());
        until("it waits", async || other.inspect(key(busy)).await.is_ok_and(|key| key.waiting > 0)).await;
        // Greater keys are free meanwhile.
        for number in busy + 1..count {
            let is_free = async || other.inspect(key(number)).await.is_ok_and(|key| key.holder.is_none());
            until("it is released", is_free).await;
        }
        held.release().await.expect("held");
        call.await.expect("no panic").expect("granted").release().await.expect("held");
        let scripts = environment.proxy.requests()["EVALSHA"];
        let (first, greater) = (u64::from(busy > 0), 2 * u64::from(busy + 1 < count));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds")]
        let polls = (2.0 * began.elapsed().as_secs_f64()) as u64;
        // Of them, `n + 1` acquire.
        assert!(scripts <= 3 + first + greater + polls, "{scripts} scripts for {busy} of {count}, {polls} polls");
        environment.wait_until_clean().await;
    }
}

#[tokio::test]
async fn handoff_between_processes_costs_three_scripts() {
    let Some(environment) = environment().await else { return };
    for contenders in [2, 8, 32] {
        let instances = join_all((0..contenders).map(|n| environment.direct_instance(["a", "b"][n % 2]))).await;
        warm(&environment, &instances).await;
        let (before, began) = (environment.scripts().await, Instant::now());
        let sections = 320 / contenders;
        join_all(instances.iter().map(async |locks| {
            for _ in 0..sections {
                locks.lock(key()).wait(Duration::from_secs(60)).await.expect("a grant").release().await.expect("held");
            }
        }))
        .await;
        let scripts = environment.scripts().await - before;
        // Waiters poll about once a second, more of them on a slow machine.
        let polls = u64::try_from(contenders).expect("few") * 2 * (began.elapsed().as_secs() + 1);
        let sections = u64::try_from(sections * contenders).expect("few");
        eprintln!("{contenders} contenders: {scripts} scripts for {sections} sections in {:?}", began.elapsed());
        assert!(scripts <= 3 * sections + polls, "{contenders} contenders: {scripts} for {sections}");
        environment.wait_until_clean().await;
    }
}

#[tokio::test]
async fn local_handoff_costs_one_script_per_100_ms_or_1000() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    warm(&environment, std::slice::from_ref(&locks)).await;
    let (before, began) = (environment.scripts().await, Instant::now());
    join_all((0..50).map(async |_| {
        for _ in 0..60 {
            locks.lock(key()).await.expect("a grant").release().await.expect("held");
        }
    }))
    .await;
    let (scripts, tenths) = (environment.scripts().await - before, began.elapsed().as_millis() / 100);
    assert!(
        u128::from(scripts) <= 2 + 3 + tenths,
        "{scripts} scripts for 3 000 sections in {tenths} tenths of a second"
    );
}

#[tokio::test]
async fn local_rejection_sends_nothing() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    let guard = locks.try_lock(key()).await.expect("free");
    environment.proxy.forget_requests();
    for _ in 0..100 {
        assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })));
    }
    assert_eq!(environment.proxy.requests().get("EVALSHA"), None);
    guard.release().await.expect("held");
}
