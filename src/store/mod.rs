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

use crate::{key::LockKey, lease::OwnerId};

mod error;
#[cfg(feature = "memory")]
mod memory;

pub use self::error::{StoreError, StoreErrorKind};
#[cfg(feature = "memory")]
#[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
pub use self::memory::MemoryStore;

/// Keeps locks: who has which key, until when, and under which fence.
///
/// # Contract
///
/// - Every verb is **atomic**: between its look at a key and its change no other verb touches that key.
/// - Every verb is **idempotent per owner id**. Callers repeat what was not answered, and two copies may arrive.
/// - A grant has a **lease**, counted by the store's own clock. When it is over the key is free.
/// - Every grant has a **fence**, larger than each one before it for that key, restarts included: at least the
///   store's wall clock in microseconds, and at least one more than the last (`max(last + 1, now)`), below 2⁵³.
/// - An error means that the outcome is unknown: the verb may have run, or may run later. `acquire` says
///   [`Held`](Acquired::Held), never an error, where somebody else holds the key.
/// - **Calling** a verb makes its future, or gives the answer where it is at hand; it takes no time, needs no runtime
///   and does not panic. `Drop` calls `release`.
/// - **Dropping** a future does not undo the verb; the caller gives back what it may have been granted.
/// - No verb waits for a key to become free.
///
/// There are no default methods: a weaker one would be found out in production.
pub trait LockStore: fmt::Debug + Send + Sync + 'static {
    /// Grants the key if it is free. For the owner that has it already: the fence that stands there, and a full lease.
    fn acquire<'a>(&'a self, ask: AcquireAsk<'a>) -> StoreFuture<'a, Acquired>;

    /// Gives each of these owners a full lease from now on, if it has its key. Answers one by one, in the order of the asks.
    fn renew<'a>(&'a self, asks: &'a [RenewAsk<'a>]) -> StoreFuture<'a, Vec<Renewed>>;

    /// Frees the key if this owner has it, and touches nothing otherwise.
    fn release<'a>(&'a self, ask: ReleaseAsk<'a>) -> StoreFuture<'a, Released>;
}

/// What [`LockStore::acquire`] is asked.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct AcquireAsk<'a> {
    /// What to lock.
    pub key: &'a LockKey,
    /// For whom.
    pub owner: &'a OwnerId,
    /// For how long, from the moment the store decides.
    pub lease: Duration,
}

/// What [`LockStore::acquire`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acquired {
    /// The owner has the key, for the lease it asked for.
    Granted {
        /// The fence of this grant.
        fence: u64,
    },
    /// Somebody else has it.
    Held {
        /// How long at most, as things stand.
        lease_left: Duration,
    },
}

/// What [`LockStore::renew`] is asked of one grant.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RenewAsk<'a> {
    /// What is locked.
    pub key: &'a LockKey,
    /// Who has it.
    pub owner: &'a OwnerId,
    /// For how long from now on.
    pub lease: Duration,
}

/// What [`LockStore::renew`] answers of one grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewed {
    /// The lease is full again.
    Extended,
    /// The owner does not have it: its lease was over.
    NotOwner,
}

/// What [`LockStore::release`] is asked.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ReleaseAsk<'a> {
    /// What to free.
    pub key: &'a LockKey,
    /// Who gives it back.
    pub owner: &'a OwnerId,
}

/// What [`LockStore::release`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// The key is free.
    Freed,
    /// The owner did not have it: its lease was over, or this is the second time.
    NotOwner,
}

/// The answer of a store: at hand, or on its way.
///
/// A store in memory answers without an allocation, any other boxes its future; neither needs a macro.
#[must_use = "futures do nothing unless you `.await` or poll them"]
pub struct StoreFuture<'a, T>(Answer<'a, T>);

enum Answer<'a, T> {
    Ready(Option<Result<T, StoreError>>),
    Coming(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>),
}

// === impl LockStore ===

impl<S: LockStore + ?Sized> LockStore for Arc<S> {
    fn acquire<'a>(&'a self, ask: AcquireAsk<'a>) -> StoreFuture<'a, Acquired> {
        (**self).acquire(ask)
    }

    fn renew<'a>(&'a self, asks: &'a [RenewAsk<'a>]) -> StoreFuture<'a, Vec<Renewed>> {
        (**self).renew(asks)
    }

    fn release<'a>(&'a self, ask: ReleaseAsk<'a>) -> StoreFuture<'a, Released> {
        (**self).release(ask)
    }
}

// === impl AcquireAsk ===

impl<'a> AcquireAsk<'a> {
    /// Asks for this key, for this owner, for this long.
    #[must_use]
    pub fn new(key: &'a LockKey, owner: &'a OwnerId, lease: Duration) -> Self {
        Self { key, owner, lease }
    }
}

// === impl RenewAsk ===

impl<'a> RenewAsk<'a> {
    /// Asks for more time for this key of this owner.
    #[must_use]
    pub fn new(key: &'a LockKey, owner: &'a OwnerId, lease: Duration) -> Self {
        Self { key, owner, lease }
    }
}

// === impl ReleaseAsk ===

impl<'a> ReleaseAsk<'a> {
    /// Gives this key of this owner back.
    #[must_use]
    pub fn new(key: &'a LockKey, owner: &'a OwnerId) -> Self {
        Self { key, owner }
    }
}

// === impl StoreFuture ===

impl<'a, T> StoreFuture<'a, T> {
    /// An answer at hand.
    pub fn ready(answer: Result<T, StoreError>) -> Self {
        Self(Answer::Ready(Some(answer)))
    }

    /// Whether the verb has run already.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.0, Answer::Ready(_))
    }

    /// An answer on its way.
    pub fn new(answer: impl Future<Output = Result<T, StoreError>> + Send + 'a) -> Self {
        Self(Answer::Coming(Box::pin(answer)))
    }
}

impl<T: Unpin> Future for StoreFuture<'_, T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Answer::Ready(answer) => Poll::Ready(answer.take().expect("not polled after its answer")),
            Answer::Coming(answer) => answer.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for StoreFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Answer::Ready(_) => "StoreFuture(ready)",
            Answer::Coming(_) => "StoreFuture(coming)",
        })
    }
}
