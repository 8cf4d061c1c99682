//! A channel for one value.
//!
//! It differs from `tokio::sync::oneshot`: the receiver can be woken without a value, a value that
//! was not received can be replaced, the state is part of the value that contains it, and tests can
//! run it under a scheduler.

use std::{
    fmt,
    task::{Context, Poll, Waker},
};

use super::Mutex;

/// One value, sent once and received once.
pub(crate) struct Oneshot<T>(Mutex<State<T>>);

enum State<T> {
    /// No value yet. The waker of the receiver, if it has been polled.
    Open(Option<Waker>),
    Sent(T),
    /// The value has been received, or the receiver has closed.
    Closed,
}

impl<T> Default for Oneshot<T> {
    fn default() -> Self {
        Self(Mutex::new(State::Open(None)))
    }
}

impl<T> Oneshot<T> {
    /// Sends the value and wakes the receiver. Returns the value as an error if the receiver has
    /// closed.
    pub(crate) fn send(&self, value: T) -> Result<(), T> {
        let mut state = self.0.lock();
        if matches!(*state, State::Closed) {
            return Err(value);
        }
        let previous = std::mem::replace(&mut *state, State::Sent(value));
        drop(state);
        // After the mutex is unlocked: a waker is code of users.
        if let State::Open(Some(waker)) = previous {
            waker.wake();
        }
        Ok(())
    }

    /// Wakes the receiver without a value.
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
        let mut state = self.0.lock();
        match std::mem::replace(&mut *state, State::Closed) {
            State::Sent(value) => Poll::Ready(value),
            State::Open(waker) => {
                let waker = waker.filter(|waker| waker.will_wake(cx.waker())).unwrap_or_else(|| cx.waker().clone());
                *state = State::Open(Some(waker));
                Poll::Pending
            }
            State::Closed => unreachable!("polled after completion"),
        }
    }

    /// Replaces a value that has not been received, and returns it. Returns `None` if there is
    /// none.
    pub(crate) fn replace(&self, value: T) -> Option<T> {
        match &mut *self.0.lock() {
            State::Sent(sent) => Some(std::mem::replace(sent, value)),
            State::Open(_) | State::Closed => None,
        }
    }

    /// Closes the receiver. Returns a value that was sent and not received.
    pub(crate) fn close(&self) -> Option<T> {
        let state = std::mem::replace(&mut *self.0.lock(), State::Closed);
        match state {
            State::Sent(value) => Some(value),
            State::Open(_) | State::Closed => None,
        }
    }
}

impl<T> fmt::Debug for Oneshot<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Oneshot")
    }
}
