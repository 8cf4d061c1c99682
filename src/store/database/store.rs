//! The operations of a store: calls of functions of the database.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    driver::{Argument, Database, Messages, Row, name},
    error::CallError,
    replies::{deleted, only, page, revoked, status, yielded},
    server::Server,
    shared::Shared,
};
use crate::{
    clock::Clock,
    limits::LISTED_ROWS,
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, Cursor, DeleteRecordReply, EventSink, ForceReleaseReply, ForceReleaseRequest,
        KeyStatus, ListReply, ListRequest, LockStore, Many, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest,
        StoreFuture, StoreTraits, YieldReply, YieldRequest,
        remote::batching::{Sender, SharedCalls},
    },
};

/// A store in a database.
pub(crate) struct DatabaseStore<D: Database> {
    shared: Arc<Shared<D>>,
}

impl<D: Database> DatabaseStore<D> {
    /// Starts to receive messages and to sweep.
    pub(crate) fn new(server: Arc<Server<D>>, messages: Arc<D::Messages>) -> Self {
        let shared = Arc::new(Shared::new(server, messages));
        shared.start();
        Self { shared }
    }

    /// Calls the server. The timeout starts at the first poll: the call itself may be outside of a
    /// runtime.
    fn call<T, F>(
        &self,
        operation: &'static str,
        run: impl FnOnce(Arc<Shared<D>>) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, D::Error>> + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        StoreFuture::new(async move {
            let server = Arc::clone(&shared.server);
            run(shared).await.map_err(|error| server.store_error(operation, error))
        })
    }
}

impl<D: Database> LockStore for DatabaseStore<D> {
    fn subscribe(&self, sink: EventSink) {
        self.shared.messages.add(sink);
        self.shared.start();
    }

    fn acquire(&self, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>> {
        SharedCalls::push(&self.shared, requests, self.shared.now())
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.call("renew", |shared| async move { shared.renew(&requests).await })
    }

    fn release(&self, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>> {
        SharedCalls::push(&self.shared, requests, self.shared.now())
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        let called = Clock::default().now();
        self.call("yield", move |shared| async move {
            shared.start();
            let has_messages = shared.messages.wait_subscribed(request.next_id.manager()).await;
            let YieldRequest { key, id, fence, next_id, lease, queue, valid_for, demand, ended, trace } = &request;
            let (name, id, next_id) =
                (name::<D>(key).ok_or(CallError::InvalidKey)?, id.to_string(), next_id.to_string());
            let arguments = [
                Argument::Queue(queue),
                Argument::Flag(demand.takes_record()),
                Argument::Text(Some(&name)),
                Argument::Text(Some(&id)),
                Argument::Number(i64::try_from(*fence).unwrap_or(i64::MAX)),
                Argument::Text(Some(&next_id)),
                Argument::Time(*lease),
                Argument::Trace(ended.as_ref()),
                Argument::Trace(trace.as_ref()),
            ];
            let rows = shared.call_before_expiry(called, *valid_for, "yield_key", &arguments).await?;
            yielded::<D>(only(&rows)?, has_messages)
        })
    }

    fn delete_record(&self, key: LockKey) -> StoreFuture<DeleteRecordReply> {
        self.call("delete-record", move |shared| async move {
            let (server, name) = (&shared.server, name::<D>(&key).ok_or(CallError::InvalidKey)?);
            let rows = server.call_retry(&server.main_conn, "delete_record", &[Argument::Text(Some(&name))]).await?;
            deleted(only(&rows)?).ok_or(CallError::UnexpectedReply)
        })
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.call("inspect", move |shared| async move {
            let (server, name) = (&shared.server, name::<D>(&key).ok_or(CallError::InvalidKey)?);
            let rows = server.call_retry(&server.main_conn, "inspect", &[Argument::Text(Some(&name))]).await?;
            let row = only(&rows)?;
            Ok(status(row).ok_or(CallError::UnexpectedReply)?.kept_by(row.text(9)))
        })
    }

    fn list(&self, request: ListRequest) -> StoreFuture<ListReply> {
        self.call("list", move |shared| async move {
            let ListRequest { after, limit, contended_only } = &request;
            let after = after.as_ref().map_or("", Cursor::as_str);
            if !D::has_text(after) {
                return Err(CallError::InvalidKey);
            }
            let arguments = [
                Argument::Text(Some(after)),
                Argument::Number(i64::try_from(*limit).unwrap_or(i64::MAX)),
                Argument::Number(LISTED_ROWS),
                Argument::Flag(*contended_only),
            ];
            let rows = shared.server.call_retry(&shared.server.main_conn, "list_keys", &arguments).await?;
            page(&rows).ok_or(CallError::UnexpectedReply)
        })
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.call("force-release", move |shared| async move {
            let name = name::<D>(&request.key).ok_or(CallError::InvalidKey)?;
            let holder = request.holder.as_ref().map(ToString::to_string);
            let arguments = [
                Argument::Text(Some(&name)),
                Argument::Time(request.block_for),
                Argument::Offer(&request.queue),
                Argument::Text(holder.as_deref()),
            ];
            // Not repeated: the next holder may have the key by then.
            let rows = shared.server.call(&shared.server.main_conn, "force_release", &arguments).await?;
            revoked(only(&rows)?).ok_or(CallError::UnexpectedReply)
        })
    }

    fn traits(&self) -> StoreTraits {
        let are_sent = self.shared.messages.are_sent();
        let traits = StoreTraits::new().events(are_sent).records(true).ordered(D::HAS_QUEUE);
        traits.shares(true).tickets(true).traces(D::HAS_QUEUE).supersedes(D::HAS_QUEUE)
    }

    fn call_timeout(&self) -> Duration {
        self.shared.server.timeouts.call
    }

    fn health(&self) -> StoreFuture<()> {
        self.call("health", |shared| async move {
            shared.start();
            let Server { synced_conns, main_conn, schema, timeouts, .. } = &*shared.server;
            let deadline = timeouts.call_deadline();
            for connection in [&*synced_conns.take(), main_conn] {
                let check = || D::check(connection, schema, deadline);
                match check().await {
                    // The server may have ended an idle session.
                    Err(error) if error.breaks_connection() => check().await?,
                    checked => checked?,
                }
            }
            if shared.messages.are_subscribed().await { Ok(()) } else { Err(CallError::NotListening) }
        })
    }
}

impl<D: Database> fmt::Debug for DatabaseStore<D> {
    /// Without the settings, which have the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Server { address, schema, .. } = &*self.shared.server;
        f.debug_struct("DatabaseStore").field("address", address).field("schema", schema).finish_non_exhaustive()
    }
}
