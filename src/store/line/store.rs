//! The operations of a store: calls of the lines of a server.

use std::{fmt, sync::Arc, time::Duration};

use super::{lines::Lines, shared::Shared};
use crate::{
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, DeleteRecordReply, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus,
        ListReply, ListRequest, LockStore, Many, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreError,
        StoreErrorKind, StoreFuture, StoreTraits, YieldReply, YieldRequest,
    },
};

/// A store whose locks are lines of entries.
pub(crate) struct LineStore<L: Lines>(Arc<Shared<L>>);

impl<L: Lines> LineStore<L> {
    pub(crate) fn new(lines: L, call_timeout: Duration) -> Self {
        Self(Shared::new(lines, call_timeout))
    }

    fn call<T, F>(
        &self,
        operation: &'static str,
        run: impl FnOnce(Arc<Shared<L>>) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, L::Error>> + Send + 'static,
    {
        let shared = Arc::clone(&self.0);
        StoreFuture::new(async move {
            shared.start();
            run(Arc::clone(&shared)).await.map_err(|error| shared.lines.store_error(operation, error))
        })
    }
}

fn unsupported<T>(store: &'static str, operation: &'static str, what: &'static str) -> StoreFuture<T> {
    StoreFuture::ready(Err(StoreError::new(store, operation, StoreErrorKind::Unsupported).with_source(what)))
}

const NO_RECORDS: &str = "a server of sessions has no records: use `RedisStore`, `PostgresStore` or `MysqlStore`";
const NO_SHARES: &str = "a server of sessions has no permits and reads: use `RedisStore` or `PostgresStore`";

const NO_TICKETS: &str = "a server of sessions has no tickets: use `RedisStore`, `PostgresStore` or `MysqlStore`";

impl<L: Lines> LockStore for LineStore<L> {
    fn subscribe(&self, sink: EventSink) {
        self.0.table().sinks.insert(sink.manager().to_owned(), sink);
    }

    fn acquire(&self, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>> {
        let called = self.0.clock.now();
        requests.map(|request| {
            if request.demand.takes_record() {
                return unsupported(L::STORE, "acquire", NO_RECORDS);
            }
            if request.in_place_of.is_some() {
                return unsupported(L::STORE, "acquire", NO_TICKETS);
            }
            if request.id.max_holders() > 1 {
                return unsupported(L::STORE, "acquire", NO_SHARES);
            }
            self.call("acquire", move |shared| async move { shared.acquire(&request, called).await })
        })
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.call("renew", move |shared| async move { shared.renew(&requests).await })
    }

    fn release(&self, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>> {
        requests.map(|request| {
            if request.record.is_some() {
                return unsupported(L::STORE, "release", NO_RECORDS);
            }
            if request.heir.is_some() {
                return unsupported(L::STORE, "release", NO_TICKETS);
            }
            self.call("release", move |shared| async move { shared.release(&request).await })
        })
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        if request.demand.takes_record() {
            return unsupported(L::STORE, "yield", NO_RECORDS);
        }
        let called = self.0.clock.now();
        self.call("yield", move |shared| async move { shared.yield_to_queue(&request, called).await })
    }

    fn delete_record(&self, _: LockKey) -> StoreFuture<DeleteRecordReply> {
        unsupported(L::STORE, "delete-record", NO_RECORDS)
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.call("inspect", move |shared| async move { shared.inspect(&key).await })
    }

    fn list(&self, request: ListRequest) -> StoreFuture<ListReply> {
        self.call("list", move |shared| async move { shared.list(&request).await })
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.call("force-release", move |shared| async move { shared.force_release(&request).await })
    }

    fn traits(&self) -> StoreTraits {
        StoreTraits::new().events(true).ordered(true)
    }

    fn call_timeout(&self) -> Duration {
        self.0.call_timeout
    }

    fn health(&self) -> StoreFuture<()> {
        self.call("health", |shared| async move { shared.beat(shared.clock.now(), Duration::ZERO).await })
    }
}

impl<L: Lines> fmt::Debug for LineStore<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LineStore").field(&self.0.lines).finish()
    }
}
