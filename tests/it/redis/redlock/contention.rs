//! Several instances want one key at the same time.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::SeqCst},
};

use futures_util::future::join_all;
use tokio::task::yield_now;
use tower_lock::{LockError, LockGuard, LockManager};
use tower_lock_testkit::{
    Direction, limits,
    locks::key,
    wait::{ms, soon, until},
};

use super::{LONGEST, servers};

/// What all instances check: one section at a time, under a rising fence.
#[derive(Clone, Default)]
struct Exclusion(Arc<(AtomicBool, AtomicI64, AtomicUsize)>);

impl Exclusion {
    async fn section(&self, guard: LockGuard) {
        let (is_held, last, sections) = &*self.0;
        assert!(!is_held.swap(true, SeqCst), "two sections at once");
        let fence = guard.fencing_token().as_i64();
        assert!(last.swap(fence, SeqCst) < fence, "the fence rises");
        sections.fetch_add(1, SeqCst);
        yield_now().await;
        is_held.store(false, SeqCst);
        // Without a majority that replies, it is repeated.
        let _ = guard.release().await;
    }

    fn sections(&self) -> usize {
        self.0.2.load(SeqCst)
    }
}

/// Guarantee: G1, G5.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_contenders_exclude_each_other_and_all_finish() {
    let Some(servers) = servers(3).await else { return };
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let (instances, exclusion) = (join_all(names.map(|name| servers.instance(name))).await, Exclusion::default());
    let contenders = instances.into_iter().map(|locks| {
        let exclusion = exclusion.clone();
        tokio::spawn(async move {
            for _ in 0..3 {
                exclusion.section(locks.lock(key()).wait(LONGEST).await.expect("a grant")).await;
            }
        })
    });
    for result in soon("all sections", join_all(contenders.collect::<Vec<_>>())).await {
        result.expect("no violation");
    }
    assert_eq!(exclusion.sections(), 24);
    servers.wait_until_clean().await;
}

/// One server after the other is frozen, separated, slow, or loses its connections.
/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contenders_exclude_each_other_while_servers_fail() {
    let Some(servers) = servers(3).await else { return };
    // A vote whose release is lost lasts as long as its lease.
    let instance = async |name| LockManager::builder(servers.store().await).lease(ms(10_000)).instance(name).build();
    let instances = join_all(["a", "b", "c"].map(instance)).await;
    let (exclusion, is_over) = (Exclusion::default(), Arc::new(AtomicBool::new(false)));
    let contenders = instances.iter().cloned().map(|locks| {
        let (exclusion, is_over) = (exclusion.clone(), Arc::clone(&is_over));
        tokio::spawn(async move {
            while !is_over.load(SeqCst) {
                if let Ok(guard) = locks.lock(key()).wait(LONGEST).await {
                    exclusion.section(guard).await;
                }
            }
        })
    });
    let contenders: Vec<_> = contenders.collect();
    for round in 0..4 {
        let before = exclusion.sections();
        let (server, proxy) = (&servers.redis[round % 3], &servers.proxies[round % 3]);
        match round {
            0 => server.freeze(),
            1 => proxy.all().swallow(Direction::Both),
            2 => proxy.all().delay(Direction::Both, ms(120)),
            _ => proxy.all().cut(),
        }
        until("sections of the others", async || exclusion.sections() > before + 5).await;
        server.thaw();
        proxy.all().heal();
    }
    is_over.store(true, SeqCst);
    for result in soon("the end", join_all(contenders)).await {
        result.expect("no violation");
    }
    // The managers still exist: they repeat the releases that a server has not confirmed.
    servers.wait_until_clean().await;
    drop(instances);
}

/// Without another vote, both would be rejected although the key is free.
/// Guarantee: G6.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_two_callers_that_do_not_wait_gets_a_free_key() {
    const ROUNDS: usize = 50;
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
    assert!(won >= ROUNDS * 9 / 10, "{won} of {ROUNDS}");
    servers.wait_until_clean().await;
}

/// The first attempt has a vote of the third server, which replies late. It is withdrawn before the
/// votes of the next attempt.
/// Guarantee: G6.
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
/// Guarantee: G5.
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
    let locks = servers.hasty_instance("a").await;
    // On a busy machine, the reply to a release is late. The release is then repeated.
    drop(locks.lock(key()).wait(LONGEST).await.expect("free").release().await);
    servers.wait_until_clean().await;
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
    until("all servers have it", async || servers.holding().await == 3).await;
    tokio::time::sleep(2 * limits::SHORT).await;
    assert_eq!(servers.holding().await, 3, "nothing was withdrawn");
    drop(guard.release().await);
    servers.wait_until_clean().await;
}
