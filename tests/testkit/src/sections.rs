//! Sections under one key, beside faults.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{task::JoinHandle, time::sleep};
use tower_lock::{LockError, LockManager};

use crate::{
    caller::LONG,
    limits,
    locks::key,
    wait::{ms, soon, until},
};

/// Sections under one key. One that overlaps with another, or has a smaller token, fails its task.
#[derive(Debug, Default)]
pub struct Sections {
    inside: AtomicBool,
    last_token: AtomicU64,
    done: AtomicU32,
    is_over: AtomicBool,
}

impl Sections {
    /// Tasks that lock the key until the end. An outage rejects a call, and it is made again.
    pub fn run(self: &Arc<Self>, instances: &[LockManager]) -> Vec<JoinHandle<()>> {
        let task = |locks: &LockManager| {
            let (locks, sections) = (locks.clone(), Arc::clone(self));
            tokio::spawn(async move {
                while !sections.is_over.load(SeqCst) {
                    match locks.lock(key()).wait(limits::BROKEN).await {
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

    /// An open transaction of the application keeps the key `pinned` until `commit`. It delays the
    /// waiters of that key, and no other key: as long as it lasts, and not only for one call.
    pub async fn pass_open_transaction(self: &Arc<Self>, instances: &[LockManager], commit: impl AsyncFnOnce()) {
        let tasks = self.run(instances);
        // Waiters of the key share the calls of the others.
        let waiter = |locks: &LockManager| {
            let locks = locks.clone();
            tokio::spawn(
                async move { locks.lock(("pinned",)).wait(limits::BROKEN).await.expect("a grant").release().await },
            )
        };
        let waiters: Vec<_> = instances.iter().map(waiter).collect();
        for _ in 0..5 {
            let others = instances[0].lock_all((0..20).map(|number| ("other", number)));
            soon("no delay", others.into_future()).await.expect("free").release().await.expect("held");
            self.go_on("sections beside the transaction").await;
        }
        assert!(waiters.iter().all(|waiter| !waiter.is_finished()), "the transaction keeps its key");
        commit().await;
        for waiter in soon("grants", join_all(waiters)).await {
            waiter.expect("no panic").expect("held");
        }
        self.end(tasks).await;
    }

    /// The server crashes twice, beside a holder, a waiter and these sections of two instances.
    /// `new` makes such instances with a lease.
    pub async fn outlast_crashes(
        self: &Arc<Self>,
        new: impl AsyncFn(Duration) -> [LockManager; 2],
        crash: impl AsyncFn(),
    ) {
        let [a, b] = new(LONG).await;
        let held = a.lock(("held",)).await.expect("free");
        let waiter = tokio::spawn(async move { b.lock(("held",)).wait(LONG).await });
        // Short, because a release that a crash loses blocks the key for it.
        let tasks = self.run(&new(Duration::from_secs(6)).await);
        for _ in 0..2 {
            self.go_on("sections before a crash").await;
            crash().await;
        }
        self.go_on("sections after the crashes").await;
        assert!(!waiter.is_finished(), "the key is held");
        let token = held.fencing_token();
        held.release().await.expect("it is still held");
        let next = soon("a grant", waiter).await.expect("no panic").expect("a grant");
        assert!(next.fencing_token() > token);
        next.release().await.expect("held");
        self.end(tasks).await;
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
    pub async fn go_on(&self, what: &str) {
        let before = self.done.load(SeqCst);
        until(what, async || self.done.load(SeqCst) >= before + 5).await;
    }

    /// Ends the tasks, none of which has failed.
    pub async fn end(&self, tasks: Vec<JoinHandle<()>>) {
        self.is_over.store(true, SeqCst);
        for ended in soon("the end of all tasks", join_all(tasks)).await {
            ended.expect("no overlap");
        }
    }
}
