//! Permits of several processes in MySQL, which has no queue.

use std::time::Duration;

use tower_lock::{
    LockError, LockManager,
    store::{AcquireReply, AcquisitionIds, ForceReleaseReply, ForceReleaseRequest, IfBusy, LockStore, StoreErrorKind},
};
use tower_lock_testkit::{
    caller::{LONG, request, terms},
    locks::key,
    permits::{self, newest_wins_is_refused, one_of_several_holders_is_revoked},
    store::StoreExt,
    wait::{ms, until},
};

use crate::support::{Environment, environment};

async fn processes(environment: &Environment, count: usize) -> Vec<LockManager> {
    let mut locks = Vec::new();
    for n in 0..count {
        // Without messages, a holder learns by its next renewal that it was revoked.
        let builder = LockManager::builder(environment.store().await).instance(format!("p{n}"));
        locks.push(builder.lease(Duration::from_secs(3)).build());
    }
    locks
}

/// Guarantee: G22.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_permits_on_mysql() {
    let Some(environment) = environment().await else { return };
    let locks = processes(&environment, 4).await;
    until("two at a time", async || permits::storm(&locks, &key(), 2, ms(500)).await.most > 1).await;
    let left =
        "SELECT COUNT(*) FROM {p}_shares WHERE until_us > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
    until("no permit is left", async || environment.value::<u64>(left, 0).await == 0).await;
}

/// Guarantee: G22.
#[tokio::test]
async fn one_of_several_holders_in_mysql_is_revoked() {
    let Some(environment) = environment().await else { return };
    one_of_several_holders_is_revoked(&processes(&environment, 2).await, key()).await;
}

/// A delayed copy of an acquire takes the permit of a holder again that was revoked.
#[tokio::test]
async fn permit_in_mysql_is_revoked_again() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let id = AcquisitionIds::new("a", 1).next_share(3);
    for _ in 0..2 {
        let copy = store.acquire_one(request(&key(), &id, LONG, IfBusy::Fail)).await;
        assert!(matches!(copy, Ok(AcquireReply::Granted { .. })), "{copy:?}");
        let reply = store
            .force_release(ForceReleaseRequest::new(key(), LONG, terms()).holder(Some(id.clone())))
            .await
            .expect("a reply");
        assert_eq!(reply, ForceReleaseReply::Revoked { holders: vec![id.clone()] });
    }
}

/// A stream of readers would keep a writer waiting for ever.
///
/// Guarantee: G23, G25.
#[tokio::test]
async fn mysql_refuses_readers_by_name() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    let Err(LockError::Store(error)) = locks.read(key()).wait(ms(10)).await.map(drop) else { panic!("no error") };
    assert_eq!(error.kind(), StoreErrorKind::Unsupported);
    let text = format!("{error:?}");
    assert!(text.contains("has no queue") && text.contains("`RedisStore`"), "{text}");
    newest_wins_is_refused(&locks);
}
