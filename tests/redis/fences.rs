//! Fencing tokens.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::future::join_all;

use tower_lock::{
    LockKey, LockStore, RedisStore, Released,
    store::{AcquireAsk, Acquired, IfHeld, Inbox, LineTerms, ReleaseAsk},
    test_util::decisions::OwnerIds,
};

use crate::support::{key, ms, until, world};

const KEYS: usize = 20;
const GRANTS: usize = 500;

/// Over 10 000 grants: Lua prints doubles with 14 digits if one lets it.
#[tokio::test]
async fn the_fence_in_the_message_in_the_store_and_in_the_answer_are_the_same_digit_for_digit() {
    let Some(world) = world().await else { return };
    let store = world.store().await;
    let messages = Arc::new(Mutex::new(BTreeSet::new()));
    let heard = Arc::clone(&messages);
    world.proxy.all().pushes(move |push| {
        let said = String::from_utf8(push.payload.clone()).expect("text");
        heard.lock().unwrap_or_else(PoisonError::into_inner).insert(said);
        vec![push.payload.clone()]
    });
    let ids = OwnerIds::new("p", 1);
    store.open(Inbox::new(ids.next().process(), |_| true));
    let grants = join_all((0..KEYS).map(async |n| {
        let (key, name) = (LockKey::from(("k", n)), format!("lock:k:{n}"));
        let ask =
            |owner| store.acquire(AcquireAsk::new(key.clone(), owner, ms(60_000), IfHeld::LineUp, TERMS, ms(5_000)));
        let mut holder = ids.next();
        assert!(matches!(ask(holder.clone()).await, Ok(Acquired::Granted { .. })));
        let mut look = world.redis.connect().await;
        let mut answers = Vec::new();
        for _ in 0..GRANTS {
            let next = ids.next();
            assert!(matches!(ask(next.clone()).await, Ok(Acquired::InLine { .. })));
            let release = ReleaseAsk::new(key.clone(), holder, Duration::ZERO, TERMS);
            assert_eq!(store.release(release).await.expect("an answer"), Released::HandedOn);
            let stands = look.command(&["HGET", &name, &next.to_string()]).await.expect("an answer");
            let Ok(Acquired::Granted { fence }) = ask(next.clone()).await else { panic!("it was offered") };
            assert_eq!(stands.text(), Some(fence.to_string().as_str()));
            answers.push(format!("1 offered {fence} {next} {name}"));
            holder = next;
        }
        assert!(answers.is_sorted(), "they rise");
        answers
    }))
    .await;
    let answers: BTreeSet<_> = grants.into_iter().flatten().collect();
    assert_eq!(answers.len(), KEYS * GRANTS);
    until("all have come", async || messages.lock().unwrap_or_else(PoisonError::into_inner).len() >= answers.len())
        .await;
    assert!(*messages.lock().unwrap_or_else(PoisonError::into_inner) == answers);
}

const TERMS: LineTerms = LineTerms::new(ms(60_000), ms(60_000), 8);

#[tokio::test]
async fn a_fence_rises_over_flushall_and_over_a_restart() {
    let Some(mut world) = world().await else { return };
    let locks = world.sound_instance("a").await;
    let mut last = None;
    for how in ["as it is", "flushed", "as it is", "restarted", "as it is"] {
        match how {
            "flushed" => drop(world.ask(&["FLUSHALL"]).await),
            "restarted" => world.redis.restart_empty().await,
            _ => {}
        }
        let guard = locks.lock(key()).await.unwrap_or_else(|error| panic!("{how}: {error}"));
        assert!(last < Some(guard.fencing_token()), "{how}: {:?} after {last:?}", guard.fencing_token());
        last = Some(guard.fencing_token());
        guard.release().await.expect("ours");
    }
    drop(RedisStore::connect(&world.redis.url()).await.expect("and another one"));
}
