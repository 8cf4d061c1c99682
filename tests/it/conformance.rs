//! The contract of a store, asked of the stores that are here.

use std::time::Duration;

use tower_lock::{
    LockStore, MemoryStore, Released,
    store::{
        AcquireAsk, Acquired, ForceAsk, ForceReleaseReply, Inbox, Inspected, ReleaseAsk, RenewAsk, Renewed,
        StoreFuture, YieldAsk, Yielded,
    },
    test_util::{Fault, TestStore, Verb, conformance},
};

#[tokio::test(start_paused = true)]
async fn the_memory_store_keeps_the_contract() {
    conformance::check(MemoryStore::new()).await;
}

/// The same rules behind a network, and with every call done twice.
#[tokio::test(start_paused = true)]
async fn a_store_whose_calls_are_doubled_keeps_the_contract() {
    let store = TestStore::new();
    for verb in [Verb::Acquire, Verb::Renew] {
        store.on(verb).fault(Fault::Double);
    }
    store.events(Fault::Double);
    conformance::check(store).await;
}

/// A release that frees whatever stands there: the oldest mistake of all.
#[derive(Debug)]
struct FreesAnything(MemoryStore);

impl LockStore for FreesAnything {
    fn open(&self, inbox: Inbox) {
        self.0.open(inbox);
    }

    fn acquire(&self, ask: AcquireAsk) -> StoreFuture<Acquired> {
        self.0.acquire(ask)
    }

    fn renew(&self, asks: Vec<RenewAsk>) -> StoreFuture<Vec<Renewed>> {
        self.0.renew(asks)
    }

    fn release(&self, ask: ReleaseAsk) -> StoreFuture<Released> {
        let force = ForceAsk::new(ask.key.clone(), ask.keep_taken, ask.line);
        StoreFuture::ready(Ok(match futures_util::FutureExt::now_or_never(self.0.force_release(force)) {
            Some(Ok(ForceReleaseReply::Revoked { .. })) => Released::Freed,
            _ => Released::NotOwner,
        }))
    }

    fn yield_to_line(&self, ask: YieldAsk) -> StoreFuture<Yielded> {
        self.0.yield_to_line(ask)
    }

    fn inspect(&self, key: tower_lock::LockKey) -> StoreFuture<Inspected> {
        self.0.inspect(key)
    }

    fn force_release(&self, ask: ForceAsk) -> StoreFuture<ForceReleaseReply> {
        self.0.force_release(ask)
    }

    fn call_timeout(&self) -> Duration {
        self.0.call_timeout()
    }

    fn health(&self) -> StoreFuture<()> {
        self.0.health()
    }
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "a_stranger_frees_nothing_and_a_second_release_finds_nothing")]
async fn a_store_that_breaks_the_contract_is_told_which_clause() {
    conformance::check(FreesAnything(MemoryStore::new())).await;
}
