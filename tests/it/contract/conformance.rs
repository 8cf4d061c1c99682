//! The conformance suite, run on the stores of this crate.

use std::sync::Arc;

use tower_lock::{
    MemoryStore,
    test_util::{Fault, StoreOp, TestStore, conformance},
};
use tower_lock_testkit::store::{
    DeniesItsQueue, DeniesItsRecords, InterceptedStore, ReleasesAnyHolder, Unordered, WithoutTraits,
};

#[tokio::test(start_paused = true)]
async fn memory_store_passes_conformance() {
    conformance::check(MemoryStore::new()).await;
}

/// The same rules with delayed and duplicated calls.
#[tokio::test(start_paused = true)]
async fn store_with_duplicated_calls_passes_conformance() {
    let store = TestStore::new();
    for verb in [StoreOp::Acquire, StoreOp::Renew] {
        store.on(verb).fault(Fault::Duplicate);
    }
    store.fault_events(Fault::Duplicate);
    conformance::check(store).await;
}

#[tokio::test(start_paused = true)]
async fn store_without_optional_traits_passes_conformance() {
    conformance::check(InterceptedStore::new(Arc::new(MemoryStore::new()), WithoutTraits)).await;
}

#[tokio::test(start_paused = true)]
async fn store_without_a_queue_passes_conformance() {
    conformance::check(InterceptedStore::new(Arc::new(MemoryStore::new()), Unordered)).await;
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "inspect_reports_holder_and_waiters")]
async fn store_that_denies_its_queue_fails() {
    conformance::check(InterceptedStore::new(Arc::new(MemoryStore::new()), DeniesItsQueue)).await;
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "request_for_a_record_is_refused")]
async fn store_that_denies_its_records_fails() {
    conformance::check(InterceptedStore::new(Arc::new(MemoryStore::new()), DeniesItsRecords)).await;
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "release_of_others_and_second_release_change_nothing")]
async fn broken_store_fails_with_the_violated_clause() {
    conformance::check(InterceptedStore::new(Arc::new(MemoryStore::new()), ReleasesAnyHolder)).await;
}
