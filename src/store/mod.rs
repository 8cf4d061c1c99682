//! Where locks are kept: one small trait and its backends.
//!
//! A backend knows this trait and nothing else of the crate. `LockStore` is **unstable**: it grows until Redis,
//! replicas and clusters stand behind it.

use std::{fmt, sync::Arc, time::Duration};

use crate::lock_key::LockKey;

mod types;
mod events;
mod future;
mod error;
#[cfg(feature = "memory")]
mod memory;
#[cfg(feature = "redis")]
pub(crate) mod redis;

#[cfg(feature = "memory")]
#[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
pub use self::memory::MemoryStore;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use self::redis::{RedisConnectError, RedisStore, RedisStoreBuilder};
pub use self::{
    error::{StoreError, StoreErrorKind},
    events::{EventSink, StoreEvent},
    future::StoreFuture,
    types::{
        AcquireReply, AcquireRequest, ForceReleaseReply, ForceReleaseRequest, Holder, IfBusy, KeyStatus, QueueConfig,
        ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, YieldReply, YieldRequest,
    },
};

pub use crate::acquisition::AcquisitionIds;

/// Keeps locks: who has which key, until when, under which fence, and who waits for it.
///
/// # Contract
///
/// - Every verb is **atomic** for each key it names: between its look and its change no other verb touches that key.
/// - Every verb is **idempotent per owner id**: callers repeat what was not answered, and two copies may arrive. A repeated
///   [`acquire`](Self::acquire) finds the grant or the place it made; a repeated [`release`](Self::release) finds nothing.
/// - A grant has a **lease**, counted by the store's own clock from the moment it decides. When it is over the key is free.
/// - Every grant has a **fence**, larger than each one before it for that key, restarts included: at least the
///   store's wall clock in microseconds, and at least one more than the last (`max(last + 1, now)`), below 2⁵³.
/// - A key that is **free while somebody waits** belongs to the first of its line who still listens, whoever asks and whenever:
///   [`release`](Self::release), [`yield_to_queue`](Self::yield_to_queue), [`force_release`](Self::force_release) and
///   [`acquire`](Self::acquire) of another one all *offer* it to that one: a grant with the short lease of
///   [`QueueConfig::offer_ttl`], a fence of its own, and an event to the inbox of its process.
/// - An **event is a hint**. It may be lost, doubled or late; who gets it asks again before anything runs. A process that
///   has no inbox any more is dead, and is skipped, as soon as the store has noticed: within a second.
/// - A **place** in a line lasts as long as its owner asks again within [`QueueConfig::entry_ttl`]. One that is
///   not asked for any more may go; the order of the others stays.
/// - An **error** means that the outcome is unknown: the verb may have run, or may run later. Where somebody else has the key, that is an
///   answer and no error.
/// - An `acquire` or `yield_to_queue` is **void** once [`AcquireRequest::valid_for`] has passed since it was called: a copy that gets through
///   later does nothing. What was called earlier than that and got no answer may still run until then.
/// - **Calling** a verb makes its future, or gives the answer where it is at hand; it takes no time, needs no runtime
///   and does not panic. `Drop` calls `release`.
/// - **Dropping** a future does not undo the verb; the caller gives back what it may have been granted.
/// - No verb waits for a key to become free.
///
/// There are no default methods: a weaker one would be found out in production. With the feature `test-util`,
/// `test_util::conformance` asks a store for all of this.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no store for locks",
    label = "not a store",
    note = "to connect takes a while and may fail: `RedisStore::connect(url).await?`"
)]
pub trait LockStore: fmt::Debug + Send + Sync + 'static {
    /// Opens the inbox of one process: from now on its events go there, until it is closed. Called once for each
    /// [`LockManager`](crate::LockManager), before anything else is asked on its behalf.
    fn subscribe(&self, inbox: EventSink);

    /// Grants the key if it is free and nobody was there before; else leaves a place in its line, if so asked.
    ///
    /// For the owner that has the key already, or has been offered it: the fence that stands there,
    /// and at least a full lease. A copy that is done late never shortens the lease that stands
    /// there. For the one that has a place already: that place.
    fn acquire(&self, ask: AcquireRequest) -> StoreFuture<AcquireReply>;

    /// Gives each of these owners at least a full lease from now on, if it has its key: a renewal
    /// never shortens the lease that stands there, because it may be done after a later call that
    /// asked for more. Answers one by one, in the order of the asks.
    fn renew(&self, asks: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>>;

    /// Gives back whatever this owner has there: the key, or its place in the line. Touches nothing else.
    ///
    /// The key goes to the line at once, or, if [`ReleaseRequest::block_for`] is not zero, stays taken for so long, by nobody.
    fn release(&self, ask: ReleaseRequest) -> StoreFuture<ReleaseReply>;

    /// Between two sections of one process: if others wait, the key goes to the first of them and [`YieldRequest::next_id`] to the end
    /// of the line; else the owner goes on, with a full lease and a new fence. An owner that has lost the key gets nothing; its
    /// next one is asked for as by [`acquire`](Self::acquire). A copy that comes when it was done changes nothing: a section may run under
    /// the new fence.
    fn yield_to_queue(&self, ask: YieldRequest) -> StoreFuture<YieldReply>;

    /// Who has the key, and how many wait. Changes nothing.
    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus>;

    /// Revokes the key from its holder, sends that one [`StoreEvent::Revoked`], and keeps it taken for [`ForceReleaseRequest::block_for`]. A key
    /// without a holder that is only kept taken is free afterwards, and goes to the queue.
    fn force_release(&self, ask: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply>;

    /// How long one call may take. The caller stops waiting then and treats the outcome as unknown; an `acquire` is
    /// [void](AcquireRequest::valid_for) then. After twice this time without an answer a request is rejected. It does not change during the
    /// life of a store. [`CALL_TIMEOUT`] is the usual one.
    fn call_timeout(&self) -> Duration;

    /// Whether the store answers now and can send events, for a readiness probe. Changes nothing.
    fn health(&self) -> StoreFuture<()>;
}

/// The usual [`LockStore::call_timeout`].
pub const CALL_TIMEOUT: Duration = crate::limits::STORE_CALL_TIMEOUT;

// === impl LockStore ===

impl<S: LockStore + ?Sized> LockStore for Arc<S> {
    fn subscribe(&self, inbox: EventSink) {
        (**self).subscribe(inbox);
    }

    fn acquire(&self, ask: AcquireRequest) -> StoreFuture<AcquireReply> {
        (**self).acquire(ask)
    }

    fn renew(&self, asks: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        (**self).renew(asks)
    }

    fn release(&self, ask: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        (**self).release(ask)
    }

    fn yield_to_queue(&self, ask: YieldRequest) -> StoreFuture<YieldReply> {
        (**self).yield_to_queue(ask)
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        (**self).inspect(key)
    }

    fn force_release(&self, ask: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        (**self).force_release(ask)
    }

    fn call_timeout(&self) -> Duration {
        (**self).call_timeout()
    }

    fn health(&self) -> StoreFuture<()> {
        (**self).health()
    }
}
