//! A process and its forked child share only Redis. The process id is simulated.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::SeqCst},
};

use tower_lock::{LockError, LockManager, RedisStore};
use tower_lock_testkit::{
    locks::key,
    wait::{soon, until},
};

use crate::support::environment;

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forked_processes_have_different_ids_and_one_holder() {
    let Some(environment) = environment().await else { return };
    // Both start as the same process, with the same random bits.
    let copy = async |process: u32| {
        let id = Arc::new(AtomicU32::new(100));
        let store = RedisStore::connect(&environment.redis.url()).await.expect("it is up");
        let locks = LockManager::builder(store).instance("api").seed(7).process_id(Arc::clone(&id)).build();
        id.store(process, SeqCst);
        locks
    };
    let (parent, child) = (copy(100).await, copy(101).await);
    for (one, two) in [(&parent, &child), (&child, &parent)] {
        let guard = one.lock(key()).await.expect("free");
        let refused = two.try_lock(key()).await.expect_err("one key, one holder");
        assert!(matches!(refused, LockError::Busy { .. }), "{refused:?}");
        let first = two.inspect(key()).await.expect("it is up").holder.expect("held");
        let token = guard.fencing_token();
        let waiting = tokio::spawn({
            let two = two.clone();
            async move { two.lock(key()).await }
        });
        until("it waits", async || one.inspect(key()).await.expect("it is up").waiting == 1).await;
        guard.release().await.expect("it is up");
        let guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
        let second = one.inspect(key()).await.expect("it is up").holder.expect("held");
        assert!(first.manager() != second.manager() && token < guard.fencing_token(), "{first} {second}");
        guard.release().await.expect("it is up");
    }
    environment.wait_until_clean().await;
}
