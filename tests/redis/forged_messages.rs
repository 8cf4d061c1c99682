//! Messages that somebody forges who may publish, and nothing else.

use std::{future::IntoFuture, time::Duration};

use tokio::time::{sleep, timeout};
use tower_lock::LockError;
use tower_lock_faults::{Connection, Reply};

use crate::support::{NAME, World, key, ms, soon, until, world};

/// The channel of the instance with this name, as the server knows it.
async fn inbox(world: &World, instance: &str) -> String {
    let mut found = None;
    until("it listens", async || {
        let channels = world.ask(&["PUBSUB", "CHANNELS", "*"]).await;
        let mut names = channels.texts().into_iter().map(ToOwned::to_owned);
        found = names.find(|name| name.contains(&format!(":{instance}:")));
        found.is_some()
    })
    .await;
    found.expect("just found")
}

/// A user that may publish to the inboxes of all processes, and nothing else.
async fn forger(world: &World) -> Connection {
    let rules = ["reset", "on", ">secret", "-@all", "+publish", "resetkeys", "resetchannels", "&tower-lock:lock:in:*"];
    let parts: Vec<_> = ["ACL", "SETUSER", "forger"].into_iter().chain(rules).collect();
    assert_eq!(world.ask(&parts).await, Reply::Status("OK".to_owned()));
    let mut connection = world.redis.connect().await;
    let login = connection.command(&["AUTH", "forger", "secret"]).await.expect("an answer");
    assert_eq!(login, Reply::Status("OK".to_owned()));
    assert!(matches!(connection.command(&["HGETALL", NAME]).await, Ok(Reply::Error(_))), "it may nothing else");
    connection
}

#[tokio::test]
async fn publisher_alone_can_neither_free_nor_end_a_section() {
    let Some(world) = world().await else { return };
    let (a, b, c) = (world.sound_instance("a").await, world.sound_instance("b").await, world.sound_instance("c").await);
    let guard = b.lock(key()).await.expect("free");
    let owner = world.ask(&["HKEYS", NAME]).await.texts()[0].to_owned();
    // Both processes have given out this number.
    a.lock(("another",)).await.expect("free").release().await.expect("up");
    let (inbox_a, inbox_b) = (inbox(&world, "a").await, inbox(&world, "b").await);
    let mut forger = forger(&world).await;
    let waits = tokio::spawn(c.lock(key()).wait(Duration::from_secs(20)).into_future());
    until("it waits", async || c.inspect(key()).await.expect("up").waiting == 1).await;

    let before = world.scripts().await;
    for _ in 0..1_000 {
        let offered = forger.command(&["PUBLISH", &inbox_a, &format!("1 offered 1 {owner} {NAME}")]).await;
        assert_eq!(offered.expect("an answer").integer(), Some(1), "it is heard");
        let revoked = forger.command(&["PUBLISH", &inbox_b, &format!("1 taken 0 {owner} {NAME}")]).await;
        assert_eq!(revoked.expect("an answer").integer(), Some(1), "it is heard");
    }
    assert!(timeout(ms(500), guard.held_lock().lost()).await.is_err(), "it is asked about, and ends nothing");
    assert_eq!(world.ask(&["HKEYS", NAME]).await.texts(), [owner.as_str()]);
    assert!(!waits.is_finished() && matches!(a.try_lock(key()).await, Err(LockError::Busy { .. })));
    // Two thousand messages, some ten questions a second, and the check-ins of who waits.
    let asked = world.scripts().await - before;
    assert!((1..200).contains(&asked), "{asked} scripts");

    // An operator that takes the key away is believed, because the store says so.
    let lost = tokio::spawn({
        let view = guard.held_lock();
        async move { view.lost().await }
    });
    a.force_release(key()).await.expect("up");
    soon("lost", timeout(ms(5_000), lost)).await.expect("long before its next renewal").expect("no panic");
    soon("its turn", waits).await.expect("no panic").expect("its turn").release().await.expect("ours");
    drop(guard);
    world.is_clean_soon().await;
}

/// Messages that nobody understands are gaps. However many keys are held, each costs little, and those who wait ask ten times a second.
#[tokio::test]
async fn flood_of_unknown_messages_costs_ten_checks_per_second() {
    let Some(world) = world().await else { return };
    let (a, b) = (world.sound_instance("a").await, world.sound_instance("b").await);
    let guard = b.lock(key()).await.expect("free");
    let waits = tokio::spawn(a.lock(key()).wait(Duration::from_secs(60)).into_future());
    until("it waits", async || b.inspect(key()).await.expect("up").waiting == 1).await;
    let (inbox, mut forger) = (inbox(&world, "a").await, forger(&world).await);
    let before = world.scripts().await;
    for _ in 0..5_000 {
        forger.command(&["PUBLISH", &inbox, "?"]).await.expect("an answer");
    }
    sleep(ms(300)).await;
    let asked = world.scripts().await - before;
    assert!(asked < 1_000, "{asked} scripts for 5000 messages");
    guard.release().await.expect("ours");
    soon("its turn", waits).await.expect("no panic").expect("its turn").release().await.expect("ours");
}
