//! Fences rise, whichever servers grant them.

use tower_lock::{
    LockError, LockManager,
    store::{AcquireReply, AcquireRequest, AcquisitionIds, IfBusy, QueueConfig},
};
use tower_lock_testkit::{
    limits,
    locks::key,
    store::StoreExt,
    wait::{ms, until},
};

use super::{FENCE, LONGEST, Servers, servers};

const HOUR: i64 = 3_600_000_000;

async fn fence(locks: &LockManager) -> i64 {
    let guard = locks.lock(key()).await.expect("free");
    // Without the number of the section.
    let fence = guard.fencing_token().as_i64() >> 10;
    guard.release().await.expect("held");
    fence
}

/// The clock of a server, in microseconds.
async fn now(servers: &Servers, server: usize) -> i64 {
    let time = servers.redis[server].command(&["TIME"]).await;
    let part = |at: usize| time.items()[at].integer().expect("a number");
    part(0) * 1_000_000 + part(1)
}

/// As after a grant of a server whose clock is ahead.
async fn set_ahead(servers: &Servers, server: usize, by: i64) {
    let ahead = (now(servers, server).await + by).to_string();
    servers.redis[server].command(&["SET", FENCE, &ahead]).await;
}

/// The server with the largest fence takes it to the others: the maximum of counters of their own
/// would fall when it is down.
/// Guarantee: G11.
#[tokio::test]
async fn fence_of_a_clock_that_is_ahead_is_kept_by_the_others() {
    let Some(servers) = servers(3).await else { return };
    let locks = servers.instance("a").await;
    fence(&locks).await;
    // Down: the one that is ahead is one of the majority.
    servers.redis[1].freeze();
    set_ahead(&servers, 0, HOUR).await;
    let ahead = fence(&locks).await;
    assert!(ahead > now(&servers, 2).await + HOUR / 2, "{ahead}");
    servers.redis[1].thaw();
    servers.redis[0].freeze();
    let later = fence(&locks).await;
    assert!(later > ahead, "{later} after {ahead}");
    servers.redis[0].thaw();
}

/// Guarantee: G11.
#[tokio::test]
async fn server_whose_clock_is_wrong_by_days_delays_nothing() {
    let Some(mut servers) = servers(3).await else { return };
    let locks = servers.instance("a").await;
    fence(&locks).await;
    // A fence that is a day ahead of the clock is replaced. This one is not, and yet too far ahead
    // of the others.
    set_ahead(&servers, 0, 23 * HOUR).await;
    let mut last = fence(&locks).await;
    for _ in 0..5 {
        let next = fence(&locks).await;
        assert!(next > last && next < now(&servers, 1).await + HOUR, "{next} after {last}");
        last = next;
    }
    servers.redis[2].kill();
    let error = locks.try_lock(key()).await.expect_err("the two do not agree");
    let LockError::Store(error) = error else { panic!("{error}") };
    assert!(format!("{error:?}").contains("half a day"), "{error:?}");
    servers.redis[2].restart_empty().await;
    until("a majority agrees", async || locks.try_lock(key()).await.is_ok()).await;
}

/// As after a step of the clock that ends the lease at one server.
/// Guarantee: G1.
#[tokio::test]
async fn lock_that_ends_early_at_one_server_is_still_held() {
    let Some(servers) = servers(3).await else { return };
    let (one, two) = (servers.instance("a").await, servers.instance("b").await);
    let guard = servers.lock_everywhere(&one).await;
    servers.redis[1].command(&["DEL", "lock:k"]).await;
    assert!(matches!(two.try_lock(key()).await, Err(LockError::Busy { .. })));
    guard.release().await.expect("held by a majority");
    servers.wait_until_clean().await;
}

/// One server has not granted the key when the call is repeated.
#[tokio::test]
async fn repeated_acquire_finds_the_fence_of_its_majority() {
    let Some(servers) = servers(3).await else { return };
    let store = servers.store().await;
    let id = AcquisitionIds::new("a", 1).next();
    let terms = QueueConfig::new(ms(4_000), ms(10_000), 16);
    let acquire = async || {
        let request = AcquireRequest::new(key(), id.clone(), LONGEST, IfBusy::Fail, terms, limits::CALL);
        match store.acquire_one(request).await {
            Ok(AcquireReply::Granted { fence, .. }) => fence,
            other => panic!("{other:?}"),
        }
    };
    let first = acquire().await;
    assert_eq!(acquire().await, first);
    servers.redis[2].command(&["DEL", "lock:k"]).await;
    // The third server grants it anew: if its vote is among the first two, the fence is a later
    // one, and all have it.
    let second = acquire().await;
    assert!(second >= first);
    until("all have it", async || {
        let values = futures_util::future::join_all(servers.redis.iter().map(async |redis| {
            redis.command(&["HVALS", "lock:k"]).await.texts().into_iter().map(str::to_owned).collect::<Vec<_>>()
        }));
        values.await.iter().all(|values| *values == [second.to_string()])
    })
    .await;
    assert_eq!(acquire().await, second);
}
