//! How long a crash blocks a key: for the lease of the store, which includes the lock-delay.

use std::{process::Stdio, time::Duration};

use tokio::time::sleep;
use tower_lock::{Lease, LockManager, RedisStore};
use tower_lock_testkit::{
    Process, limits,
    locks::key,
    wait::{ms, until},
};

use crate::support::{Environment, NAME, environment};

/// What the child process of this test holds: `url lease_ms fixed_ms`; zero selects the default.
const HOLDS: &str = "TOWER_LOCK_TEST_HOLDS";

/// Holds the key again and again until it is killed.
async fn hold_in_child_process() {
    let Ok(holds) = std::env::var(HOLDS) else { return };
    let [url, lease, fixed] = holds.split(' ').collect::<Vec<_>>()[..] else { panic!("{holds}") };
    let millis = |text: &str| Some(ms(text.parse().expect("milliseconds"))).filter(|millis| !millis.is_zero());
    // With the default of the call timeout, which is a part of the lease.
    let store = RedisStore::builder().connect_timeout(limits::CONNECT).connect(url).await.expect("it is up");
    let mut builder = LockManager::builder(store).instance("holder");
    if let Some(lease) = millis(lease) {
        builder = builder.lease(lease);
    }
    let locks = builder.build();
    loop {
        let mut call = locks.lock(key());
        if let Some(fixed) = millis(fixed) {
            call = call.lease(Lease::Fixed(fixed));
        }
        // On a busy machine a call times out, or the lease expires.
        if let Ok(guard) = call.await {
            guard.held_lock().lost().await;
        }
    }
}

/// The lease that is left in Redis, at intervals.
async fn left(environment: &Environment) -> Duration {
    sleep(ms(20)).await;
    let left = environment.command(&["PTTL", NAME]).await.integer().expect("a number");
    ms(u64::try_from(left).unwrap_or(0))
}

/// The key never blocks for longer than this, before and after the kill.
async fn blocks_at_most(test: &str, [lease, fixed, most]: [u64; 3]) {
    let Some(environment) = environment().await else { return };
    let mut process = Process::command(std::env::current_exe().expect("this test"));
    let holds = format!("{} {lease} {fixed}", environment.redis.url());
    process.args(["--exact", test]).env(HOLDS, holds).stdout(Stdio::null());
    let holder = Process::start(process).expect("it starts");
    let mut earlier = ms(0);
    // A fixed lease is not renewed.
    let mut renewals = if fixed == 0 { 3 } else { 1 };
    until("it is held, and renewed", async || {
        let left = left(&environment).await;
        assert!(left <= ms(most), "{left:?} left, and {most} ms at the most");
        renewals -= usize::from(left > earlier);
        earlier = left;
        renewals == 0
    })
    .await;
    holder.kill();
    let left = left(&environment).await;
    assert!(left <= ms(most), "{left:?} left behind, and {most} ms at the most");
    until("free", async || self::left(&environment).await.is_zero()).await;
}

/// Guarantee: G2.
#[tokio::test]
async fn killed_holder_of_a_fixed_lease_blocks_for_lease_and_1500_ms() {
    hold_in_child_process().await;
    let test = "leases::killed_holder_of_a_fixed_lease_blocks_for_lease_and_1500_ms";
    // 1 % for the clocks, half a second for the call, a second of lock-delay.
    blocks_at_most(test, [0, 5_000, 6_560]).await;
}

/// Guarantee: G2.
#[tokio::test]
async fn killed_holder_of_a_2_s_lease_blocks_for_3_s() {
    hold_in_child_process().await;
    let test = "leases::killed_holder_of_a_2_s_lease_blocks_for_3_s";
    blocks_at_most(test, [2_000, 0, 3_000]).await;
}
