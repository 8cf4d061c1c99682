//! The clock of the server is set, forward and back.

use std::time::Duration;

use tower_lock::{
    LockKey,
    store::{AcquireReply, IfBusy, ReleaseReply, RenewReply},
};
use tower_lock_testkit::locks::key;

use crate::support::{Caller, Environment, LONG, own_environment};

/// The functions of the store read this clock in place of that of the server.
const CLOCK: &str = "CREATE SCHEMA clock;
    CREATE TABLE clock.step AS SELECT interval '0' AS size;
    CREATE FUNCTION clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
        AS 'SELECT pg_catalog.clock_timestamp() + size FROM clock.step';
    ALTER DATABASE postgres SET search_path = clock, pg_catalog, public";

async fn with_clock() -> Option<Environment> {
    let environment = own_environment(&[]).await?;
    environment.execute(CLOCK).await;
    Some(environment)
}

impl Environment {
    async fn set_clock(&self, step: &str) {
        self.execute(&format!("UPDATE clock.step SET size = '{step}'")).await;
    }
}

/// Guarantee: G11.
#[tokio::test]
async fn fences_of_postgres_rise_over_clock_steps() {
    let Some(environment) = with_clock().await else { return };
    let instances = [environment.instance("a").await, environment.instance("b").await];
    let mut last = 0;
    for step in ["0", "1 day", "-1 day", "-30 days", "1 hour", "-1 hour", "0"] {
        environment.set_clock(step).await;
        for locks in &instances {
            let guard = locks.lock(key()).wait(Duration::from_secs(20)).await.expect("a grant");
            let token = guard.fencing_token().as_u64();
            assert!(token > last, "{token} after {last}, with the clock set by {step}");
            last = token;
            guard.release().await.expect("held");
        }
    }
    assert!(environment.value("SELECT fence FROM {schema}.locks").await > 0);
}

/// A key without a holder is free, although its row was written at a later time of that clock.
#[tokio::test]
async fn key_stays_free_when_the_clock_is_set_back() {
    let Some(environment) = with_clock().await else { return };
    let caller = Caller::new(&environment.store().await, "a");
    let (free, held) = (LockKey::from(("free",)), LockKey::from(("held",)));
    let (first, holder) = (caller.id(), caller.id());
    caller.granted(&free, &first, LONG).await;
    caller.granted(&held, &holder, LONG).await;
    assert_eq!(caller.release(&free, &first, Duration::ZERO).await, ReleaseReply::Freed);
    environment.set_clock("-1 day").await;
    caller.granted(&free, &caller.id(), LONG).await;
    let busy = caller.acquire(&held, &caller.id(), LONG, IfBusy::Fail).await.expect("a reply");
    assert!(matches!(busy, AcquireReply::Busy { .. }), "{busy:?}");
    assert_eq!(caller.renew(&held, &holder).await, RenewReply::Extended);
    assert_eq!(caller.release(&held, &holder, Duration::ZERO).await, ReleaseReply::Freed);
    caller.granted(&held, &caller.id(), LONG).await;
}
