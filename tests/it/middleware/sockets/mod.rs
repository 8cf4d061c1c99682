//! Real servers, and clients that see every byte: the end of a request over a network.
//!
//! Two [`LockManager`]s on one store are two instances of a service, each with its own server: a
//! key released in one of them is free for the other only when the store knows.

mod responses;
mod aborts;
mod readers;
mod replay;
mod uploads;
mod disconnect;
mod nested;
#[cfg(target_os = "linux")]
mod disconnect_probe;
mod tunnels;

use std::{net::SocketAddr, time::Duration};

use axum::{Router, routing::get};
use tokio::sync::watch;
use tower_lock::test_util::TestStore;
use tower_lock::{LockLayer, LockManager, key::KeySource, test_util::Clock};
use tower_lock_testkit::{
    app::serve,
    http::{Client, Version},
    locks::one_key,
    wait::until,
};

const VERSIONS: [Version; 2] = [Version::Http1, Version::Http2];

/// A lock-delay longer than any pause of the machine: it ends when the clock jumps.
const DELAY: Duration = Duration::from_secs(3600);

/// Two instances of a service on one store.
struct Cluster {
    store: TestStore,
    /// The clock of leases and lock-delays; it can jump.
    clock: Clock,
    locks: [LockManager; 2],
    instances: [SocketAddr; 2],
}

/// Notifies when it is dropped.
struct NotifyOnDrop(watch::Sender<bool>);

/// One key for all requests, with the long lock-delay.
fn one_key_for_long(locks: &LockManager) -> LockLayer<impl KeySource + use<>> {
    LockLayer::new(locks, one_key()).lock_delay(DELAY)
}

impl Cluster {
    /// Each instance also has `/next` under the one key, without a wait.
    async fn start(service: impl Fn(&LockManager) -> Router) -> Self {
        let clock = Clock::default();
        let store = TestStore::with_clock(clock.clone());
        let locks =
            ["a", "b"].map(|name| LockManager::builder(store.clone()).instance(name).clock(clock.clone()).build());
        let next = |locks| Router::new().route("/next", get(|| async { "next" }).route_layer(one_key_for_long(locks)));
        let [one, two] = locks.each_ref().map(|locks| service(locks).merge(next(locks)));
        let instances = [serve(one).await, serve(two).await];
        Self { store, clock, locks, instances }
    }

    /// Checks the response of both instances to a request for the one key.
    async fn assert_status(&self, status: u16, what: &str) {
        for version in VERSIONS {
            for address in self.instances {
                let reply = Client::new(address, version).request("GET", "/next").await.expect("a response");
                assert_eq!(reply.status, status, "{what}");
            }
        }
    }

    /// An aborted section: both instances reject for the lock-delay, and not longer.
    async fn assert_blocked_for_the_delay(&self, what: &str) {
        self.assert_status(409, what).await;
        // The lock-delay counts from here.
        until("released", async || self.store.held_count() == 0).await;
        for _ in 0..2 {
            self.assert_status(409, what).await;
            self.clock.jump(DELAY / 2);
        }
        self.assert_status(200, what).await;
    }

    /// A normal end: both instances serve as soon as the store knows.
    async fn assert_free(&self, what: &str) {
        until("released", async || self.store.held_count() == 0).await;
        self.assert_status(200, what).await;
    }
}

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        self.0.send_replace(true);
    }
}
