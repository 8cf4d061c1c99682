//! Stores that are wrong, each in one way: to see that the referee notices.

use std::{sync::Arc, time::Duration};

use tower_lock::{
    LockKey, LockStore, Released,
    store::{
        AcquireAsk, Acquired, ForceAsk, ForceReleaseReply, Inbox, Inspected, ReleaseAsk, RenewAsk, Renewed,
        StoreFuture, YieldAsk, Yielded,
    },
};

/// Gives a key back whoever has it: a `DEL` where the owner should be compared.
#[derive(Debug)]
pub struct FreesAnybody(pub Arc<dyn LockStore>);

/// Its clock runs a hundred times too fast: leases are over long before those who have them think so.
#[derive(Debug)]
pub struct LosesTrackOfTime(pub Arc<dyn LockStore>);

const TOO_FAST: u32 = 100;

impl LockStore for FreesAnybody {
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
        let store = Arc::clone(&self.0);
        StoreFuture::new(async move {
            let found = store.inspect(ask.key.clone()).await?;
            let Some(holder) = found.holder.filter(|holder| holder.owner != ask.owner) else {
                return store.release(ask).await;
            };
            let mut of_another = ask.clone();
            of_another.owner = holder.owner;
            store.release(of_another).await?;
            store.release(ask).await
        })
    }

    fn yield_to_line(&self, ask: YieldAsk) -> StoreFuture<Yielded> {
        self.0.yield_to_line(ask)
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<Inspected> {
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

impl LockStore for LosesTrackOfTime {
    fn open(&self, inbox: Inbox) {
        self.0.open(inbox);
    }

    fn acquire(&self, mut ask: AcquireAsk) -> StoreFuture<Acquired> {
        ask.lease /= TOO_FAST;
        self.0.acquire(ask)
    }

    fn renew(&self, mut asks: Vec<RenewAsk>) -> StoreFuture<Vec<Renewed>> {
        for ask in &mut asks {
            ask.lease /= TOO_FAST;
        }
        self.0.renew(asks)
    }

    fn release(&self, ask: ReleaseAsk) -> StoreFuture<Released> {
        self.0.release(ask)
    }

    fn yield_to_line(&self, mut ask: YieldAsk) -> StoreFuture<Yielded> {
        ask.lease /= TOO_FAST;
        self.0.yield_to_line(ask)
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<Inspected> {
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
