//! Sections under one key, beside faults.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst},
};

use futures_util::future::join_all;
use tokio::{task::JoinHandle, time::sleep};
use tower_lock::{LockError, LockManager};

use crate::{
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
