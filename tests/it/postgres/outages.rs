//! Sessions are killed, the server crashes, has no connection left or rewrites its tables, while
//! instances lock keys.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tower_lock::{
    LockKey, LockManager,
    lock::OnceOutcome,
    store::{IfBusy, PostgresStoreBuilder, Record, ReleaseReply, StoreErrorKind},
};
use tower_lock_testkit::{
    limits,
    locks::key,
    runtimes::{end_runtimes_in_child_process, ends_of_runtimes_are_survived},
    wait::{soon, until},
};

use crate::support::{Caller, Environment, LONG, PATIENT, Sections, environment, own_environment};

impl Environment {
    async fn instances_with(&self, lease: Duration) -> [LockManager; 2] {
        let instance = async |name| LockManager::builder(self.store().await).instance(name).lease(lease).build();
        [instance("a").await, instance("b").await]
    }
}

/// Guarantee: G1, G6.
#[tokio::test]
async fn requests_go_on_while_sessions_of_postgres_are_killed() {
    let Some(environment) = environment().await else { return };
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&environment.two_instances().await);
    for _ in 0..5 {
        sections.go_on("sections between two kills").await;
        environment.kill_sessions("true").await;
    }
    sections.go_on("sections after the kills").await;
    sections.end(tasks).await;
}

/// Guarantee: G1, G6, G11.
#[tokio::test]
async fn crashes_of_postgres_end_no_lock_and_no_wait() {
    let Some(environment) = own_environment(&[]).await else { return };
    let new = async |lease| environment.instances_with(lease).await;
    Arc::<Sections>::default().outlast_crashes(new, async || environment.crash().await).await;
}

/// Work that is done leaves a record. A release that got no reply is repeated after the crash.
///
/// Guarantee: G18.
#[tokio::test]
async fn work_runs_once_although_postgres_crashes() {
    let Some(environment) = own_environment(&[]).await else { return };
    // A retry repeats work whose lease has expired.
    let instances = environment.instances_with(LONG).await;
    const PAYMENTS: usize = 60;
    let runs: Vec<_> = (0..PAYMENTS).map(|_| AtomicU32::new(0)).collect();
    let done = AtomicU32::new(0);
    // Each instance pays all of them.
    let pay = async |locks: &LockManager| {
        for (number, count) in runs.iter().enumerate() {
            let is_paid = async || {
                let work = async |_| count.fetch_add(1, SeqCst);
                let paid = locks.once(("payment", number)).wait(LONG).run(work).await;
                matches!(paid, Ok(OnceOutcome::Ran(_) | OnceOutcome::Already))
            };
            until("a payment that is done", is_paid).await;
            done.fetch_add(1, SeqCst);
        }
    };
    let crashes = async {
        for crash in 1..=2 {
            until("more payments", async || done.load(SeqCst) >= crash * 40).await;
            environment.crash().await;
        }
    };
    tokio::join!(join_all(instances.iter().map(pay)), crashes);
    let again: Vec<_> =
        runs.iter().map(|count| count.load(SeqCst)).enumerate().filter(|(_, runs)| *runs != 1).collect();
    assert_eq!(again, [], "payments that did not run once, with their runs");
}

/// Guarantee: G6.
#[tokio::test]
async fn running_store_goes_on_without_free_connections() {
    let Some(environment) = environment().await else { return };
    // The server limits the superuser only together with all others.
    environment.execute("CREATE ROLE app_{user} LOGIN; GRANT CREATE ON DATABASE postgres TO app_{user}").await;
    let url = environment.server().url_of(&environment.named("app_{user}"));
    let connect = async |builder: PostgresStoreBuilder| builder.migrate(true).connect(&url).await;
    let caller = Caller::new(&Arc::new(connect(environment.builder()).await.expect("it is up")), "a");
    let (key, id) = (key(), caller.id());
    let acquire = async || caller.acquire(&key, &id, LONG, IfBusy::Fail).await;
    assert!(acquire().await.is_ok());
    environment.execute("ALTER ROLE app_{user} CONNECTION LIMIT 1").await;
    assert!(acquire().await.is_ok(), "it has its connections");
    // It would open more.
    let keys: Vec<_> = (0..256).map(|n| (LockKey::from(("load", n)), caller.id())).collect();
    join_all(keys.iter().map(|(key, id)| caller.granted(key, id, LONG))).await;
    let is_refused = async || {
        let error = connect(environment.builder().connect_timeout(limits::SHORT)).await;
        format!("{:?}", error.map(drop).expect_err("no connection is left")).contains("raise `max_connections`")
    };
    until("an error with its cause", is_refused).await;
    // The store loses its own ones, and the application has taken them.
    let taken = "ALTER ROLE app_{user} CONNECTION LIMIT 0;
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app_{user}'";
    environment.execute(taken).await;
    // The first reply may be that its connection was terminated.
    let is_refused = async || {
        acquire().await.is_err_and(|error| {
            let is_refused = format!("{error:?}").contains("raise `max_connections`");
            is_refused && error.kind() == StoreErrorKind::Unavailable
        })
    };
    until("a call without a connection", is_refused).await;
    environment.execute("ALTER ROLE app_{user} CONNECTION LIMIT -1").await;
    until("a connection", async || acquire().await.is_ok()).await;
    assert_eq!(caller.release(&key, &id, Duration::ZERO).await, ReleaseReply::Freed, "it was held all the time");
}

/// Guarantee: G1, G6.
#[tokio::test]
async fn sections_go_on_while_tables_are_rewritten() {
    let Some(environment) = environment().await else { return };
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&environment.two_instances().await);
    for _ in 0..4 {
        for table in ["locks", "waiters", "records", "floor"] {
            environment.execute(&format!("VACUUM FULL {{schema}}.{table}")).await;
        }
        sections.go_on("sections between rewrites").await;
    }
    sections.end(tasks).await;
}

/// A large table takes longer than a call may wait.
///
/// Guarantee: G6.
#[tokio::test]
async fn calls_end_while_a_table_is_locked() {
    let Some(environment) = environment().await else { return };
    environment.migrate(&[]).await;
    let caller = Caller::new(&environment.store().await, "a");
    let (free, held) = (LockKey::from(("free",)), LockKey::from(("held",)));
    let (first, holder) = (caller.id(), caller.id());
    caller.granted(&held, &holder, LONG).await;
    let rewrite = environment.client().await;
    // The lock of VACUUM FULL, CLUSTER and most of ALTER TABLE.
    environment.run(&rewrite, "BEGIN; LOCK TABLE {schema}.locks IN ACCESS EXCLUSIVE MODE").await;
    let refused = soon("an error", caller.acquire(&free, &first, LONG, IfBusy::Enqueue)).await;
    assert_eq!(refused.map_err(|error| error.kind()), Err(StoreErrorKind::Timeout));
    let refused = soon("an error", caller.try_release_with(&held, &holder, Record::new("paid", None))).await;
    assert_eq!(refused.map_err(|error| error.kind()), Err(StoreErrorKind::Timeout));
    environment.run(&rewrite, "COMMIT").await;
    caller.granted(&free, &first, LONG).await;
    assert_eq!(caller.release(&held, &holder, Duration::ZERO).await, ReleaseReply::Freed, "it is still held");
}

/// As long as the transaction lasts, and not only for one call.
///
/// Guarantee: G6.
#[tokio::test]
async fn open_transaction_of_a_key_delays_no_other_key() {
    let Some(environment) = environment().await else { return };
    environment.migrate(&[]).await;
    let instances = environment.two_instances().await;
    let caller = Caller::new(&environment.store().await, "c");
    let pinned = LockKey::from(("pinned",));
    let fence = caller.expired(&pinned).await;
    let writer = environment.writer(&pinned, fence).await;
    Arc::<Sections>::default()
        .pass_open_transaction(&instances, async || environment.run(&writer, "COMMIT").await)
        .await;
}

/// Guarantee: G2.
#[tokio::test]
async fn runtimes_end_while_calls_to_postgres_are_under_way() {
    end_runtimes_in_child_process(async |url| limits::postgres().connect(url).await.expect("it is up"));
    let Some(environment) = environment().await else { return };
    environment.migrate(&[PATIENT]).await;
    let url = format!("{}?schema={}", environment.url(), environment.schema);
    let test = "outages::runtimes_end_while_calls_to_postgres_are_under_way";
    ends_of_runtimes_are_survived(test, &url).await;
}
