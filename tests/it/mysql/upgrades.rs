//! Procedures of an older release are replaced while instances work.

use std::sync::Arc;

use tower_lock::store::MysqlConnectError;
use tower_lock_testkit::{caller::LONG, sections::Sections};

use crate::support::environment;

/// Guarantee: G1.
#[tokio::test]
async fn newer_procedures_replace_older_ones_beside_instances() {
    let Some(environment) = environment().await else { return };
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&environment.instances(LONG).await);
    for _ in 0..3 {
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
