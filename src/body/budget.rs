//! The memory budget of request bodies (I11), shared by all clones of a manager.
//! Written by hand instead of a semaphore: a body may use only a part of the bytes that the others
//! leave, and so may the waiters of one key.

use std::sync::Arc;

use crate::{
    limits::{BODY_SHARE_DIVISOR, BUFFERED_SHARE_DIVISOR, MAX_BUFFERED_BYTES},
    lock_key::{KeyMap, LockKey},
    sync::Mutex,
};

/// The budget of one manager.
#[derive(Debug)]
pub(crate) struct BodyBudget(Mutex<Ledger>);

/// The bytes that one body uses. Its drop frees them.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<BodyBudget>,
    bytes: u64,
    /// The key that the request of a complete body waits for.
    key: Option<LockKey>,
}

/// The bytes do not fit into the budget, or into the part of their body or of their key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferFull;

/// The free bytes, and those of bodies whose requests wait. Pure.
#[derive(Debug)]
struct Ledger {
    total: u64,
    free: u64,
    /// The bytes of complete bodies whose requests wait, by key. Each body has at least one byte:
    /// there are no more keys than bodies.
    waiting: KeyMap<u64>,
}

impl Ledger {
    fn new(total: u64) -> Self {
        Self { total, free: total, waiting: KeyMap::default() }
    }

    /// Whether a body that uses `own` bytes may have `more`.
    ///
    /// Large bodies whose clients are slow leave bytes for small ones. A body that is alone may use
    /// the whole budget: a body larger than the part could otherwise never be read.
    fn may_grow(&self, own: u64, more: u64) -> bool {
        let others_leave = self.free + own;
        let part = if others_leave == self.total { self.total } else { others_leave / BODY_SHARE_DIVISOR };
        own.saturating_add(more) <= part
    }

    /// Counts allocated bytes for a waiter of this key, unless the key has used its part.
    ///
    /// The part shrinks with the free bytes, as that of queue entries does. The first body of a key
    /// is always accepted: a body larger than the part could otherwise never wait.
    fn add_waiting(&mut self, key: &LockKey, bytes: u64) -> Result<(), BufferFull> {
        let part = (self.free + bytes) / BUFFERED_SHARE_DIVISOR;
        match self.waiting.get_mut(key) {
            Some(of_key) if of_key.saturating_add(bytes) > part => return Err(BufferFull),
            Some(of_key) => *of_key += bytes,
            None => drop(self.waiting.insert(key.clone(), bytes)),
        }
        Ok(())
    }

    fn remove_waiting(&mut self, key: &LockKey, bytes: u64) {
        if let Some(of_key) = self.waiting.get_mut(key) {
            *of_key -= bytes;
            if *of_key == 0 {
                self.waiting.remove(key);
            }
        }
    }
}

impl BodyBudget {
    /// An empty reservation.
    pub(crate) fn reserve(self: &Arc<Self>) -> Reservation {
        Reservation { budget: Arc::clone(self), bytes: 0, key: None }
    }
}

impl Default for BodyBudget {
    fn default() -> Self {
        Self(Mutex::new(Ledger::new(MAX_BUFFERED_BYTES)))
    }
}

impl Reservation {
    /// Whether the budget has these further bytes now.
    pub(super) fn may_grow(&self, more: u64) -> bool {
        self.budget.0.lock().may_grow(self.bytes, more)
    }

    /// Adds bytes, or fails and adds none.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), BufferFull> {
        let bytes = bytes as u64;
        let mut ledger = self.budget.0.lock();
        if bytes > 0 && !ledger.may_grow(self.bytes, bytes) {
            return Err(BufferFull);
        }
        ledger.free -= bytes;
        self.bytes += bytes;
        Ok(())
    }

    /// Counts the complete body for this key, for which its request is about to wait.
    pub(crate) fn wait_for(&mut self, key: &LockKey) -> Result<(), BufferFull> {
        if self.bytes > 0 && self.key.is_none() {
            self.budget.0.lock().add_waiting(key, self.bytes)?;
            self.key = Some(key.clone());
        }
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let mut ledger = self.budget.0.lock();
            if let Some(key) = &self.key {
                ledger.remove_waiting(key, self.bytes);
            }
            ledger.free += self.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guarantee: G15.
    #[test]
    fn body_may_have_half_of_what_others_leave() {
        let budget = Arc::new(BodyBudget(Mutex::new(Ledger::new(100))));
        let free = || budget.0.lock().free;
        let mut alone = budget.reserve();
        assert_eq!((alone.grow(101), alone.grow(100), free()), (Err(BufferFull), Ok(()), 0), "it is the only one");
        drop(alone);
        let (mut large, mut next, mut small) = (budget.reserve(), budget.reserve(), budget.reserve());
        assert_eq!((large.grow(60), next.grow(21), next.grow(20), free()), (Ok(()), Err(BufferFull), Ok(()), 20));
        assert_eq!((large.grow(1), next.grow(1)), (Err(BufferFull), Err(BufferFull)), "both have their part");
        assert_eq!((small.grow(0), small.grow(6), small.may_grow(5), free()), (Ok(()), Ok(()), false, 14));
        drop(large);
        assert_eq!((next.may_grow(27), next.may_grow(28), small.grow(34)), (true, false, Ok(())));
        drop((next, small));
        assert_eq!(free(), 100);
    }

    #[test]
    fn waiting_bodies_of_one_key_share_a_part_of_the_budget() {
        let (hot, other) = (LockKey::from(("hot",)), LockKey::from(("other",)));
        let budget = Arc::new(BodyBudget(Mutex::new(Ledger::new(800))));
        let free = || budget.0.lock().free;
        let waits = |key: &LockKey, bytes| {
            let mut body = budget.reserve();
            body.grow(bytes).expect("fits");
            body.wait_for(key).is_ok().then_some(body)
        };
        let flood: Vec<_> = (0..100).filter_map(|_| waits(&hot, 10)).collect();
        assert_eq!((flood.len(), free()), (9, 710), "with 8 there were 720 left, an eighth of it is 90");
        let others = (0..100).filter_map(|_| waits(&other, 10)).collect::<Vec<_>>();
        assert_eq!((others.len(), free()), (8, 630), "less is left");
        drop(flood);
        let first = waits(&hot, 350);
        assert!(first.is_some(), "the first of a key waits, of any size");
        assert!(waits(&hot, 1).is_none());
        drop(first);
        assert_eq!(budget.0.lock().waiting.len(), 1, "a key without waiters is removed");
    }
}
