//! Real servers, and clients that see every byte: how a request ends when there is a network in between.
//!
//! Two [`Locks`] on one store are two instances of a service, each with a server of its own: what is freed in one of them is
//! free for the other only when the store knows.

mod answers;
mod broken;
mod readers;
mod uploads;
mod nested;
mod front;
mod tunnels;
pub(crate) mod matrix;

use std::net::SocketAddr;

use axum::Router;
use tower_lock::{Locks, test_util::Clock};

use crate::support::{TestStore, serve};

/// Two instances of a service on one store.
pub(crate) struct Site {
    pub(crate) store: TestStore,
    /// Leases and lock-delays are measured by it; it can jump.
    pub(crate) clock: Clock,
    pub(crate) locks: [Locks; 2],
    pub(crate) instances: [SocketAddr; 2],
}

impl Site {
    pub(crate) async fn of(service: impl Fn(&Locks) -> Router) -> Self {
        let clock = Clock::default();
        let store = TestStore::with_clock(clock.clone());
        let locks = ["a", "b"].map(|name| Locks::builder(store.clone()).instance(name).clock(clock.clone()).build());
        let instances = [serve(service(&locks[0])).await, serve(service(&locks[1])).await];
        Self { store, clock, locks, instances }
    }
}
