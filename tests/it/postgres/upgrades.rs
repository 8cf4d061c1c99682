//! Functions of an older and of a newer release.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tower_lock::{
    LockKey, PostgresStore,
    store::{AcquireReply, IfBusy, PostgresConnectError, Record, ReleaseReply},
};
use tower_lock_testkit::wait::soon;

use crate::support::{Caller, Environment, LONG, PATIENT, Sections, environment};

impl Environment {
    /// Gives the functions another number. They differ from those of this release: see [`PATIENT`].
    async fn set_functions(&self, difference: i64) {
        let number = self.functions().await + difference;
        let comment = format!("COMMENT ON FUNCTION {{schema}}.check_fence IS 'tower-lock functions {number}'");
        self.execute(&comment).await;
    }

    /// The number of the functions.
    async fn functions(&self) -> i64 {
        let number = "substring(obj_description('{schema}.check_fence'::regproc, 'pg_proc') FROM '[0-9]+$')";
        self.value(&format!("SELECT {number}::int8")).await
    }

    /// Whether the functions of this release have replaced those of the test.
    async fn are_replaced(&self) -> bool {
        let setting = PATIENT.1.replace([' ', '\''], "");
        let query = "SELECT count(*) FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace";
        self.value(&format!("{query} AND '{setting}' = ANY (proconfig)")).await == 0
    }

    async fn join(&self, migrate: bool) -> Result<PostgresStore, PostgresConnectError> {
        self.builder().migrate(migrate).connect(&self.url()).await
    }
}

/// The transaction of an application that has left an answer is open all the time.
///
/// Guarantee: G1, G6.
#[tokio::test]
async fn functions_are_replaced_while_instances_work() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let sections = Arc::<Sections>::default();
    let instances = environment.two_instances().await;
    let current = environment.functions().await;
    environment.set_functions(-1).await;
    let tasks = sections.run(&instances);
    let is_over = Arc::<AtomicBool>::default();
    let calls = (0..4).map(|n| {
        let (caller, key, is_over) = (Caller::new(&store, "a"), LockKey::from(("own", n)), Arc::clone(&is_over));
        // A lock repeats a call that has failed. These calls are not repeated.
        tokio::spawn(async move {
            while !is_over.load(SeqCst) {
                let id = caller.id();
                caller.granted(&key, &id, LONG).await;
                assert_eq!(caller.release(&key, &id, Duration::ZERO).await, ReleaseReply::Freed);
            }
        })
    });
    let calls: Vec<_> = calls.collect();
    let (caller, [held, pinned]) = (Caller::new(&store, "b"), ["held", "pinned"].map(|name| LockKey::from((name,))));
    let holder = caller.id();
    caller.granted(&held, &holder, LONG).await;
    let fence = caller.granted(&pinned, &caller.id(), LONG).await;
    let writer = environment.writer(&pinned, fence).await;
    let record = Record::new("paid", None);
    assert_eq!(environment.leave_answer(&writer, &pinned, fence, &record).await, Ok(()));
    sections.go_on("sections before the upgrade").await;

    for joined in join_all((0..3).map(|_| environment.join(true))).await {
        joined.expect("it replaces the functions");
    }
    assert_eq!((environment.functions().await, environment.are_replaced().await), (current, true));
    sections.go_on("sections after the upgrade").await;
    let second = caller.acquire(&held, &caller.id(), LONG, IfBusy::Fail).await;
    assert!(matches!(second, Ok(AcquireReply::Busy { .. })), "{second:?}");
    assert_eq!(caller.release(&held, &holder, Duration::ZERO).await, ReleaseReply::Freed);
    assert_eq!(environment.check_fence(&writer, &pinned, fence).await, Ok(()), "in the same transaction");
    environment.run(&writer, "COMMIT").await;
    is_over.store(true, SeqCst);
    for ended in soon("the end of the calls", join_all(calls)).await {
        ended.expect("no call has failed");
    }
    sections.end(tasks).await;
}

#[tokio::test]
async fn older_functions_without_migrate_name_the_migration() {
    let Some(environment) = environment().await else { return };
    environment.store().await;
    let current = environment.functions().await;
    environment.set_functions(-1).await;
    let error = environment.join(false).await.expect_err("older functions");
    let text = format!("{error:?}");
    assert!(text.contains("`.migrate(true)`") && text.contains("`PostgresStoreBuilder::migration`"), "{text}");
    let found = |error| match error {
        PostgresConnectError::OlderFunctions { found, .. } => i64::from(found),
        other => panic!("{other:?}"),
    };
    assert_eq!(found(error), current - 1);
    // A user of the store that has not made them.
    let rights = "CREATE ROLE app_{user} LOGIN; GRANT USAGE ON SCHEMA {schema} TO app_{user};
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO app_{user};
        GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO app_{user}";
    environment.execute(rights).await;
    let url = environment.server().url_of(&environment.named("app_{user}"));
    let refused = environment.builder().migrate(true).connect(&url).await.expect_err("it is not their owner");
    assert_eq!(found(refused), current - 1);
    assert!(!environment.are_replaced().await);

    environment.execute(&environment.builder().migration().expect("a name")).await;
    assert_eq!((environment.functions().await, environment.are_replaced().await), (current, true));
    environment.builder().connect(&url).await.expect("with the rights that it had");
}

/// An instance of an older release starts after the upgrade.
#[tokio::test]
async fn newer_functions_are_used_and_kept() {
    let Some(environment) = environment().await else { return };
    environment.store().await;
    let newer = environment.functions().await + 1;
    environment.set_functions(1).await;
    environment.join(true).await.expect("it keeps them");
    environment.execute(&environment.builder().migration().expect("a name")).await;
    assert_eq!((environment.functions().await, environment.are_replaced().await), (newer, false));
    let caller = Caller::new(&Arc::new(environment.join(false).await.expect("the same calls")), "a");
    caller.granted(&LockKey::from(("k",)), &caller.id(), LONG).await;
}

/// PostgreSQL refuses to replace a function that another session has changed meanwhile.
#[tokio::test]
async fn upgrade_during_a_change_of_rights_is_repeated() {
    let Some(environment) = environment().await else { return };
    environment.store().await;
    environment.set_functions(-1).await;
    let other = environment.client().await;
    environment.run(&other, "BEGIN; GRANT EXECUTE ON FUNCTION {schema}.check_fence TO {user}").await;
    let (joined, ()) = tokio::join!(environment.join(true), environment.commit_when_awaited(&other));
    joined.expect("it tries again");
    assert!(environment.are_replaced().await);
}
