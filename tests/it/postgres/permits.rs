//! Permits and readers of several processes in PostgreSQL.

use tower_lock::LockManager;
use tower_lock_testkit::{
    locks::key,
    permits::{self, one_of_several_holders_is_revoked, rules_are_kept},
    wait::{ms, until},
};

use crate::support::{Environment, environment};

async fn processes(environment: &Environment, count: usize) -> Vec<LockManager> {
    let mut locks = Vec::new();
    for n in 0..count {
        locks.push(environment.instance(&format!("p{n}")).await);
    }
    locks
}

/// The number of rows that hold or wait. One that has ended may be left until the next call, or the
/// sweep of the next minute.
async fn rows(environment: &Environment) -> i64 {
    let client = environment.client().await;
    let count = format!("SELECT count(*) FROM {}.waiters WHERE until > clock_timestamp()", environment.schema);
    let counted = client.query_one(&count, &[]).await.expect("a table");
    counted.get(0)
}

/// Guarantee: G22, G23.
#[tokio::test]
async fn permits_and_readers_on_postgres_follow_the_rules() {
    let Some(environment) = environment().await else { return };
    let locks = processes(&environment, 3).await;
    rules_are_kept(&locks).await;
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
    one_of_several_holders_is_revoked(&locks, key()).await;
}
