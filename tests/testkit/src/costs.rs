//! The cost of locks in calls of their store: one table of scenarios for all stores.
//!
//! A call is what a store sends to a server for locks: a script of Redis, or a statement of
//! PostgreSQL.

use std::{iter::repeat_with, time::Duration};

use futures_util::future::join_all;
use tokio::time::Instant;
use tower_lock::{
    LockKey, LockManager,
    store::{AcquireReply, AcquireRequest, AcquisitionIds, IfBusy, LockStore, QueueConfig, RenewReply, RenewRequest},
};

use crate::{RedisServer, locks::key};

const MINUTE: Duration = Duration::from_secs(60);

/// The calls of a store in each scenario, at each of the servers that have a key of it.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// The servers that have one key.
    pub servers: usize,
    /// The acquire and the release of free keys, however many these are.
    pub lock: u64,
    /// A section of a key that processes hand to each other. `None`: the store has no queue.
    pub handoff: Option<u64>,
    /// The renewal of keys that are due together.
    pub renewal: u64,
    /// Whether several keys share a call. Otherwise each has one, and they are sent together.
    pub keys_share: bool,
}

/// Checks each scenario.
///
/// `store` makes the store of another process. `calls` returns the calls that each server has
/// executed, without those that the store makes by time: checks of its connections, sweeps.
pub async fn check<S: LockStore>(costs: Costs, store: impl AsyncFn() -> S, calls: impl AsyncFn() -> Vec<u64>) {
    let instances = [LockManager::new(store().await), LockManager::new(store().await)];
    let since = async |before: &[u64]| {
        let calls = calls().await;
        calls
            .into_iter()
            .zip(before)
            .map(|(after, before)| after - before)
            .filter(|calls| *calls > 0)
            .collect::<Vec<_>>()
    };
    // Loads the scripts.
    for locks in &instances {
        locks.lock(key()).await.expect("free").release().await.expect("held");
    }

    let before = calls().await;
    for _ in 0..20 {
        instances[0].try_lock(key()).await.expect("free").release().await.expect("held");
    }
    assert_eq!(since(&before).await, vec![20 * costs.lock; costs.servers], "20 locks of a free key");

    for count in [1, 2, 16, 64_u64] {
        let keys = || (0..count).map(|number| ("several", number));
        // The first lock of a slot of a Cluster makes its fence.
        instances[0].lock_all(keys()).await.expect("free").release().await.expect("held");
        let before = calls().await;
        for round in 0..4 {
            let call = if round % 2 == 0 { instances[0].lock_all(keys()) } else { instances[0].try_lock_all(keys()) };
            call.await.expect("free").release().await.expect("held");
        }
        let calls = since(&before).await;
        costs.check_several(&calls, 4 * costs.lock, count, "locks");
    }

    renewal(costs, &store().await, &calls, &since).await;
    let Some(handoff) = costs.handoff else { return };
    let (before, began) = (calls().await, Instant::now());
    const SECTIONS: u64 = 30;
    join_all(instances.iter().map(async |locks| {
        for _ in 0..SECTIONS {
            locks.lock(key()).wait(MINUTE).await.expect("a grant").release().await.expect("held");
        }
    }))
    .await;
    // A waiter polls about once a second.
    let (calls, polls) = (since(&before).await, 4 * (began.elapsed().as_secs() + 1));
    let total = calls.iter().sum::<u64>();
    assert!(total <= 2 * SECTIONS * handoff + polls, "{total} calls for {SECTIONS} sections of two processes each");
    assert_eq!(calls.len(), costs.servers, "{calls:?}");
}

/// As many keys as the watchdog renews together.
async fn renewal(
    costs: Costs,
    store: &impl LockStore,
    calls: &impl AsyncFn() -> Vec<u64>,
    since: &impl AsyncFn(&[u64]) -> Vec<u64>,
) {
    let ids = AcquisitionIds::new("renewals", fastrand::u64(..));
    let terms = QueueConfig::new(Duration::from_secs(4), MINUTE, 16);
    let held: Vec<_> = (0..128).map(|n| LockKey::from(("held", n))).zip(repeat_with(|| ids.next())).collect();
    let acquire = held.iter().map(|(key, id)| {
        AcquireRequest::new(key.clone(), id.clone(), 10 * MINUTE, IfBusy::Fail, terms, Duration::from_secs(5))
    });
    for reply in join_all(store.acquire(acquire.collect())).await {
        assert!(matches!(reply, Ok(AcquireReply::Granted { .. })), "{reply:?}");
    }
    let renew = async || {
        let requests = held.iter().map(|(key, id)| RenewRequest::new(key.clone(), id.clone(), 10 * MINUTE));
        let replies = store.renew(requests.collect()).await.expect("a reply");
        assert_eq!(replies, vec![RenewReply::Extended; held.len()]);
    };
    renew().await;
    let before = calls().await;
    for _ in 0..4 {
        renew().await;
    }
    let calls = since(&before).await;
    costs.check_several(&calls, 4 * costs.renewal, 128, "renewals");
}

impl Costs {
    /// Checks the calls for several keys, of which one needs `each`.
    fn check_several(self, calls: &[u64], each: u64, keys: u64, operations: &str) {
        let text = format!("{calls:?} calls for 4 {operations} of {keys} keys");
        assert!(calls.len() >= self.servers, "{text}");
        if self.keys_share {
            assert!(calls.iter().all(|calls| *calls == each), "{text}");
        } else {
            assert_eq!(calls.iter().sum::<u64>(), each * keys, "{text}");
        }
    }
}

/// The runs of a command at a server, in scripts and outside.
pub async fn runs(server: &RedisServer, command: &str) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]).await;
    runs_in(stats.text().unwrap_or_default(), command)
}

/// The runs of a command, in an `INFO commandstats`.
#[must_use]
pub fn runs_in(stats: &str, command: &str) -> u64 {
    let prefix = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(&prefix));
    line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
}

/// The scripts that a server has executed or refused.
pub async fn scripts(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]).await;
    ["eval", "evalsha"].iter().map(|command| runs_in(stats.text().unwrap_or_default(), command)).sum()
}
