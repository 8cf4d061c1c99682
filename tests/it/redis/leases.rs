//! How long a crash blocks a key: for the lease of the store, which includes the lock-delay.

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

use tokio::time::sleep;
use tower_lock::{Lease, LockManager, RedisStore};
use tower_lock_testkit::{
    locks::key,
    wait::{ms, until},
};

use crate::support::{Environment, NAME, environment};

/// What the child process of this test holds: `url lease_ms fixed_ms`; zero selects the default.
const HOLDS: &str = "TOWER_LOCK_TEST_HOLDS";

/// A child process that holds the key until it is killed.
struct Holder(Child);

impl Holder {
    fn start(test: &str, url: &str, lease: Duration, fixed: Duration) -> Self {
        let holds = format!("{url} {} {}", lease.as_millis(), fixed.as_millis());
        let mut process = Command::new(std::env::current_exe().expect("this test"));
        process.args(["--exact", test]).env(HOLDS, holds).stdout(Stdio::null());
        Self(process.spawn().expect("it starts"))
    }

    fn kill(&mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("the process has ended");
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Never returns in the child process. Does nothing in the test itself.
async fn hold_in_child_process() {
    let Ok(holds) = std::env::var(HOLDS) else { return };
    let [url, lease, fixed] = holds.split(' ').collect::<Vec<_>>()[..] else { panic!("{holds}") };
    let millis = |text: &str| ms(text.parse().expect("milliseconds"));
    let mut builder = LockManager::builder(RedisStore::connect(url).await.expect("it is up")).instance("holder");
    if !millis(lease).is_zero() {
        builder = builder.lease(millis(lease));
    }
    let mut call = builder.build().lock(key());
    if !millis(fixed).is_zero() {
        call = call.lease(Lease::Fixed(millis(fixed)));
    }
    let _guard = call.await.expect("free");
    std::future::pending::<()>().await;
}

async fn left(environment: &Environment) -> Option<Duration> {
    let left = environment.command(&["PTTL", NAME]).await.integer().expect("a number");
    u64::try_from(left).ok().map(ms)
}

/// The key never blocks for longer than this, before and after the kill.
async fn blocks_at_most(test: &str, lease: Duration, fixed: Duration, most: Duration, alive: Duration) {
    let Some(environment) = environment().await else { return };
    let mut holder = Holder::start(test, &environment.redis.url(), lease, fixed);
    until("it holds the key", async || left(&environment).await.is_some()).await;
    for _ in 0..alive.as_millis() / 50 {
        let left = left(&environment).await.expect("it is renewed");
        assert!(left <= most, "{left:?} left, and {most:?} at the most");
        sleep(ms(50)).await;
    }
    holder.kill();
    let left_behind = left(&environment).await.unwrap_or_default();
    assert!(left_behind <= most, "{left_behind:?} left behind, and {most:?} at the most");
    until("free", async || left(&environment).await.is_none()).await;
}

/// Guarantee: G2.
#[tokio::test]
async fn killed_holder_of_a_fixed_lease_blocks_for_lease_and_1500_ms() {
    hold_in_child_process().await;
    let test = "leases::killed_holder_of_a_fixed_lease_blocks_for_lease_and_1500_ms";
    // 1 % for the clocks, half a second for the call, a second of lock-delay.
    blocks_at_most(test, Duration::ZERO, ms(5_000), ms(6_560), ms(2_500)).await;
}

/// Guarantee: G2.
#[tokio::test]
async fn killed_holder_of_a_2_s_lease_blocks_for_3_s() {
    hold_in_child_process().await;
    let test = "leases::killed_holder_of_a_2_s_lease_blocks_for_3_s";
    blocks_at_most(test, ms(2_000), Duration::ZERO, ms(3_000), ms(5_000)).await;
}
