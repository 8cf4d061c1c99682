//! Where locks are kept: one small trait and its backends.
//!
//! A backend knows this trait and nothing else of the crate. `LockStore` is **unstable**: it grows until Redis,
//! replicas and clusters stand behind it.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use crate::{acquisition::AcquisitionId, lock_key::LockKey};

mod error;
mod inbox;
#[cfg(feature = "memory")]
mod memory;
#[cfg(feature = "redis")]
mod redis;

#[cfg(feature = "memory")]
#[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
pub use self::memory::MemoryStore;
#[cfg(all(feature = "redis", feature = "test-util"))]
#[doc(hidden)]
pub use self::redis::protocol as redis_protocol;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use self::redis::{RedisConnectError, RedisStore, RedisStoreBuilder};
pub use self::{
    error::{StoreError, StoreErrorKind},
    inbox::{EventSink, StoreEvent},
};

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
    fn release(&self, ask: ReleaseRequest) -> StoreFuture<Released>;

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

/// How a line is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueConfig {
    /// The lease of an offer: what a process costs that stops in the moment of its turn.
    pub offer_ttl: Duration,
    /// How long a place lasts that nobody asks for again.
    pub entry_ttl: Duration,
    /// How many places there are.
    pub capacity: usize,
}

/// What [`LockStore::acquire`] is asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AcquireRequest {
    /// What to lock.
    pub key: LockKey,
    /// For whom.
    pub id: AcquisitionId,
    /// For how long, from the moment the store decides.
    pub lease: Duration,
    /// What to do if somebody else has it.
    pub if_busy: IfBusy,
    /// How the line is served, if this finds the key free and somebody in it.
    pub queue: QueueConfig,
    /// How long after the call this may still be done.
    pub valid_for: Duration,
}

/// What an owner does that cannot have the key now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IfBusy {
    /// Nothing of it is left.
    Fail,
    /// It has a place in the line.
    Enqueue,
}

/// What [`LockStore::acquire`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireReply {
    /// The owner has the key, for the lease it asked for.
    Granted {
        /// The fence of this grant.
        fence: u64,
    },
    /// Somebody else has it, and the owner has a place.
    Queued {
        /// How many are before it in the line, the holder not counted.
        ahead: usize,
        /// How long the holder's lease runs, as things stand.
        lease_left: Duration,
    },
    /// Somebody else has it, and nothing of this owner is there.
    Busy {
        /// How long the holder's lease runs, as things stand.
        lease_left: Duration,
    },
    /// Somebody else has it, and no place is left.
    QueueFull {
        /// How long the holder's lease runs, as things stand.
        lease_left: Duration,
        /// How many wait in the store, the holder not counted.
        waiting: usize,
    },
}

/// What [`LockStore::renew`] is asked of one grant.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RenewRequest {
    /// What is locked.
    pub key: LockKey,
    /// Who has it.
    pub id: AcquisitionId,
    /// For how long from now on.
    pub lease: Duration,
}

/// What [`LockStore::renew`] answers of one grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenewReply {
    /// The lease is full again.
    Extended,
    /// The owner does not have it: its lease was over, or it was taken away.
    NotHolder,
    /// This one could not be asked for; others of the batch could.
    Unknown,
}

/// What [`LockStore::release`] is asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReleaseRequest {
    /// What to give back.
    pub key: LockKey,
    /// Who does.
    pub id: AcquisitionId,
    /// How long the key stays taken, by nobody, before it is given on.
    pub block_for: Duration,
    /// How the line is served.
    pub queue: QueueConfig,
}

/// What [`LockStore::release`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// The key is free, or stays taken for a while as it was asked.
    Freed,
    /// The next one in line has it.
    HandedOff,
    /// The owner still has it: this was not its last guard. No store says so.
    StillHeld,
    /// The owner did not have it: its lease was over, or this is the second time. Its place, if it had one, is gone.
    NotHolder,
}

/// What [`LockStore::yield_to_queue`] is asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct YieldRequest {
    /// What is locked.
    pub key: LockKey,
    /// Who has it.
    pub id: AcquisitionId,
    /// Under which fence. If the owner has it under another one, this yield was done before: that fence is the answer, and nothing changes.
    pub fence: u64,
    /// Under which id the same process lines up again, if somebody else has its turn.
    pub next_id: AcquisitionId,
    /// For how long, from the moment the store decides.
    pub lease: Duration,
    /// How the line is served.
    pub queue: QueueConfig,
    /// How long after the call this may still be done.
    pub valid_for: Duration,
}

/// What [`LockStore::yield_to_queue`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum YieldReply {
    /// Nobody waits: the owner goes on.
    Extended {
        /// Its new fence.
        fence: u64,
    },
    /// The owner does not have the key any more. What became of its next one.
    NotHolder(AcquireReply),
}

/// What [`LockStore::inspect`] answers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyStatus {
    /// Who has the key. `None`: it is free, or stays taken by nobody for a while.
    pub holder: Option<Holder>,
    /// How long the key stays taken, as things stand. Zero: it is free.
    pub lease_left: Duration,
    /// How many processes wait in the line.
    pub waiting: usize,
}

/// Who has a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The owner.
    pub id: AcquisitionId,
    /// The fence of the grant: the store's clock when it was made, in microseconds. Zero: a stranger has it, and nobody knows since when.
    pub fence: u64,
}

/// What [`LockStore::force_release`] is asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ForceReleaseRequest {
    /// What to take away.
    pub key: LockKey,
    /// How long the key stays taken, by nobody, so that its holder can hear of it and stop.
    pub block_for: Duration,
    /// How the line is served.
    pub queue: QueueConfig,
}

/// What [`LockStore::force_release`] answers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForceReleaseReply {
    /// Nobody had the key, and nothing blocked it.
    Free,
    /// It was revoked from this owner, which may be of another library. It stays blocked for
    /// [`ForceReleaseRequest::block_for`], and a second call within that time has the same answer.
    Revoked {
        /// The owner it was revoked from.
        holder: AcquisitionId,
    },
    /// Nobody had it: a minimum hold or a lock-delay blocked it. It is free now.
    Unblocked {
        /// How much longer it would have been blocked. [`Duration::MAX`]: without end.
        blocked_for: Duration,
    },
}

/// The answer of a store: at hand, or on its way.
///
/// A store in memory answers without an allocation, any other boxes its future; neither needs a macro.
#[must_use = "futures do nothing unless you `.await` or poll them"]
pub struct StoreFuture<T>(Answer<T>);

enum Answer<T> {
    Ready(Option<Result<T, StoreError>>),
    Coming(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
}

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

    fn release(&self, ask: ReleaseRequest) -> StoreFuture<Released> {
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

// === impl QueueConfig ===

impl QueueConfig {
    /// Creates a configuration.
    #[must_use]
    pub const fn new(offer_ttl: Duration, entry_ttl: Duration, capacity: usize) -> Self {
        Self { offer_ttl, entry_ttl, capacity }
    }
}

// === impl the asks ===

impl AcquireRequest {
    /// Asks for this key, for this owner, for this long.
    #[must_use]
    pub fn new(
        key: LockKey,
        id: AcquisitionId,
        lease: Duration,
        if_busy: IfBusy,
        queue: QueueConfig,
        valid_for: Duration,
    ) -> Self {
        Self { key, id, lease, if_busy, queue, valid_for }
    }
}

impl RenewRequest {
    /// Asks for more time for this key of this owner.
    #[must_use]
    pub fn new(key: LockKey, id: AcquisitionId, lease: Duration) -> Self {
        Self { key, id, lease }
    }
}

impl ReleaseRequest {
    /// Gives this key of this owner back, or its place.
    #[must_use]
    pub fn new(key: LockKey, id: AcquisitionId, block_for: Duration, queue: QueueConfig) -> Self {
        Self { key, id, block_for, queue }
    }
}

impl YieldRequest {
    /// Lets others have their turn, if there are others.
    #[must_use]
    pub fn new(
        key: LockKey,
        id: AcquisitionId,
        fence: u64,
        next_id: AcquisitionId,
        lease: Duration,
        queue: QueueConfig,
        valid_for: Duration,
    ) -> Self {
        Self { key, id, fence, next_id, lease, queue, valid_for }
    }
}

impl ForceReleaseRequest {
    /// Takes this key away from whoever has it.
    #[must_use]
    pub fn new(key: LockKey, block_for: Duration, queue: QueueConfig) -> Self {
        Self { key, block_for, queue }
    }
}

// === impl Inspected ===

impl KeyStatus {
    /// What stands there.
    #[must_use]
    pub fn new(holder: Option<Holder>, lease_left: Duration, waiting: usize) -> Self {
        Self { holder, lease_left, waiting }
    }
}

impl Holder {
    /// This owner, under this fence.
    #[must_use]
    pub fn new(id: AcquisitionId, fence: u64) -> Self {
        Self { id, fence }
    }
}

// === impl ForceReleaseReply ===

impl ForceReleaseReply {
    /// The owner that the key was revoked from.
    #[must_use]
    pub fn holder(&self) -> Option<&AcquisitionId> {
        if let Self::Revoked { holder } = self { Some(holder) } else { None }
    }
}

// === impl StoreFuture ===

impl<T> StoreFuture<T> {
    /// An answer at hand.
    pub fn ready(answer: Result<T, StoreError>) -> Self {
        Self(Answer::Ready(Some(answer)))
    }

    /// An answer on its way.
    pub fn new(answer: impl Future<Output = Result<T, StoreError>> + Send + 'static) -> Self {
        Self(Answer::Coming(Box::pin(answer)))
    }

    /// The answer, if it is at hand: then nobody has to wait for it, and no runtime is needed.
    pub(crate) fn into_ready(self) -> Result<Result<T, StoreError>, Self> {
        match self.0 {
            Answer::Ready(Some(answer)) => Ok(answer),
            answer => Err(Self(answer)),
        }
    }
}

impl<T: Unpin> Future for StoreFuture<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Answer::Ready(answer) => Poll::Ready(answer.take().expect("not polled after its answer")),
            Answer::Coming(answer) => answer.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for StoreFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Answer::Ready(_) => "StoreFuture(ready)",
            Answer::Coming(_) => "StoreFuture(coming)",
        })
    }
}
