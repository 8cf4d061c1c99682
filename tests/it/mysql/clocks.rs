//! The clock of the server is set, forward and back.

use std::time::Duration;

use tower_lock::{
    LockKey,
    store::{AcquireReply, IfBusy, ReleaseReply, RenewReply},
};
use tower_lock_testkit::{
    caller::{Caller, LONG},
    locks::key,
};

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
    let mut last = 0;
    for hours in [0, 24, -24, -720, 1, -1, 0] {
        set_clock(&environment, hours).await;
        for locks in &instances {
            let guard = locks.lock(key()).wait(LONG).await.expect("a grant");
            let token = guard.fencing_token().as_u64();
            assert!(token > last, "{token} after {last}, with the clock set by {hours} h");
            last = token;
            guard.release().await.expect("held");
        }
    }
    let ahead = format!("SELECT COUNT(*) FROM {{p}}_locks WHERE fence > {CLOCK} + 23 * 3600000000");
    assert_eq!(environment.value::<u64>(&ahead, 0).await, 1, "the procedures have read this clock");
}

/// A key without a holder is free, although its row was written at a later time of that clock.
#[tokio::test]
async fn key_in_mysql_stays_free_when_the_clock_is_set_back() {
    let Some(environment) = with_clock().await else { return };
    let caller = Caller::new(&environment.store().await, "a");
    let (free, held) = (LockKey::from(("free",)), LockKey::from(("held",)));
    let (first, holder) = (caller.id(), caller.id());
    caller.granted(&free, &first, LONG).await;
    caller.granted(&held, &holder, LONG).await;
    assert_eq!(caller.release(&free, &first, Duration::ZERO).await, ReleaseReply::Freed);
    set_clock(&environment, -24).await;
    caller.granted(&free, &caller.id(), LONG).await;
    let busy = caller.acquire(&held, &caller.id(), LONG, IfBusy::Fail).await.expect("a reply");
    assert!(matches!(busy, AcquireReply::Busy { .. }), "{busy:?}");
    assert_eq!(caller.renew(&held, &holder).await, RenewReply::Extended);
    assert_eq!(caller.release(&held, &holder, Duration::ZERO).await, ReleaseReply::Freed);
    caller.granted(&held, &caller.id(), LONG).await;
}
