//! Something that one side waits for and the other tells, once.

use std::{
    fmt,
    task::{Context, Poll, Waker},
};

use super::Mutex;

/// An answer that will be told, to one who waits for it.
pub(crate) struct Oneshot<T>(Mutex<State<T>>);

enum State<T> {
    /// Not told yet; whoever waits is woken.
    Open(Option<Waker>),
    Sent(T),
    /// Nobody waits any more, or it has been taken.
    Closed,
}

impl<T> Default for Oneshot<T> {
    fn default() -> Self {
        Self(Mutex::new(State::Open(None)))
    }
}

impl<T> Oneshot<T> {
    /// Tells it. Nobody waits any more: it is handed back.
    pub(crate) fn send(&self, what: T) -> Result<(), T> {
        let mut slot = self.0.lock();
        if matches!(*slot, State::Closed) {
            return Err(what);
        }
        let before = std::mem::replace(&mut *slot, State::Sent(what));
        drop(slot);
        // Not under the mutex: a waker is code of others.
        if let State::Open(Some(waker)) = before {
            waker.wake();
        }
        Ok(())
    }

    /// Wakes who waits, and tells nothing.
    pub(crate) fn wake(&self) {
        let waker = match &mut *self.0.lock() {
            State::Open(waker) => waker.take(),
            State::Sent(_) | State::Closed => None,
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn poll_recv(&self, cx: &Context<'_>) -> Poll<T> {
        let mut slot = self.0.lock();
        match std::mem::replace(&mut *slot, State::Closed) {
            State::Sent(what) => Poll::Ready(what),
            State::Open(waker) => {
                let waker = waker.filter(|waker| waker.will_wake(cx.waker())).unwrap_or_else(|| cx.waker().clone());
                *slot = State::Open(Some(waker));
                Poll::Pending
            }
            State::Closed => unreachable!("polled after it was told"),
        }
    }

    /// Puts another answer in the place of one that has not been heard. The one that was there;
    /// `None`: it was heard, or is not expected any more.
    pub(crate) fn replace(&self, instead: T) -> Option<T> {
        match &mut *self.0.lock() {
            State::Sent(what) => Some(std::mem::replace(what, instead)),
            State::Open(_) | State::Closed => None,
        }
    }

    /// Nobody waits any more. What was told and not heard is handed back.
    pub(crate) fn close(&self) -> Option<T> {
        let slot = std::mem::replace(&mut *self.0.lock(), State::Closed);
        match slot {
            State::Sent(what) => Some(what),
            State::Open(_) | State::Closed => None,
        }
    }
}

impl<T> fmt::Debug for Oneshot<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Told")
    }
}
