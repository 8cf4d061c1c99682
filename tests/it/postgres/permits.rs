//! Permits and readers of several processes in PostgreSQL.

use std::time::Duration;

use tower_lock::{LockError, LockKey, LockManager, lock::ReleaseOutcome, store::ForceReleaseReply};
use tower_lock_testkit::{
    locks::key,
    permits::{self, dropped_guard_blocks_one_place, limit_is_kept, writer_is_not_passed},
    wait::{ms, soon, until},
};

use crate::support::{Environment, environment};

async fn processes(environment: &Environment, count: usize) -> Vec<LockManager> {
    let mut locks = Vec::new();
    for n in 0..count {
        locks.push(environment.instance(&format!("p{n}")).await);
    }
    locks
}

/// The number of rows that hold or wait.
async fn rows(environment: &Environment) -> i64 {
    let client = environment.client().await;
    let count = format!("SELECT count(*) FROM {}.waiters", environment.schema);
    let counted = client.query_one(&count, &[]).await.expect("a table");
    counted.get(0)
}

/// Guarantee: G22, G23.
#[tokio::test]
async fn permits_and_readers_on_postgres_follow_the_rules() {
    let Some(environment) = environment().await else { return };
    let locks = processes(&environment, 3).await;
    limit_is_kept(&locks, LockKey::from(("permits",))).await;
    writer_is_not_passed(&locks, LockKey::from(("readers",))).await;
    dropped_guard_blocks_one_place(&locks, LockKey::from(("dropped",))).await;
    assert_eq!(rows(&environment).await, 0, "nothing is left");
}

/// Guarantee: G22, G23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_permits_and_one_of_readers_on_postgres() {
    let Some(environment) = environment().await else { return };
    let locks = processes(&environment, 4).await;
    for limit in [6, 1_024] {
        let report = permits::storm(&locks, &key(), limit, ms(500)).await;
        assert!(report.sections > 10 && report.most > 2, "{report:?}");
        until("nothing is left", async || rows(&environment).await == 0).await;
    }
}

/// Guarantee: G22.
#[tokio::test]
async fn one_of_several_holders_in_postgres_is_revoked() {
    let Some(environment) = environment().await else { return };
    let locks = processes(&environment, 2).await;
    let kept = locks[0].permit(key(), 2).await.expect("free");
    let revoked = locks[1].permit(key(), 2).await.expect("free");
    let status = locks[0].inspect(key()).await.expect("a reply");
    assert_eq!((status.holding, status.holders.len()), (2, 2));
    let holder = status.holders.iter().find(|holder| holder.id.instance() == "p1").expect("one of them");
    assert!(holder.since.is_some(), "{status}");
    let reply = locks[0].revoke(key(), &holder.id).await.expect("a reply");
    assert_eq!(reply, ForceReleaseReply::Revoked { holders: vec![holder.id.clone()] });
    soon("the loss", revoked.held_permit().lost()).await;
    assert!(!kept.held_permit().remaining().is_zero());
    let refused = locks[1].permit(key(), 2).wait(Duration::ZERO).await;
    assert!(matches!(refused, Err(LockError::Busy { .. })), "its place is blocked");
    assert_eq!(kept.release().await.expect("a reply"), ReleaseOutcome::Released);
}
