//! Sessions are killed, the server crashes, has no connection left or rewrites its tables, while
//! instances lock keys.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_postgres::NoTls;
use tower_lock::{
    LockError, LockKey, LockManager, PostgresStore,
    lock::OnceOutcome,
    store::{IfBusy, Record, ReleaseReply, StoreErrorKind},
};
use tower_lock_testkit::{
    locks::key,
    wait::{ms, soon, until},
};

use crate::support::{Caller, Environment, LONG, own_environment};

/// Sections under one key. One that overlaps with another, or has a smaller token, fails its task.
#[derive(Default)]
struct Sections {
    inside: AtomicBool,
    last_token: AtomicU64,
    done: AtomicU32,
    is_over: AtomicBool,
}

impl Sections {
    /// Tasks that lock the key until the end. An outage rejects a call, and it is made again.
    fn run(self: &Arc<Self>, instances: &[LockManager]) -> Vec<JoinHandle<()>> {
        let task = |locks: &LockManager| {
            let (locks, sections) = (locks.clone(), Arc::clone(self));
            tokio::spawn(async move {
                while !sections.is_over.load(SeqCst) {
                    match locks.lock(key()).wait(Duration::from_secs(20)).await {
                        Ok(guard) => {
                            sections.one(guard.fencing_token().as_u64()).await;
                            drop(guard.release().await);
                        }
                        // No other error is documented for an outage.
                        Err(LockError::Store(_) | LockError::TimedOut { .. }) => sleep(ms(5)).await,
                        Err(error) => panic!("{error:?}"),
                    }
                }
            })
        };
        instances.iter().flat_map(|locks| [task(locks), task(locks), task(locks)]).collect()
    }

    async fn one(&self, token: u64) {
        assert!(!self.inside.swap(true, SeqCst), "two holders");
        let last = self.last_token.swap(token, SeqCst);
        assert!(token > last, "{token} after {last}");
        sleep(ms(1)).await;
        self.inside.store(false, SeqCst);
        self.done.fetch_add(1, SeqCst);
    }

    /// Waits for more sections.
    async fn go_on(&self, what: &str) {
        let before = self.done.load(SeqCst);
        until(what, async || self.done.load(SeqCst) >= before + 10).await;
    }

    /// Ends the tasks, none of which has failed.
    async fn end(&self, tasks: Vec<JoinHandle<()>>) {
        self.is_over.store(true, SeqCst);
        for ended in soon("the end of all tasks", join_all(tasks)).await {
            ended.expect("no overlap");
        }
    }
}

impl Environment {
    async fn two_instances(&self) -> [LockManager; 2] {
        // Short, because a release that a crash loses blocks the key for it.
        let lease = Duration::from_secs(3);
        let instance = async |name| LockManager::builder(self.store().await).instance(name).lease(lease).build();
        [instance("a").await, instance("b").await]
    }
}

/// Guarantee: G1, G6.
#[tokio::test]
async fn requests_go_on_while_sessions_of_postgres_are_killed() {
    let Some(environment) = own_environment(&[]).await else { return };
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&environment.two_instances().await);
    let client = environment.client().await;
    let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tower-lock'";
    for _ in 0..10 {
        sections.go_on("sections between two kills").await;
        client.batch_execute(kill).await.expect("the superuser may");
    }
    sections.go_on("sections after the kills").await;
    sections.end(tasks).await;
}

/// Guarantee: G1, G6, G11.
#[tokio::test]
async fn crashes_of_postgres_end_no_lock_and_no_wait() {
    let Some(environment) = own_environment(&[]).await else { return };
    let instances = environment.two_instances().await;
    let [a, b] = &instances;
    let held = a.lock(("held",)).await.expect("free");
    let waiter = tokio::spawn({
        let b = b.clone();
        async move { b.lock(("held",)).wait(LONG).await }
    });
    until("it waits", async || a.inspect(("held",)).await.is_ok_and(|status| status.waiting == 1)).await;
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&instances);
    for _ in 0..3 {
        sections.go_on("sections before a crash").await;
        environment.server().crash().await;
        environment.server().restart().await;
    }
    sections.go_on("sections after the crashes").await;
    assert!(!waiter.is_finished(), "the key is held");
    let token = held.fencing_token();
    held.release().await.expect("it is still held");
    let next = soon("a grant", waiter).await.expect("no panic").expect("a grant");
    assert!(next.fencing_token() > token);
    next.release().await.expect("held");
    sections.end(tasks).await;
}

/// Work that is done leaves a record. A release that got no reply is repeated after the crash.
///
/// Guarantee: G18.
#[tokio::test]
async fn work_runs_once_although_postgres_crashes() {
    let Some(environment) = own_environment(&[]).await else { return };
    let instances = environment.two_instances().await;
    const PAYMENTS: usize = 200;
    let runs: Vec<_> = (0..PAYMENTS).map(|_| AtomicU32::new(0)).collect();
    let done = AtomicU32::new(0);
    // Each instance pays all of them.
    let pay = async |locks: &LockManager| {
        for (number, count) in runs.iter().enumerate() {
            let is_paid = async || {
                let work = async |_| count.fetch_add(1, SeqCst);
                let paid = locks.once(("payment", number)).wait(Duration::from_secs(20)).run(work).await;
                matches!(paid, Ok(OnceOutcome::Ran(_) | OnceOutcome::Already))
            };
            until("a payment that is done", is_paid).await;
            done.fetch_add(1, SeqCst);
        }
    };
    let crashes = async {
        for crash in 1..=3 {
            until("more payments", async || done.load(SeqCst) >= crash * 100).await;
            environment.server().crash().await;
            environment.server().restart().await;
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
    let Some(environment) = own_environment(&["max_connections=12"]).await else { return };
    environment.execute("CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO app").await;
    let url = environment.server().url_of("app");
    let connect = async || PostgresStore::builder().migrate(true).connect_timeout(ms(300)).connect(&url).await;
    let caller = Caller::new(&Arc::new(connect().await.expect("it is up")), "a");
    let (key, id) = (key(), caller.id());
    let acquire = async || caller.acquire(&key, &id, LONG, IfBusy::Fail).await;
    assert!(acquire().await.is_ok());
    let mut others = Vec::new();
    while let Ok((client, connection)) = tokio_postgres::connect(&environment.server().url(), NoTls).await {
        others.push((client, tokio::spawn(connection)));
    }
    assert!(acquire().await.is_ok(), "it has its connections");
    // It would open more.
    let keys: Vec<_> = (0..256).map(|n| (LockKey::from(("load", n)), caller.id())).collect();
    join_all(keys.iter().map(|(key, id)| caller.granted(key, id, LONG))).await;
    let error = connect().await.map(|_| ()).expect_err("no connection is left");
    assert!(format!("{error:?}").contains("raise `max_connections`"), "{error:?}");
    // The store loses its own ones, and the application has taken them.
    let (client, _) = &others[0];
    let taken = "ALTER ROLE app CONNECTION LIMIT 0;
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'";
    client.batch_execute(taken).await.expect("the superuser may");
    // The first reply may be that its connection was terminated.
    let is_refused = async || {
        acquire().await.is_err_and(|error| {
            let is_refused = format!("{error:?}").contains("raise `max_connections`");
            is_refused && error.kind() == StoreErrorKind::Unavailable
        })
    };
    until("a call without a connection", is_refused).await;
    client.batch_execute("ALTER ROLE app CONNECTION LIMIT -1").await.expect("the superuser may");
    drop(others);
    until("a connection", async || acquire().await.is_ok()).await;
    assert_eq!(caller.release(&key, &id, Duration::ZERO).await, ReleaseReply::Freed, "it was held all the time");
}

/// Guarantee: G1, G6.
#[tokio::test]
async fn sections_go_on_while_tables_are_rewritten() {
    let Some(environment) = own_environment(&[]).await else { return };
    let instances = environment.two_instances().await;
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&instances);
    for _ in 0..20 {
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
    let Some(environment) = own_environment(&[]).await else { return };
    let caller = Caller::new(&environment.store().await, "a");
    let (free, held) = (LockKey::from(("free",)), LockKey::from(("held",)));
    let (first, holder) = (caller.id(), caller.id());
    caller.granted(&held, &holder, LONG).await;
    let rewrite = environment.client().await;
    // The lock of VACUUM FULL, CLUSTER and most of ALTER TABLE.
    let lock = format!("BEGIN; LOCK TABLE {}.locks IN ACCESS EXCLUSIVE MODE", environment.schema);
    rewrite.batch_execute(&lock).await.expect("the superuser may");
    for _ in 0..3 {
        let refused = soon("an error", caller.acquire(&free, &first, LONG, IfBusy::Enqueue)).await;
        assert_eq!(refused.map_err(|error| error.kind()), Err(StoreErrorKind::Timeout));
        let refused = soon("an error", caller.try_release_with(&held, &holder, Record::new("paid", None))).await;
        assert_eq!(refused.map_err(|error| error.kind()), Err(StoreErrorKind::Timeout));
    }
    rewrite.batch_execute("COMMIT").await.expect("it ends");
    caller.granted(&free, &first, LONG).await;
    assert_eq!(caller.release(&held, &holder, Duration::ZERO).await, ReleaseReply::Freed, "it is still held");
}

/// As long as the transaction lasts, and not only for one call.
///
/// Guarantee: G6.
#[tokio::test]
async fn open_transaction_of_a_key_delays_no_other_key() {
    let Some(environment) = own_environment(&[]).await else { return };
    let instances = environment.two_instances().await;
    let caller = Caller::new(&environment.store().await, "c");
    let pinned = LockKey::from(("pinned",));
    let fence = caller.granted(&pinned, &caller.id(), ms(100)).await;
    let writer = environment.application().await;
    writer.batch_execute("BEGIN").await.expect("a transaction");
    assert_eq!(environment.check_fence(&writer, &pinned, fence).await, Ok(()));
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&instances);
    // Waiters of the key share the calls of the others.
    let waiter = |locks: &LockManager| {
        let locks = locks.clone();
        tokio::spawn(async move { locks.lock(("pinned",)).wait(LONG).await.expect("a grant").release().await })
    };
    let waiters: Vec<_> = instances.iter().map(waiter).collect();
    for _ in 0..20 {
        let others = instances[0].lock_all((0..20).map(|number| ("other", number)));
        let others = timeout(Duration::from_secs(10), others.into_future()).await.expect("no delay").expect("free");
        others.release().await.expect("held");
        sections.go_on("sections beside the transaction").await;
    }
    assert!(waiters.iter().all(|waiter| !waiter.is_finished()), "the writer keeps its key");
    writer.batch_execute("COMMIT").await.expect("it ends");
    for waiter in soon("grants", join_all(waiters)).await {
        waiter.expect("no panic").expect("held");
    }
    sections.end(tasks).await;
}
