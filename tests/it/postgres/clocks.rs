//! The clock of the server is set, forward and back.

use std::time::Duration;

use tower_lock::{
    LockKey,
    store::{AcquireReply, IfBusy, ReleaseReply, RenewReply},
};
use tower_lock_testkit::locks::key;

use crate::support::{Caller, Environment, LONG, PATIENT, environment};

/// The functions of the store read this clock in place of that of the server.
const CLOCK: &str = "CREATE SCHEMA {schema}_clock;
    CREATE TABLE {schema}_clock.step AS SELECT interval '0' AS size;
    CREATE FUNCTION {schema}_clock.clock() RETURNS timestamptz LANGUAGE sql VOLATILE
        AS 'SELECT clock_timestamp() + size FROM {schema}_clock.step'";

async fn with_clock() -> Option<Environment> {
    let environment = environment().await?;
    environment.execute(CLOCK).await;
    let clock = environment.named("{schema}_clock.clock()");
    environment.migrate(&[PATIENT, ("clock_timestamp()", &clock)]).await;
    Some(environment)
}

impl Environment {
    async fn set_clock(&self, step: &str) {
        self.execute(&format!("UPDATE {{schema}}_clock.step SET size = '{step}'")).await;
    }
}

/// Guarantee: G11.
#[tokio::test]
async fn fences_of_postgres_rise_over_clock_steps() {
    let Some(environment) = with_clock().await else { return };
    let instances = environment.two_instances().await;
    let mut last = 0;
    for step in ["0", "1 day", "-1 day", "-30 days", "1 hour", "-1 hour", "0"] {
        environment.set_clock(step).await;
        for locks in &instances {
            let guard = locks.lock(key()).wait(LONG).await.expect("a grant");
            let token = guard.fencing_token().as_u64();
            assert!(token > last, "{token} after {last}, with the clock set by {step}");
            last = token;
            guard.release().await.expect("held");
        }
    }
    let ahead = "SELECT count(*) FROM {schema}.locks WHERE fence > 1000000 * extract(epoch FROM now() + '23 hours')";
    assert_eq!(environment.value(ahead).await, 1, "the functions have read this clock");
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
