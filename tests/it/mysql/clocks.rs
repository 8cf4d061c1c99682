//! The clock of the server is set, forward and back.

use tower_lock_testkit::{caller::LONG, clocks};

use crate::support::{Environment, environment};

const CLOCK: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// The procedures read a table in place of the clock of the server.
async fn with_clock() -> Option<Environment> {
    let environment = environment().await?;
    environment.admin("CREATE TABLE {p}_step (us BIGINT)").await;
    environment.admin("INSERT INTO {p}_step VALUES (0)").await;
    let migration = environment.builder().migration().expect("a prefix");
    assert!(migration.contains(CLOCK));
    let stepped = format!("({CLOCK} + (SELECT us FROM {}_step))", environment.prefix);
    let mut session = environment.session().await;
    let statements = migration.replace(CLOCK, &stepped);
    for statement in statements.trim_start_matches("DELIMITER ;;").split(";;\n") {
        if !statement.trim().is_empty() && !statement.starts_with("DELIMITER") {
            environment.run(&mut session, statement).await;
        }
    }
    Some(environment)
}

async fn set_clock(environment: &Environment, hours: i64) {
    environment.admin(&format!("UPDATE {{p}}_step SET us = {hours} * 3600000000")).await;
}

/// Guarantee: G11.
#[tokio::test]
async fn fences_of_mysql_rise_over_clock_steps() {
    let Some(environment) = with_clock().await else { return };
    let instances = environment.instances(LONG).await;
    clocks::fences_rise_over_steps(&instances, async |hours| set_clock(&environment, hours).await).await;
    let ahead = format!("SELECT COUNT(*) FROM {{p}}_locks WHERE fence > {CLOCK} + 23 * 3600000000");
    assert_eq!(environment.value::<u64>(&ahead, 0).await, 1, "the procedures have read this clock");
}

#[tokio::test]
async fn key_in_mysql_stays_free_when_the_clock_is_set_back() {
    let Some(environment) = with_clock().await else { return };
    clocks::free_key_stays_free(&environment.store().await, async |hours| set_clock(&environment, hours).await).await;
}
