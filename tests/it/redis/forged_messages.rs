//! Forged messages of a client that can publish, and nothing else.

use std::time::Duration;

use tower_lock::LockError;
use tower_lock_testkit::{
    Connection, Reply,
    locks::key,
    wait::{soon, until},
};

use crate::support::{Environment, NAME, environment, served};

/// The channel of the instance with this name, as the server lists it.
async fn channel(environment: &Environment, instance: &str) -> String {
    let mut found = None;
    until("it listens", async || {
        let channels = environment.command(&["PUBSUB", "CHANNELS", "*"]).await;
        let mut names = channels.texts().into_iter().map(ToOwned::to_owned);
        found = names.find(|name| name.contains(&format!(":{instance}:")));
        found.is_some()
    })
    .await;
    found.expect("just found")
}

/// A user with the right to publish to the channels of all processes.
async fn forger(environment: &Environment) -> Connection {
    let rules = ["reset", "on", ">secret", "-@all", "+publish", "resetkeys", "resetchannels", "&tower-lock:lock:in:*"];
    let parts: Vec<_> = ["ACL", "SETUSER", "forger"].into_iter().chain(rules).collect();
    assert_eq!(environment.command(&parts).await, Reply::Status("OK".to_owned()));
    let mut connection = environment.redis.connect().await;
    let login = connection.command(&["AUTH", "forger", "secret"]).await.expect("a reply");
    assert_eq!(login, Reply::Status("OK".to_owned()));
    assert!(matches!(connection.command(&["HGETALL", NAME]).await, Ok(Reply::Error(_))), "it has no other permission");
    connection
}

/// Guarantee: G1.
#[tokio::test]
async fn publisher_alone_can_neither_free_nor_end_a_section() {
    let Some(environment) = environment().await else { return };
    let (a, b, c) = (
        environment.direct_instance("a").await,
        environment.instance_without_renewals("b").await,
        environment.direct_instance("c").await,
    );
    let guard = b.lock(key()).await.expect("free");
    let other = b.lock(("other",)).await.expect("free");
    let owner = environment.command(&["HKEYS", NAME]).await.texts()[0].to_owned();
    // Both processes have issued this number.
    a.lock(("another",)).await.expect("free").release().await.expect("up");
    let (inbox_a, channel_b) = (channel(&environment, "a").await, channel(&environment, "b").await);
    let mut forger = forger(&environment).await;
    let waits = environment.waiter(&c).await;

    let before = environment.scripts().await;
    for _ in 0..200 {
        let offered = forger.command(&["PUBLISH", &inbox_a, &format!("1 offered 1 {owner} {NAME}")]).await;
        assert_eq!(offered.expect("a reply").integer(), Some(1), "one subscriber");
        let revoked = forger.command(&["PUBLISH", &channel_b, &format!("1 revoked 0 {owner} {NAME}")]).await;
        assert_eq!(revoked.expect("a reply").integer(), Some(1), "one subscriber");
    }
    // A force release is effective, because the store confirms it. Its message is the last one.
    a.force_release(("other",)).await.expect("up");
    soon("lost", other.held_lock().lost()).await;
    assert!(guard.held_lock().ensure_remaining(Duration::ZERO).is_ok(), "it is verified and ends nothing");
    assert_eq!(environment.command(&["HKEYS", NAME]).await.texts(), [owner.as_str()]);
    assert!(!waits.is_finished() && matches!(a.try_lock(key()).await, Err(LockError::Busy { .. })));
    // About ten checks a second, and the polls of the waiter.
    let scripts = environment.scripts().await - before;
    assert!((1..200).contains(&scripts), "{scripts} scripts for 400 messages");

    a.force_release(key()).await.expect("up");
    soon("lost", guard.held_lock().lost()).await;
    served(waits).await;
    drop(guard);
    environment.wait_until_clean().await;
}

/// Unknown messages count as gaps. Each costs little for any number of held keys, and waiters poll
/// ten times a second.
/// Guarantee: G15.
#[tokio::test]
async fn flood_of_unknown_messages_costs_ten_checks_per_second() {
    let Some(environment) = environment().await else { return };
    let (a, b) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let guard = b.lock(key()).await.expect("free");
    let waits = environment.waiter(&a).await;
    let (channel, mut forger) = (channel(&environment, "a").await, forger(&environment).await);
    let before = environment.scripts().await;
    for _ in 0..1_000 {
        forger.command(&["PUBLISH", &channel, "?"]).await.expect("a reply");
    }
    let scripts = environment.scripts().await - before;
    assert!(scripts < 500, "{scripts} scripts for 1000 messages");
    guard.release().await.expect("held");
    served(waits).await;
}
