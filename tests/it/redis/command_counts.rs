//! The cost of locks in Redis commands, counted at a proxy and on the server.

use std::future::IntoFuture;

use futures_util::future::join_all;
use tokio::time::Instant;
use tower_lock::{LockError, LockManager};
use tower_lock_testkit::{
    costs::{self, Costs},
    locks::key,
    wait::{ms, until},
};

use crate::support::{Environment, environment};

impl Environment {
    /// The requests without the checks of each connection, once a second: each of them is a round
    /// trip.
    pub(crate) fn requests(&self) -> u64 {
        let requests = self.proxy.requests();
        let asked = |name: &str| !["PING", "PUBSUB", "ROLE"].contains(&name);
        requests.iter().filter(|(name, _)| asked(name)).map(|(_, count)| count).sum()
    }
}

/// Loads the scripts and waits for the subscriptions.
async fn warm(environment: &Environment, instances: &[LockManager]) {
    for locks in instances {
        locks.lock(key()).await.expect("free").release().await.expect("released");
    }
    environment.wait_until_clean().await;
}

/// Guarantee: G21.
#[tokio::test]
async fn locks_on_redis_cost_the_scripts_of_the_table() {
    let Some(environment) = environment().await else { return };
    let row = Costs { servers: 1, lock: 2, handoff: Some(3), renewal: 1, keys_share: true };
    costs::check(row, async || environment.store().await, async || vec![environment.requests()]).await;
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
    for (count, busy) in [(1, 0), (2, 1), (3, 1), (16, 0), (16, 7_u64)] {
        let held = other.try_lock(key(busy)).await.expect("free");
        environment.proxy.forget_requests();
        let began = Instant::now();
        let call = tokio::spawn(locks.lock_all((0..count).map(key)).into_future());
        until("it waits", async || other.inspect(key(busy)).await.is_ok_and(|key| key.waiting > 0)).await;
        // Greater keys are free meanwhile.
        for number in busy + 1..count {
            let is_free = async || other.inspect(key(number)).await.is_ok_and(|key| key.holders.is_empty());
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
async fn local_handoff_costs_one_script_per_100_ms_or_1000() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    warm(&environment, std::slice::from_ref(&locks)).await;
    let (before, began) = (environment.scripts().await, Instant::now());
    join_all((0..50).map(async |_| {
        for _ in 0..20 {
            locks.lock(key()).await.expect("a grant").release().await.expect("held");
        }
    }))
    .await;
    let (scripts, tenths) = (environment.scripts().await - before, began.elapsed().as_millis() / 100);
    assert!(
        u128::from(scripts) <= 2 + 3 + tenths,
        "{scripts} scripts for 1 000 sections in {tenths} tenths of a second"
    );
}

#[tokio::test]
async fn permit_costs_two_scripts_and_a_reader_beside_others_none() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    warm(&environment, std::slice::from_ref(&locks)).await;
    locks.permit(key(), 4).await.expect("free").release().await.expect("held");
    environment.proxy.forget_requests();
    for _ in 0..10 {
        locks.permit(key(), 4).await.expect("free").release().await.expect("held");
    }
    assert_eq!(environment.proxy.requests()["EVALSHA"], 20);
    let first = locks.read(key()).await.expect("free");
    environment.proxy.forget_requests();
    let began = Instant::now();
    for _ in 0..100 {
        locks.read(key()).await.expect("beside the first").release().await.expect("held");
    }
    let scripts = environment.proxy.requests().get("EVALSHA").copied().unwrap_or(0);
    // After a tenth of a second a reader has a grant of its own.
    assert!(scripts == 0 || began.elapsed() > ms(100), "{scripts} scripts");
    first.release().await.expect("held");
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
