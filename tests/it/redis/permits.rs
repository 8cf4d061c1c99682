//! Permits and readers of several processes on Redis.

use std::time::Duration;

use tower_lock::{LockError, LockKey, LockManager, store::StoreErrorKind};
use tower_lock_testkit::{
    locks::key,
    permits::{self, one_of_several_holders_is_revoked, rules_are_kept},
    wait::{ms, until},
};

use crate::support::{Environment, NAME, environment};

async fn processes(environment: &Environment, count: usize) -> Vec<LockManager> {
    let mut locks = Vec::new();
    for n in 0..count {
        locks.push(environment.direct_instance(&format!("p{n}")).await);
    }
    locks
}

/// Guarantee: G22.
#[tokio::test]
async fn permits_and_readers_on_redis_follow_the_rules() {
    let Some(environment) = environment().await else { return };
    let locks = processes(&environment, 3).await;
    rules_are_kept(&locks).await;
    assert!(environment.keys().await.is_empty(), "nothing is left");
}

/// Guarantee: G22, G23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_permits_and_one_of_readers_on_redis() {
    let Some(environment) = environment().await else { return };
    let locks = processes(&environment, 4).await;
    for limit in [6, 1_024] {
        let report = permits::storm(&locks, &key(), limit, ms(500)).await;
        assert!(report.sections > 20 && report.most > 2, "{report:?}");
        until("nothing is left", async || environment.keys().await.is_empty()).await;
    }
}

/// The other permits are those of processes that live.
///
/// Guarantee: G22.
#[tokio::test]
async fn operator_sees_and_revokes_one_of_several_holders() {
    let Some(environment) = environment().await else { return };
    let locks = processes(&environment, 2).await;
    one_of_several_holders_is_revoked(&locks, key()).await;
}

/// Other programs expect one holder.
///
/// Guarantee: G22.
#[tokio::test]
async fn raw_key_has_no_permits() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("one").await;
    let refused = locks.permit(LockKey::raw("order:7").expect("a name"), 2).await;
    assert!(
        matches!(&refused, Err(LockError::Store(error)) if error.kind() == StoreErrorKind::Unsupported),
        "{refused:?}"
    );
}

/// A hash, a list or a text of another program is no shared key.
#[tokio::test]
async fn permit_of_a_key_of_another_type_fails() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("one").await;
    environment.command(&["SET", NAME, "text"]).await;
    let refused = locks.permit(key(), 2).await;
    assert!(matches!(&refused, Err(LockError::Store(error)) if error.kind() == StoreErrorKind::Refused), "{refused:?}");
    environment.command(&["DEL", NAME]).await;
    environment.command(&["HSET", NAME, "healed", "1"]).await;
    let busy = locks.permit(key(), 2).wait(Duration::ZERO).await;
    assert!(matches!(busy, Err(LockError::Busy { .. })), "{busy:?}");
}
