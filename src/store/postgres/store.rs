//! The store: calls of functions of the database.

use std::{fmt, sync::Arc, time::Duration};

use tokio_postgres::types::Type;

use super::{
    connection::{Parameter, query},
    error::CallError,
    replies::{column, only, revoked, status, yielded},
    schema::{self, name},
    shared::{Shared, millis},
};
use crate::{
    clock::Clock,
    limits::POSTGRES_LISTED_ROWS,
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, Cursor, DeleteRecordReply, EventSink, ForceReleaseReply, ForceReleaseRequest,
        KeyStatus, ListEntry, ListReply, ListRequest, LockStore, Many, ReleaseReply, ReleaseRequest, RenewReply,
        RenewRequest, StoreFuture, StoreTraits, YieldReply, YieldRequest,
        remote::batching::{Sender, SharedCalls},
    },
};

/// Store of locks in PostgreSQL (13 or later), which any number of instances share. Needs the
/// feature `postgres`.
///
/// ```no_run
/// # use tower_lock::{LockManager, PostgresStore, store::PostgresConnectError};
/// # #[tokio::main]
/// # async fn main() -> Result<(), PostgresConnectError> {
/// let store = PostgresStore::builder().migrate(true).connect("postgres://user:password@localhost/app").await?;
/// let locks = LockManager::new(store);
/// # Ok(())
/// # }
/// ```
///
/// A lock is a row of a table, and each operation is one call of a function of the database. The
/// tables and the functions have a schema of their own, and are made by the
/// [migration](crate::store::PostgresStoreBuilder::migration). Waiters queue in another table. A
/// release offers the lock to the first waiter, and sends a message (`NOTIFY`) to its process.
///
/// A transaction of the application can keep its key: while a transaction has read the row of the
/// lock `FOR KEY SHARE`, the key is busy, although its lease may have expired. Renewals and
/// releases do not wait for such a transaction.
///
/// A store has three connections: one for acquires, one for renewals and releases, and one for
/// messages. Under load it opens more for acquires, up to
/// [`connections`](crate::store::PostgresStoreBuilder::connections). A broken connection is
/// replaced. No statement has a name, and no transaction is open between two messages, so that a
/// pooler may be in between; messages need a connection to the server itself
/// ([`events_url`](crate::store::PostgresStoreBuilder::events_url)).
///
/// A fence is the clock of the server in microseconds, or one more than the last fence of the key,
/// if that is larger.
///
/// A grant, a renewal, a record and a block are on the disk of the server when its reply arrives. A
/// release is not: one that a crash of the server loses leaves the key locked until its lease
/// expires.
///
/// While PostgreSQL cannot be reached, no lock is acquired (503, not started), and a held lock is
/// lost when its lease expires.
pub struct PostgresStore {
    pub(super) shared: Arc<Shared>,
}

impl PostgresStore {
    /// Calls the server. The timeout starts at the first poll: the call itself may be outside of a
    /// runtime.
    fn call<T, F>(&self, operation: &'static str, run: impl FnOnce(Arc<Shared>) -> F + Send + 'static) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, CallError>> + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        StoreFuture::new(async move {
            let server = Arc::clone(&shared.server);
            run(shared).await.map_err(|error| server.store_error(operation, error))
        })
    }
}

impl LockStore for PostgresStore {
    fn subscribe(&self, sink: EventSink) {
        self.shared.messages.add(sink);
    }

    fn acquire(&self, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>> {
        SharedCalls::push(&self.shared, requests, self.shared.now())
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        let shared = Arc::clone(&self.shared);
        StoreFuture::new(async move { shared.renew(&requests).await })
    }

    fn release(&self, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>> {
        SharedCalls::push(&self.shared, requests, self.shared.now())
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        let called = Clock::default().now();
        self.call("yield", move |shared| async move {
            let has_messages = shared.messages.wait_subscribed(request.next_id.manager()).await;
            let YieldRequest { key, id, fence, next_id, lease, queue, valid_for, demand } = &request;
            let (name, id, next_id) = (name(key).ok_or(CallError::InvalidKey)?, id.to_string(), next_id.to_string());
            let fence = i64::try_from(*fence).unwrap_or(i64::MAX);
            let (lease, offer, entry) = (millis(*lease), millis(queue.offer_ttl), millis(queue.entry_ttl));
            let capacity = i64::try_from(queue.capacity).unwrap_or(i64::MAX);
            let takes_record = demand.takes_record();
            let parameters: [Parameter<'_>; 9] = [
                (&offer, Type::INT8),
                (&entry, Type::INT8),
                (&capacity, Type::INT8),
                (&takes_record, Type::BOOL),
                (&name, Type::TEXT),
                (&id, Type::TEXT),
                (&fence, Type::INT8),
                (&next_id, Type::TEXT),
                (&lease, Type::INT8),
            ];
            let rows = shared.call_before_expiry(called, *valid_for, "yield_key", &parameters).await?;
            yielded(only(&rows)?, has_messages)
        })
    }

    fn delete_record(&self, key: LockKey) -> StoreFuture<DeleteRecordReply> {
        self.call("delete-record", move |shared| async move {
            let (server, name) = (&shared.server, name(&key).ok_or(CallError::InvalidKey)?);
            let rows = server.call_retry(&server.release_conn, "delete_record", &[(&name, Type::TEXT)]).await?;
            Ok(match column(only(&rows)?, 0)? {
                "deleted" => DeleteRecordReply::Deleted,
                "not found" => DeleteRecordReply::NotFound,
                "busy" => DeleteRecordReply::Busy,
                _ => return Err(CallError::UnexpectedReply),
            })
        })
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.call("inspect", move |shared| async move {
            let (server, name) = (&shared.server, name(&key).ok_or(CallError::InvalidKey)?);
            let rows = server.call_retry(&server.release_conn, "inspect", &[(&name, Type::TEXT)]).await?;
            let row = only(&rows)?;
            Ok(status(row)?.kept_by(column(row, 9)?))
        })
    }

    fn list(&self, request: ListRequest) -> StoreFuture<ListReply> {
        self.call("list", move |shared| async move {
            let ListRequest { after, limit, contended_only } = &request;
            let after = after.as_ref().map_or("", Cursor::as_str);
            if after.contains('\0') {
                return Err(CallError::InvalidKey);
            }
            let limit = i64::try_from(*limit).unwrap_or(i64::MAX);
            let parameters: [Parameter<'_>; 4] = [
                (&after, Type::TEXT),
                (&limit, Type::INT8),
                (&POSTGRES_LISTED_ROWS, Type::INT8),
                (contended_only, Type::BOOL),
            ];
            let mut page = ListReply::new(Vec::new(), None);
            for row in shared.server.call_retry(&shared.server.release_conn, "list_keys", &parameters).await? {
                let name: &str = column(&row, 0)?;
                match column::<Option<i64>>(&row, 5)? {
                    Some(_) => page.entries.push(ListEntry::new(schema::key(name), status(&row)?)),
                    // The key after which the next page begins.
                    None => page.next = Some(Cursor::new(name)),
                }
            }
            Ok(page)
        })
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.call("force-release", move |shared| async move {
            let (name, block) = (name(&request.key).ok_or(CallError::InvalidKey)?, millis(request.block_for));
            let offer = millis(request.queue.offer_ttl);
            let holder = request.holder.as_ref().map(ToString::to_string);
            let parameters: [Parameter<'_>; 4] =
                [(&name, Type::TEXT), (&block, Type::INT8), (&offer, Type::INT8), (&holder, Type::TEXT)];
            // Not repeated: the next holder may have the key by then.
            let rows = shared.server.call(&shared.server.release_conn, "force_release", &parameters).await?;
            revoked(only(&rows)?)
        })
    }

    fn traits(&self) -> StoreTraits {
        StoreTraits::new().events(self.shared.messages.are_sent()).records(true).ordered(true).shares(true)
    }

    fn call_timeout(&self) -> Duration {
        self.shared.server.timeouts.call
    }

    fn health(&self) -> StoreFuture<()> {
        self.call("health", |shared| async move {
            let server = &shared.server;
            let deadline = server.timeouts.call_deadline();
            // Of a key that no caller has: the tables and the functions are there.
            let schema = &server.schema.name;
            let statement =
                format!("SELECT current_setting('transaction_read_only') FROM \"{schema}\".inspect('+health')");
            for connection in [&*server.synced_conns.take(), &server.release_conn] {
                let rows = query(connection, &statement, &[], deadline).await?;
                if column::<&str>(only(&rows)?, 0)? != "off" {
                    return Err(CallError::ReadOnly);
                }
            }
            if shared.messages.are_subscribed().await { Ok(()) } else { Err(CallError::NotListening) }
        })
    }
}

impl fmt::Debug for PostgresStore {
    /// Without the settings, which have the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = &self.shared.server;
        f.debug_struct("PostgresStore")
            .field("address", &server.address)
            .field("schema", &server.schema.name)
            .finish_non_exhaustive()
    }
}
