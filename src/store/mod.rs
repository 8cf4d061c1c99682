//! Stores of locks: the trait [`LockStore`] and its implementations.
//!
//! `LockStore` is **unstable**: locks that several holders share, and leases of a process, may add
//! methods.

use std::{fmt, sync::Arc, time::Duration};

use crate::lock_key::LockKey;

// A store depends on this trait and on no other part of the crate.
mod types;
mod many;
mod list;
mod traits;
mod events;
mod free_keys;
mod future;
mod error;
mod scheme;
#[cfg(feature = "memory")]
mod memory;
#[cfg(feature = "__remote")]
pub(crate) mod remote;
#[cfg(feature = "__database")]
mod database;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "zookeeper")]
mod line;
#[cfg(feature = "zookeeper")]
pub(crate) mod zookeeper;
pub(crate) mod connect;

#[cfg(feature = "memory")]
#[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
pub use self::memory::MemoryStore;
#[cfg(feature = "mysql")]
#[cfg_attr(docsrs, doc(cfg(feature = "mysql")))]
pub use self::mysql::{MysqlConnectError, MysqlStore, MysqlStoreBuilder};
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
pub use self::postgres::{PostgresConnectError, PostgresStore, PostgresStoreBuilder};
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use self::redis::{RedisConnectError, RedisStore, RedisStoreBuilder, RedlockStore, RedlockStoreBuilder};
#[cfg(feature = "__remote")]
#[cfg_attr(
    docsrs,
    doc(cfg(any(feature = "mysql", feature = "postgres", feature = "redis", feature = "zookeeper")))
)]
pub use self::remote::credentials::Credentials;
#[cfg(feature = "zookeeper")]
#[cfg_attr(docsrs, doc(cfg(feature = "zookeeper")))]
pub use self::zookeeper::{ZooKeeperConnectError, ZooKeeperStore, ZooKeeperStoreBuilder};
pub use self::{
    connect::ConnectError,
    error::{StoreError, StoreErrorKind},
    events::{EventSink, StoreEvent},
    free_keys::FreeKeys,
    future::{ReplySender, StoreFuture},
    list::{Cursor, ListEntry, ListReply, ListRequest},
    many::Many,
    traits::StoreTraits,
    types::{
        AcquireReply, AcquireRequest, DeleteRecordReply, Demand, ForceReleaseReply, ForceReleaseRequest, Heir, Holder,
        IfBusy, KeyStatus, NewRecord, QueueConfig, Record, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest,
        YieldReply, YieldRequest,
    },
};
pub(crate) use self::{
    connect::{NamedStore, connect},
    future::ReceiveReply,
};
pub use crate::acquisition::AcquisitionIds;

/// Store of locks: the holder, lease, fence and queue of each key.
///
/// # Contract
///
/// - Every operation is **atomic** for each key that it names: between its reads and its writes no
///   other operation changes that key. A call with several requests need not be atomic: each of
///   them has a reply of its own.
/// - Every operation is **idempotent per [`AcquisitionId`](crate::AcquisitionId)**. Callers repeat
///   a call that got no reply, and two copies of a call may arrive. A repeated
///   [`acquire`](Self::acquire) finds the grant or the queue entry of the first one. A repeated
///   [`release`](Self::release) finds nothing.
/// - A grant has a **lease**. The clock of the store measures it, from the time at which the store
///   executes the call. When the lease has expired, the key is free.
/// - A grant has a **fence**. It is larger than each earlier fence of that key, also after a
///   restart of the store, and is below 2⁵³. It need not be a time. A store whose last fence may be
///   lost uses `max(last + 1, now)` with its wall clock in microseconds, as the stores of this
///   crate do.
/// - In an [`ordered`](StoreTraits::ordered) store, a **free key with waiters** belongs to the
///   first live waiter of its queue. Every operation that finds such a key *offers* it to that
///   waiter: [`release`](Self::release), [`yield_to_queue`](Self::yield_to_queue),
///   [`force_release`](Self::force_release), and an [`acquire`](Self::acquire) of any other
///   acquisition. An offer is a grant with the short lease [`QueueConfig::offer_ttl`], a fence of
///   its own, and an event to the waiter's sink.
/// - In a store with [`shares`](StoreTraits::shares), **several acquisitions may hold a key**. One
///   is granted if fewer than its [`max_holders`](crate::AcquisitionId::max_holders) hold the key,
///   and none of them alone. Each has a lease of its own, and the end of one frees one place. A
///   block keeps the place of its holder, and a [`force_release`](Self::force_release) the place of
///   each. A free place goes to the first live waiter. A first waiter that does not fit keeps those
///   behind it waiting. [`lease_left`](AcquireReply::Busy::lease_left) is the time until a place
///   may be free: the end of the first holder, or of the last one for an acquisition that holds the
///   key alone. No fence of such a holder is compared with another.
/// - An **event is a hint**. It may be lost, duplicated or delayed. Its receiver calls `acquire`
///   before it starts any work. A process without an open sink is dead: within a second the store
///   notices that, and skips its waiters from then on.
/// - A **queue entry** lasts while `acquire` is repeated for it within [`QueueConfig::entry_ttl`].
///   Otherwise the store may drop the entry. The order of the other entries stays.
/// - A **record** of a key is left by a [`release`](Self::release) of its holder, in the same step,
///   or by a transaction of the holder in the database that is the store. An acquire that is made
///   [`unless_recorded`](Demand::unless_recorded) gets the record while it lasts; such an
///   acquisition holds no grant, no offer and no queue entry afterwards. Other acquires ignore it.
///   A store that must forget records before their time drops bodies first.
/// - An **error** means that the outcome is unknown: the operation may have been executed, or may
///   be executed later. A busy key is a reply and not an error.
/// - An `acquire` or a `yield_to_queue` **expires** [`AcquireRequest::valid_for`] after the call. A
///   copy that arrives later does nothing, and its reply is an error of the kind
///   [`Timeout`](StoreErrorKind::Timeout). Until then a call without a reply may still be executed.
///   A store that passes calls on to another one subtracts the time that has passed.
/// - **Calling** an operation returns a future, or the reply if it is ready. The call does not
///   block, needs no runtime and does not panic, because `Drop` calls `release`. The future is
///   polled in a task, with timers: I/O starts there.
/// - **Dropping** a future does not undo the operation. The caller releases each grant that it may
///   have received.
/// - No operation waits until a key is free.
///
/// No method of the contract has a default: a weaker one would be noticed only in production. The
/// hidden methods have one, and are no part of the contract.
/// With the feature `test-util`, `test_util::conformance` tests a store against every clause.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a lock store",
    label = "not a lock store",
    note = "connecting is asynchronous and may fail: `RedisStore::connect(url).await?`"
)]
pub trait LockStore: fmt::Debug + Send + Sync + 'static {
    /// Registers the sink of a process. The store sends the events of that process to it until the
    /// sink is closed.
    ///
    /// Each [`LockManager`](crate::LockManager) calls this once, before any other operation.
    fn subscribe(&self, sink: EventSink);

    /// Grants each key if it is free and no live waiter is ahead. Otherwise enqueues, if
    /// [`IfBusy::Enqueue`] is set.
    ///
    /// The replies are in the order of the requests, which name different keys. A store may execute
    /// them together, and together with those of other calls.
    ///
    /// If the acquisition already holds the key, or was offered it, the reply has the fence of that
    /// grant, and the lease is at least a full one. A delayed copy never shortens the lease. If the
    /// acquisition is in the queue, it keeps its position.
    ///
    /// After an error the acquisition is in doubt until the request expires, so the caller releases
    /// it.
    fn acquire(&self, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>>;

    /// Extends each lease to at least a full one, if the acquisition holds its key.
    ///
    /// A renewal never shortens a lease, because it may be executed after a later call that set a
    /// longer one. Each renewal is atomic; the batch is not. The replies are in the order of the
    /// requests.
    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>>;

    /// Ends acquisitions: releases the key that each of them holds, or removes its queue entry.
    /// Other acquisitions are not changed. The replies are in the order of the requests.
    ///
    /// The key is offered to the first live waiter. If [`ReleaseRequest::block_for`] is not zero,
    /// the key stays blocked for that time first, without a holder.
    ///
    /// After an error the caller repeats the release until the lease has expired.
    fn release(&self, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>>;

    /// Passes the key to the first live waiter, between two sections of one process.
    ///
    /// With waiters, the key is offered to the first one, and [`YieldRequest::next_id`] is enqueued
    /// at the end. Without waiters, the acquisition holds the key for another full lease under a
    /// new fence. If the acquisition has lost the key, the store only acquires for `next_id`, as
    /// [`acquire`](Self::acquire) does. A delayed copy of an executed yield changes nothing,
    /// because a section may run under the new fence.
    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply>;

    /// Deletes the record of a key that has no holder.
    ///
    /// A store without [`records`](StoreTraits::records) replies with
    /// [`StoreErrorKind::Unsupported`].
    fn delete_record(&self, key: LockKey) -> StoreFuture<DeleteRecordReply>;

    /// Returns the holder of a key, its remaining lease, the number of waiters, and whether the key
    /// has a record. Changes nothing.
    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus>;

    /// Returns one page of the keys that are held, blocked or waited for. Changes nothing.
    ///
    /// A key that is held from the first page to the last one is listed at least once. A key may be
    /// listed twice. One call must not delay other ones: its work in the store is bounded, and a
    /// page may end early.
    fn list(&self, request: ListRequest) -> StoreFuture<ListReply>;

    /// Revokes the key from its holders, or from one of them, sends [`StoreEvent::Revoked`] to
    /// each, and blocks its place for [`ForceReleaseRequest::block_for`].
    ///
    /// If the key has no holder and is only blocked, it is free afterwards, and is offered to the
    /// first live waiter.
    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply>;

    /// Returns what the store can do beyond the rest of this contract. It is constant for the
    /// lifetime of a store.
    fn traits(&self) -> StoreTraits;

    /// Returns the maximum time of one call. It is constant for the lifetime of a store.
    ///
    /// After this time the caller stops waiting and treats the outcome as unknown, and an `acquire`
    /// [expires](AcquireRequest::valid_for). A request is rejected after twice this time without a
    /// reply. The default of the stores of this crate is half a second.
    fn call_timeout(&self) -> Duration;

    /// Checks whether the store replies and can send events, for a readiness probe. Changes
    /// nothing.
    fn health(&self) -> StoreFuture<()>;

    /// Returns the keys that are granted without a call. No part of the contract: a store without
    /// them is slower, and nothing else.
    #[doc(hidden)]
    fn free_keys(&self) -> Option<&dyn FreeKeys> {
        None
    }

    /// Returns the number of the server that has this key now, of a store with several. No part of
    /// the contract: renewals at one server do not wait for those at another one.
    #[doc(hidden)]
    fn server_of(&self, _key: &LockKey) -> usize {
        0
    }
}

// === impl LockStore ===

/// The methods of [`LockStore`] that call those of another store.
macro_rules! delegate_lock_store {
    ($this:ident => $store:expr) => {
        fn subscribe(&$this, sink: EventSink) {
            $store.subscribe(sink);
        }

        fn acquire(&$this, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>> {
            $store.acquire(requests)
        }

        fn renew(&$this, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
            $store.renew(requests)
        }

        fn release(&$this, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>> {
            $store.release(requests)
        }

        fn yield_to_queue(&$this, request: YieldRequest) -> StoreFuture<YieldReply> {
            $store.yield_to_queue(request)
        }

        fn delete_record(&$this, key: LockKey) -> StoreFuture<DeleteRecordReply> {
            $store.delete_record(key)
        }

        fn inspect(&$this, key: LockKey) -> StoreFuture<KeyStatus> {
            $store.inspect(key)
        }

        fn list(&$this, request: ListRequest) -> StoreFuture<ListReply> {
            $store.list(request)
        }

        fn force_release(&$this, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
            $store.force_release(request)
        }

        fn traits(&$this) -> StoreTraits {
            $store.traits()
        }

        fn call_timeout(&$this) -> Duration {
            $store.call_timeout()
        }

        fn health(&$this) -> StoreFuture<()> {
            $store.health()
        }

        fn free_keys(&$this) -> Option<&dyn FreeKeys> {
            $store.free_keys()
        }

        fn server_of(&$this, key: &LockKey) -> usize {
            $store.server_of(key)
        }
    };
}

impl<S: LockStore + ?Sized> LockStore for Arc<S> {
    delegate_lock_store!(self => **self);
}

#[cfg(feature = "mysql")]
impl LockStore for MysqlStore {
    delegate_lock_store!(self => self.0);
}

#[cfg(feature = "postgres")]
impl LockStore for PostgresStore {
    delegate_lock_store!(self => self.0);
}

#[cfg(feature = "zookeeper")]
impl LockStore for ZooKeeperStore {
    delegate_lock_store!(self => self.0);
}
