//! Procedures of an older release are replaced while instances work.

use std::sync::Arc;

use tower_lock::{LockError, LockKey, lock::ReleaseOutcome, store::MysqlConnectError};
use tower_lock_testkit::{caller::LONG, sections::Sections};

use crate::support::environment;

/// Guarantee: G1.
#[tokio::test]
async fn newer_procedures_replace_older_ones_beside_instances() {
    let Some(environment) = environment().await else { return };
    let sections = Arc::<Sections>::default();
    let [a, b] = environment.instances(LONG).await;
    let tasks = sections.run(&[a.clone(), b.clone()]);
    for _ in 0..3 {
        let held = a.lock(("held",)).await.expect("free");
        let kept = a.lock(("kept",)).await.expect("free");
        let (token, id) = (kept.fencing_token().as_u64(), kept.held_lock().acquisition_id().to_string());
        let mut writer = environment.session().await;
        environment.run(&mut writer, "START TRANSACTION").await;
        environment.check(&mut writer, kept.held_lock().key(), token, &id).await.expect("it holds the key");
        kept.release().await.expect("held");
        sections.go_on("sections before an upgrade").await;
        environment.admin("ALTER PROCEDURE {p}_leave_answer COMMENT 'tower-lock procedures 0'").await;
        let older = environment.builder().migrate(false).connect(&environment.url()).await.expect_err("older");
        assert!(matches!(older, MysqlConnectError::Migration { found: 0, .. }), "{older:?}");
        // As the text of a newer release.
        let migration = environment.builder().migration().expect("a prefix");
        let mut session = environment.session().await;
        for statement in migration.trim_start_matches("DELIMITER ;;").split(";;\n") {
            if !statement.trim().is_empty() && !statement.starts_with("DELIMITER") {
                environment.run(&mut session, statement).await;
            }
        }
        environment.builder().migrate(false).connect(&environment.url()).await.expect("replaced");
        assert!(matches!(b.try_lock(("kept",)).await, Err(LockError::Busy { .. })), "the transaction keeps its key");
        environment.check(&mut writer, &LockKey::from(("kept",)), token, &id).await.expect("by the new procedure");
        environment.run(&mut writer, "COMMIT").await;
        assert_eq!(held.release().await.expect("a reply"), ReleaseOutcome::Released);
    }
    sections.go_on("sections after the upgrades").await;
    sections.end(tasks).await;
}

/// Services of a new release start together, in an empty database.
#[tokio::test]
async fn instances_make_the_tables_together() {
    let Some(environment) = environment().await else { return };
    let starts = (0..8).map(|_| async { environment.store().await });
    let stores = futures_util::future::join_all(starts).await;
    assert_eq!(stores.len(), 8);
}
