//! The clock of the server is set, forward and back.

use tower_lock_testkit::clocks;

use crate::support::{Environment, PATIENT, environment};

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
    async fn set_clock(&self, hours: i64) {
        self.execute(&format!("UPDATE {{schema}}_clock.step SET size = '{hours} hours'")).await;
    }
}

/// Guarantee: G11.
#[tokio::test]
async fn fences_of_postgres_rise_over_clock_steps() {
    let Some(environment) = with_clock().await else { return };
    let instances = environment.two_instances().await;
    clocks::fences_rise_over_steps(&instances, async |hours| environment.set_clock(hours).await).await;
    let ahead = "SELECT count(*) FROM {schema}.locks WHERE fence > 1000000 * extract(epoch FROM now() + '23 hours')";
    assert_eq!(environment.value(ahead).await, 1, "the functions have read this clock");
}

#[tokio::test]
async fn key_stays_free_when_the_clock_is_set_back() {
    let Some(environment) = with_clock().await else { return };
    clocks::free_key_stays_free(&environment.store().await, async |hours| environment.set_clock(hours).await).await;
}
