//! Several instances want one key at the same time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tower_lock::LockError;
use tower_lock_testkit::{
    Direction,
    locks::key,
    wait::{ms, soon, until},
};

use super::{LONGEST, servers};

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_contenders_exclude_each_other_and_all_finish() {
    const SECTIONS: u64 = 8;
    let Some(servers) = servers(3).await else { return };
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let instances = join_all(names.map(|name| servers.instance(name))).await;
    let (is_held, last) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let contenders = instances.into_iter().map(|locks| {
        let (is_held, last) = (Arc::clone(&is_held), Arc::clone(&last));
        tokio::spawn(async move {
            for _ in 0..SECTIONS {
                let guard = locks.lock(key()).wait(Duration::from_secs(100)).await.expect("a grant");
                assert!(!is_held.swap(true, SeqCst), "two sections at once");
                let fence = u64::try_from(guard.fencing_token().as_i64()).expect("a number");
                assert!(last.swap(fence, SeqCst) < fence, "the fence rises");
                tokio::task::yield_now().await;
                is_held.store(false, SeqCst);
                guard.release().await.expect("held");
            }
        })
    });
    let contenders: Vec<_> = contenders.collect();
    for result in soon("all sections", join_all(contenders)).await {
        result.expect("no violation");
    }
    servers.wait_until_clean().await;
}

/// Without another vote, both would be rejected although the key is free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_two_callers_that_do_not_wait_gets_a_free_key() {
    const ROUNDS: usize = 100;
    let Some(servers) = servers(3).await else { return };
    let (one, two) = (servers.instance("a").await, servers.instance("b").await);
    let mut won = 0;
    for _ in 0..ROUNDS {
        let (first, second) = tokio::join!(one.try_lock(key()), two.try_lock(key()));
        won += usize::from(first.is_ok() || second.is_ok());
        for guard in [first, second] {
            match guard {
                Ok(guard) => drop(guard.release().await),
                Err(error) => assert!(matches!(error, LockError::Busy { .. }), "{error}"),
            }
        }
    }
    eprintln!("{won} of {ROUNDS} rounds have a winner");
    assert!(won >= ROUNDS * 9 / 10, "{won} of {ROUNDS}");
    servers.wait_until_clean().await;
}

/// The first attempt has a vote of the third server, which replies late. It is withdrawn before the
/// votes of the next attempt.
#[tokio::test]
async fn lost_vote_does_not_stand_in_the_way_of_the_next_attempt() {
    let Some(servers) = servers(3).await else { return };
    let locks = servers.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("held");
    servers.wait_until_clean().await;
    for is_late in [false, true] {
        for server in [0, 1] {
            servers.occupy(server).await;
        }
        if is_late {
            servers.proxies[2].all().hold(Direction::Down);
        }
        assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })), "late: {is_late}");
        for server in [0, 1] {
            servers.redis[server].command(&["DEL", "lock:k"]).await;
        }
        let guard = locks.try_lock(key()).await.expect("free at a majority");
        servers.proxies[2].all().heal();
        until("also at the third server", async || servers.holding().await == 3).await;
        guard.release().await.expect("held");
        servers.wait_until_clean().await;
    }
}

/// A waiter asks all servers again, and finds the key free.
#[tokio::test]
async fn waiter_gets_the_key_after_its_release_without_a_queue() {
    let Some(servers) = servers(3).await else { return };
    let (one, two) = (servers.instance("a").await, servers.instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).wait(LONGEST).into_future());
    let scripts = || servers.proxies[0].requests()["EVALSHA"];
    let asked = scripts();
    until("it has asked", async || scripts() > asked + 2).await;
    assert_eq!(servers.redis[0].command(&["KEYS", "*:q:*"]).await.texts(), Vec::<&str>::new(), "no queue");
    guard.release().await.expect("held");
    soon("a grant", waiting).await.expect("runs").expect("a grant").release().await.expect("held");
    servers.wait_until_clean().await;
}

/// The same id asks again after an error: its vote is found, and its fence stays.
#[tokio::test]
async fn withdrawal_spares_the_grant_of_a_later_call() {
    let Some(servers) = servers(3).await else { return };
    let locks = servers.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("held");
    // Two of three replies are missing: the call fails, and is repeated.
    servers.proxies[0].all().hold(Direction::Down);
    servers.proxies[1].all().hold(Direction::Down);
    let waiting = tokio::spawn(locks.lock(key()).wait(LONGEST).into_future());
    let scripts = || servers.proxies[2].requests()["EVALSHA"];
    let asked = scripts();
    until("it asks again", async || scripts() > asked + 2).await;
    servers.proxies[0].all().heal();
    servers.proxies[1].all().heal();
    let guard = soon("a grant", waiting).await.expect("runs").expect("a grant");
    tokio::time::sleep(ms(700)).await;
    assert_eq!(servers.holding().await, 3, "nothing was withdrawn");
    guard.release().await.expect("held");
    servers.wait_until_clean().await;
}
