//! Real servers, and clients that see every byte: how a request ends when there is a network in between.
//!
//! Two [`LockManager`] on one store are two instances of a service, each with a server of its own: what is freed in one of them is
//! free for the other only when the store knows.

pub(crate) mod matrix;
mod responses;
mod aborts;
mod readers;
mod uploads;
mod disconnect;
mod nested;
mod preflight;
#[cfg(target_os = "linux")]
mod disconnect_probe;
mod tunnels;

use std::{net::SocketAddr, time::Duration};

use axum::{Router, routing::get};
use tokio::sync::watch;
use tower_lock::{LockLayer, LockManager, key::KeySource, test_util::Clock};

use self::matrix::{Client, Version};
use crate::support::{TestStore, one_key, serve, until};

const VERSIONS: [Version; 2] = [Version::Http1, Version::Http2];

/// A lock-delay that is longer than the machine can be busy with something else: it is over when the clock jumps.
const DELAY: Duration = Duration::from_secs(3600);

/// Two instances of a service on one store.
struct Site {
    store: TestStore,
    /// Leases and lock-delays are measured by it; it can jump.
    clock: Clock,
    locks: [LockManager; 2],
    instances: [SocketAddr; 2],
}

/// Tells when it is dropped.
struct Tells(watch::Sender<bool>);

/// One key for everybody, with the long lock-delay.
fn one_key_for_long(locks: &LockManager) -> LockLayer<impl KeySource + use<>> {
    LockLayer::new(locks, one_key()).lock_delay(DELAY)
}

impl Site {
    /// Each instance also has `/next`, under the one key: it refuses at once.
    async fn of(service: impl Fn(&LockManager) -> Router) -> Self {
        let clock = Clock::default();
        let store = TestStore::with_clock(clock.clone());
        let locks =
            ["a", "b"].map(|name| LockManager::builder(store.clone()).instance(name).clock(clock.clone()).build());
        let next = |locks| Router::new().route("/next", get(|| async { "next" }).route_layer(one_key_for_long(locks)));
        let [one, two] = locks.each_ref().map(|locks| service(locks).merge(next(locks)));
        let instances = [serve(one).await, serve(two).await];
        Self { store, clock, locks, instances }
    }

    /// What both instances answer to whoever wants the one key.
    async fn answers(&self, status: u16, what: &str) {
        for version in VERSIONS {
            for address in self.instances {
                let reply = Client::new(address, version).ask("GET", "/next").await.expect("an answer");
                assert_eq!(reply.status, status, "{what}");
            }
        }
    }

    /// A bad end: both instances refuse until the lock-delay is over, and none of them for longer.
    async fn stays_taken_for_the_delay(&self, what: &str) {
        self.answers(409, what).await;
        // From here on it counts.
        until("given back", || self.store.held_count() == 0).await;
        for _ in 0..2 {
            self.answers(409, what).await;
            self.clock.jump(DELAY / 2);
        }
        self.answers(200, what).await;
    }

    /// A good end: both instances serve as soon as the store knows.
    async fn is_free_at_once(&self, what: &str) {
        until("given back", || self.store.held_count() == 0).await;
        self.answers(200, what).await;
    }
}

impl Drop for Tells {
    fn drop(&mut self) {
        self.0.send_replace(true);
    }
}
