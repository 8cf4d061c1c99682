//! The future of a reply.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use super::{StoreError, StoreErrorKind};
use crate::{lock_key::LockKey, sync::Mutex};

/// Future of the reply of a store: ready, boxed, or sent later by the store.
///
/// A ready reply needs no allocation.
#[must_use = "futures do nothing unless you `.await` or poll them"]
pub struct StoreFuture<T>(State<T>);

enum State<T> {
    Ready(Option<Result<T, StoreError>>),
    Pending(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
    Sent(Arc<Slot<T>>),
}

/// Sends the reply of a [`StoreFuture::channel`].
///
/// If the sender is dropped, the reply is [`StoreErrorKind::Unavailable`].
#[must_use = "a sender that is dropped sends an error"]
pub struct ReplySender<T> {
    slot: Arc<Slot<T>>,
    store: &'static str,
    operation: &'static str,
}

/// A reply that is sent and received once.
struct Slot<T>(Mutex<SlotState<T>>);

enum SlotState<T> {
    /// Not sent, and not polled.
    Empty,
    /// A task waits for the reply.
    Polled(Waker),
    /// A caller waits for the reply, with the key and the number of the call.
    Caller(Arc<dyn ReceiveReply<T>>, LockKey, u64),
    Sent(Result<T, StoreError>),
    Received,
}

/// Receives the replies to calls, each with its key and its number. It is shared by all calls, so
/// that a call needs no callback of its own.
pub(crate) trait ReceiveReply<T>: Send + Sync {
    fn receive(self: Arc<Self>, key: &LockKey, number: u64, reply: Result<T, StoreError>);
}

impl<T> StoreFuture<T> {
    /// Creates a future whose reply is ready.
    pub fn ready(reply: Result<T, StoreError>) -> Self {
        Self(State::Ready(Some(reply)))
    }

    /// Creates a future that returns the reply of this one.
    pub fn new(future: impl Future<Output = Result<T, StoreError>> + Send + 'static) -> Self {
        Self(State::Pending(Box::pin(future)))
    }

    /// Creates a future whose reply the store sends later, for an operation of a store with this
    /// name.
    ///
    /// The caller of the store then needs no task and no timer for the call. In return, the store
    /// replies within its [`call_timeout`](super::LockStore::call_timeout) in any case: it sends
    /// [`StoreErrorKind::Timeout`], or drops the sender.
    pub fn channel(store: &'static str, operation: &'static str) -> (ReplySender<T>, Self) {
        let slot = Arc::new(Slot(Mutex::new(SlotState::Empty)));
        (ReplySender { slot: Arc::clone(&slot), store, operation }, Self(State::Sent(slot)))
    }

    /// The reply, if it is ready. It then needs no task and no runtime.
    pub(crate) fn into_ready(self) -> Result<Result<T, StoreError>, Self> {
        match self.0 {
            State::Ready(Some(reply)) => Ok(reply),
            state => Err(Self(state)),
        }
    }

    /// Has the store pass the reply to `caller` when it sends the reply. Returns this future if it
    /// must be polled.
    pub(crate) fn on_reply<C>(self, caller: &Arc<C>, key: &LockKey, number: u64) -> Result<(), Self>
    where
        C: ReceiveReply<T> + 'static,
    {
        let State::Sent(slot) = self.0 else { return Err(self) };
        let (caller, mut state) = (Arc::clone(caller), slot.0.lock());
        match std::mem::replace(&mut *state, SlotState::Received) {
            SlotState::Sent(reply) => {
                drop(state);
                caller.receive(key, number, reply);
            }
            _ => *state = SlotState::Caller(caller, key.clone(), number),
        }
        Ok(())
    }
}

impl<T: Unpin> Future for StoreFuture<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::Ready(reply) => Poll::Ready(reply.take().expect("polled after completion")),
            State::Pending(future) => future.as_mut().poll(cx),
            State::Sent(slot) => slot.poll_recv(cx),
        }
    }
}

impl<T> Slot<T> {
    fn send(&self, reply: Result<T, StoreError>) {
        let mut state = self.0.lock();
        match std::mem::replace(&mut *state, SlotState::Received) {
            SlotState::Caller(caller, key, number) => {
                // Not under the mutex: the caller calls the store again.
                drop(state);
                caller.receive(&key, number, reply);
            }
            waiting => {
                *state = SlotState::Sent(reply);
                drop(state);
                if let SlotState::Polled(waker) = waiting {
                    waker.wake();
                }
            }
        }
    }

    fn poll_recv(&self, cx: &Context<'_>) -> Poll<Result<T, StoreError>> {
        let mut state = self.0.lock();
        match std::mem::replace(&mut *state, SlotState::Received) {
            SlotState::Sent(reply) => Poll::Ready(reply),
            SlotState::Received => unreachable!("polled after completion"),
            _ => {
                *state = SlotState::Polled(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<T> ReplySender<T> {
    /// Sends the reply. The code that waits for it may run before this method returns, and may call
    /// the store: do not call this method under a mutex.
    pub fn send(self, reply: Result<T, StoreError>) {
        self.slot.send(reply);
    }
}

impl<T> Drop for ReplySender<T> {
    fn drop(&mut self) {
        let is_sent = matches!(*self.slot.0.lock(), SlotState::Sent(_) | SlotState::Received);
        if !is_sent {
            self.slot.send(Err(StoreError::new(self.store, self.operation, StoreErrorKind::Unavailable)));
        }
    }
}

impl<T> fmt::Debug for StoreFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            State::Ready(_) => "StoreFuture(ready)",
            State::Pending(_) | State::Sent(_) => "StoreFuture(pending)",
        })
    }
}

impl<T> fmt::Debug for ReplySender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplySender")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Caller(mpsc::Sender<(u64, Option<u32>)>);

    impl ReceiveReply<u32> for Caller {
        fn receive(self: Arc<Self>, _: &LockKey, number: u64, reply: Result<u32, StoreError>) {
            self.0.send((number, reply.ok())).expect("open");
        }
    }

    fn channel() -> (ReplySender<u32>, StoreFuture<u32>) {
        StoreFuture::channel("test", "acquire")
    }

    #[test]
    fn reply_is_received_once_before_and_after_it_is_sent() {
        for is_sent_first in [false, true] {
            let ((sender, future), (report, received)) = (channel(), mpsc::channel());
            let (caller, key) = (Arc::new(Caller(report)), LockKey::from(("k",)));
            if is_sent_first {
                sender.send(Ok(7));
                assert!(future.on_reply(&caller, &key, 3).is_ok());
            } else {
                assert!(future.on_reply(&caller, &key, 3).is_ok());
                sender.send(Ok(7));
            }
            drop(caller);
            assert_eq!(received.iter().collect::<Vec<_>>(), [(3, Some(7))]);
        }
    }

    #[tokio::test]
    async fn future_without_a_caller_is_woken_by_its_reply() {
        let (sender, future) = channel();
        let send = async {
            tokio::task::yield_now().await;
            sender.send(Ok(7));
        };
        let (reply, ()) = tokio::join!(future, send);
        assert_eq!(reply.ok(), Some(7));
    }

    #[tokio::test]
    async fn dropped_sender_is_an_unreachable_store() {
        let (sender, future) = channel();
        drop(sender);
        assert!(future.await.is_err_and(|error| error.kind() == StoreErrorKind::Unavailable));
    }
}
