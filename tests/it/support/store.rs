//! A memory store with hands: it counts, fails, takes its time, or waits at a gate.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{sync::watch, time::sleep};
use tower_lock::{
    LockStore, MemoryStore, Released, StoreError, StoreErrorKind,
    store::{AcquireAsk, Acquired, ReleaseAsk, RenewAsk, Renewed, StoreFuture},
};

#[derive(Debug, Default)]
pub(crate) struct TestStore {
    memory: Mutex<Arc<MemoryStore>>,
    pub(crate) acquires: AtomicUsize,
    pub(crate) renewals: AtomicUsize,
    pub(crate) releases: AtomicUsize,
    pub(crate) acquire_gate: Gate,
    pub(crate) renew_gate: Gate,
    pub(crate) release_gate: Gate,
    pub(crate) release_takes_ms: AtomicU64,
    pub(crate) is_down: AtomicBool,
}

/// Open until it is shut. A verb does what it does, and then waits here with its answer.
#[derive(Debug)]
pub(crate) struct Gate {
    open: watch::Sender<bool>,
    waiting: AtomicUsize,
}

impl TestStore {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(crate) fn acquires(&self) -> usize {
        self.acquires.load(SeqCst)
    }

    pub(crate) fn held(&self) -> usize {
        self.memory().held()
    }

    /// As a store that kept nothing over it.
    pub(crate) fn restart(&self) {
        *self.memory.lock().expect("whole") = Arc::default();
    }

    fn memory(&self) -> Arc<MemoryStore> {
        Arc::clone(&self.memory.lock().expect("whole"))
    }

    fn fails(&self, operation: &'static str) -> Result<(), StoreError> {
        if self.is_down.load(SeqCst) {
            let why = std::io::Error::other("the test pulled the plug");
            return Err(StoreError::new("test", operation, StoreErrorKind::Unavailable).with_source(why));
        }
        Ok(())
    }
}

impl LockStore for TestStore {
    fn acquire<'a>(&'a self, ask: AcquireAsk<'a>) -> StoreFuture<'a, Acquired> {
        StoreFuture::new(async move {
            self.acquires.fetch_add(1, SeqCst);
            self.fails("acquire")?;
            let acquired = self.memory().acquire(ask).await;
            self.acquire_gate.pass().await;
            acquired
        })
    }

    fn renew<'a>(&'a self, asks: &'a [RenewAsk<'a>]) -> StoreFuture<'a, Vec<Renewed>> {
        StoreFuture::new(async move {
            self.renewals.fetch_add(1, SeqCst);
            self.fails("renew")?;
            self.renew_gate.pass().await;
            self.memory().renew(asks).await
        })
    }

    fn release<'a>(&'a self, ask: ReleaseAsk<'a>) -> StoreFuture<'a, Released> {
        StoreFuture::new(async move {
            self.releases.fetch_add(1, SeqCst);
            self.fails("release")?;
            self.release_gate.pass().await;
            let takes = self.release_takes_ms.load(SeqCst);
            if takes > 0 {
                sleep(Duration::from_millis(takes)).await;
            }
            self.memory().release(ask).await
        })
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self { open: watch::Sender::new(true), waiting: AtomicUsize::new(0) }
    }
}

impl Gate {
    pub(crate) fn shut(&self) {
        self.open.send_replace(false);
    }

    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }

    /// Until somebody stands before it.
    pub(crate) async fn somebody(&self) {
        for _ in 0..10_000 {
            if self.waiting.load(SeqCst) > 0 {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("nobody came to the gate");
    }

    async fn pass(&self) {
        struct Standing<'a>(&'a AtomicUsize);
        impl Drop for Standing<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, SeqCst);
            }
        }
        let mut open = self.open.subscribe();
        if *open.borrow_and_update() {
            return;
        }
        self.waiting.fetch_add(1, SeqCst);
        let _standing = Standing(&self.waiting);
        open.wait_for(|open| *open).await.expect("the gate is there");
    }
}
