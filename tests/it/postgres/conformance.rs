//! One contract for all stores.

use std::sync::Arc;

use tower_lock::{
    store::{LockStore, PostgresConnectError},
    test_util::conformance,
};
use tower_lock_testkit::parity::same_replies_as_memory;

use crate::support::{environment, pooled};

#[tokio::test]
async fn postgres_store_passes_conformance() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    conformance::check(store).await;
}

/// Calls of one store share the sessions of the pooler, in any order.
#[tokio::test]
async fn store_behind_pgbouncer_passes_conformance() {
    let Some((environment, pooler)) = pooled().await else { return };
    conformance::check(environment.store_behind(&pooler).await).await;
}

#[tokio::test]
async fn memory_and_pgbouncer_give_the_same_replies() {
    let Some((environment, pooler)) = pooled().await else { return };
    same_replies_as_memory(environment.store_behind(&pooler).await).await;
}

/// Without a connection for messages its waiters poll.
#[tokio::test]
async fn store_behind_pgbouncer_alone_passes_conformance() {
    let Some((environment, pooler)) = pooled().await else { return };
    let builder = environment.builder().migrate(true);
    let store = Arc::new(builder.connect(&pooler.url()).await.expect("it is up"));
    assert!(!store.traits().events, "no message arrives");
    conformance::check(store).await;
}

/// The messages of a pooler reach another client.
#[tokio::test]
async fn events_url_to_a_pooler_is_refused() {
    let Some((environment, pooler)) = pooled().await else { return };
    let url = format!("{}?events_url={}&migrate=true", environment.server().url(), pooler.url());
    let error = environment.builder().connect(&url).await;
    assert!(matches!(error, Err(PostgresConnectError::EventsUnavailable { .. })), "{error:?}");
}

/// The same random sequence of calls gives the same replies and events on both stores. `SEED=` runs
/// one sequence.
#[tokio::test]
async fn memory_and_postgres_give_the_same_replies() {
    let Some(environment) = environment().await else { return };
    same_replies_as_memory(environment.store().await).await;
}
