//! Real servers, and clients that see every byte: how a request ends when there is a network in between.
//!
//! Two [`Locks`] on one store are two instances of a service, each with a server of its own: what is freed in one of them is
//! free for the other only when the store knows.

mod answers;
pub(crate) mod matrix;

use std::net::SocketAddr;

use axum::Router;
use tower_lock::Locks;

use crate::support::{TestStore, serve};

/// Two instances of a service on one store.
pub(crate) struct Site {
    pub(crate) store: TestStore,
    pub(crate) locks: [Locks; 2],
    pub(crate) instances: [SocketAddr; 2],
}

impl Site {
    pub(crate) async fn of(service: impl Fn(&Locks) -> Router) -> Self {
        let store = TestStore::new();
        let locks = ["a", "b"].map(|name| Locks::builder(store.clone()).instance(name).build());
        let instances = [serve(service(&locks[0])).await, serve(service(&locks[1])).await];
        Self { store, locks, instances }
    }
}
