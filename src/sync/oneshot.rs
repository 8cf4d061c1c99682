//! Something that one side waits for and the other tells, once.

use std::{
    fmt,
    task::{Context, Poll, Waker},
};

use super::Mutex;

/// An answer that will be told, to one who waits for it.
pub(crate) struct Told<T>(Mutex<Slot<T>>);

enum Slot<T> {
    /// Not told yet; whoever waits is woken.
    Open(Option<Waker>),
    Told(T),
    /// Nobody waits any more, or it has been taken.
    Closed,
}

impl<T> Default for Told<T> {
    fn default() -> Self {
        Self(Mutex::new(Slot::Open(None)))
    }
}

impl<T> Told<T> {
    /// Tells it. Nobody waits any more: it is handed back.
    pub(crate) fn tell(&self, what: T) -> Result<(), T> {
        let mut slot = self.0.lock();
        if matches!(*slot, Slot::Closed) {
            return Err(what);
        }
        let before = std::mem::replace(&mut *slot, Slot::Told(what));
        drop(slot);
        // Not under the mutex: a waker is code of others.
        if let Slot::Open(Some(waker)) = before {
            waker.wake();
        }
        Ok(())
    }

    /// Wakes who waits, and tells nothing.
    pub(crate) fn nudge(&self) {
        let waker = match &mut *self.0.lock() {
            Slot::Open(waker) => waker.take(),
            Slot::Told(_) | Slot::Closed => None,
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<T> {
        let mut slot = self.0.lock();
        match std::mem::replace(&mut *slot, Slot::Closed) {
            Slot::Told(what) => Poll::Ready(what),
            Slot::Open(waker) => {
                let waker = waker.filter(|waker| waker.will_wake(cx.waker())).unwrap_or_else(|| cx.waker().clone());
                *slot = Slot::Open(Some(waker));
                Poll::Pending
            }
            Slot::Closed => unreachable!("polled after it was told"),
        }
    }

    /// Puts another answer in the place of one that has not been heard. The one that was there;
    /// `None`: it was heard, or is not expected any more.
    pub(crate) fn recall(&self, instead: T) -> Option<T> {
        match &mut *self.0.lock() {
            Slot::Told(what) => Some(std::mem::replace(what, instead)),
            Slot::Open(_) | Slot::Closed => None,
        }
    }

    /// Nobody waits any more. What was told and not heard is handed back.
    pub(crate) fn close(&self) -> Option<T> {
        let slot = std::mem::replace(&mut *self.0.lock(), Slot::Closed);
        match slot {
            Slot::Told(what) => Some(what),
            Slot::Open(_) | Slot::Closed => None,
        }
    }
}

impl<T> fmt::Debug for Told<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Told")
    }
}
