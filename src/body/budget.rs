//! The memory budget of request bodies (I11), shared by all clones of a manager.
//! Written by hand instead of a semaphore: a body whose client pauses can be evicted, and the
//! waiters of one key may use only a part of the budget.

use std::{collections::BTreeMap, mem, sync::Arc, task::Waker};

use super::buffer::BodyBuffer;
use crate::{
    limits::{BODY_PROGRESS_BYTES, BUFFERED_SHARE_DIVISOR, MAX_BUFFERED_BYTES},
    lock_key::{KeyMap, LockKey},
    sync::Mutex,
};

/// The budget of one manager.
#[derive(Debug)]
pub(crate) struct BodyBudget(Mutex<Ledger<(BodyBuffer, Waker)>>);

/// The bytes that one body uses. Its drop frees them.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<BodyBudget>,
    bytes: u64,
    /// The sequence number of its last progress.
    progress: u64,
    /// Its rank while it is parked.
    rank: Option<EvictionRank>,
    /// The key that the request of a complete body waits for.
    key: Option<LockKey>,
}

/// The bytes do not fit into the budget, or into the part of their key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferFull;

/// The free bytes, and the parked bodies. Pure.
///
/// A body is parked while the rest of it is waited for, and can be evicted then. Of the parked
/// bodies, those above the average size are evicted first, so that a client that keeps many large
/// bodies in progress does not evict a small one that pauses. Of these, the first is the one whose
/// last progress is the longest ago. Progress counts in steps, so that single bytes are none. It
/// gives a body a new sequence number, so the order needs no clock.
///
/// Complete bodies of requests that wait are counted and not evicted. One key may use a part of the
/// budget for them, so that its waiters leave capacity for other keys.
#[derive(Debug)]
struct Ledger<T> {
    free: u64,
    /// The sequence number of the next progress.
    next_progress: u64,
    parked: BTreeMap<EvictionRank, (u64, T)>,
    /// The bytes of all parked bodies.
    parked_bytes: u64,
    /// The bytes of complete bodies whose requests wait, by key. Each body has at least one byte:
    /// there are no more keys than bodies.
    waiting_bytes: KeyMap<u64>,
}

/// The rank of a parked body: by size class, and within a class the oldest progress first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct EvictionRank {
    /// The binary logarithm of its bytes.
    size_class: u32,
    progress: u64,
}

impl<T> Ledger<T> {
    fn new(bytes: u64) -> Self {
        Self {
            free: bytes,
            next_progress: 0,
            parked: BTreeMap::new(),
            parked_bytes: 0,
            waiting_bytes: KeyMap::default(),
        }
    }

    /// The bytes that could be allocated if all parked bodies were evicted.
    fn available(&self) -> u64 {
        self.free.saturating_add(self.parked_bytes)
    }

    /// Allocates bytes. Returns the bodies that were evicted for them.
    fn allocate(&mut self, bytes: u64) -> Result<Vec<T>, BufferFull> {
        if bytes > self.available() {
            // No body is evicted without a result.
            return Err(BufferFull);
        }
        let mut evicted = Vec::new();
        while self.free < bytes {
            let (freed, body) = self.eviction_candidate().and_then(|rank| self.unpark(rank)).ok_or(BufferFull)?;
            self.free += freed;
            evicted.push(body);
        }
        self.free -= bytes;
        Ok(evicted)
    }

    /// The oldest progress of at least average size. The average is rounded down to a power of two:
    /// at least one body reaches it, and each size class is looked up once.
    fn eviction_candidate(&self) -> Option<EvictionRank> {
        let average = self.parked_bytes.checked_div(self.parked.len() as u64)?;
        let oldest = |size_class| {
            let from = EvictionRank { size_class, progress: 0 };
            self.parked.range(from..).next().map(|(&rank, _)| rank)
        };
        (size_class(average)..=size_class(self.parked_bytes)).filter_map(oldest).min_by_key(|rank| rank.progress)
    }

    fn progress(&mut self) -> u64 {
        self.next_progress += 1;
        self.next_progress
    }

    fn park(&mut self, bytes: u64, progress: u64, body: T) -> EvictionRank {
        let rank = EvictionRank { size_class: size_class(bytes), progress };
        self.parked_bytes += bytes;
        self.parked.insert(rank, (bytes, body));
        rank
    }

    /// Returns a parked body with its bytes, unless it was evicted.
    fn unpark(&mut self, rank: EvictionRank) -> Option<(u64, T)> {
        let (bytes, body) = self.parked.remove(&rank)?;
        self.parked_bytes -= bytes;
        Some((bytes, body))
    }

    /// Counts allocated bytes for a waiter of this key, unless the key has used its part.
    ///
    /// The part shrinks with the free bytes, as that of queue entries does. The first body of a key
    /// is always accepted: a body larger than the part could otherwise never wait.
    fn add_waiting(&mut self, key: &LockKey, bytes: u64) -> Result<(), BufferFull> {
        let part = self.available().saturating_add(bytes) / BUFFERED_SHARE_DIVISOR;
        match self.waiting_bytes.get_mut(key) {
            Some(of_key) if of_key.saturating_add(bytes) > part => return Err(BufferFull),
            Some(of_key) => *of_key += bytes,
            None => drop(self.waiting_bytes.insert(key.clone(), bytes)),
        }
        Ok(())
    }

    fn remove_waiting(&mut self, key: &LockKey, bytes: u64) {
        if let Some(of_key) = self.waiting_bytes.get_mut(key) {
            *of_key -= bytes;
            if *of_key == 0 {
                self.waiting_bytes.remove(key);
            }
        }
    }
}

/// Sizes between two powers of two form a class.
fn size_class(bytes: u64) -> u32 {
    bytes.checked_ilog2().unwrap_or(0)
}

impl BodyBudget {
    /// The bytes that could be allocated now.
    pub(crate) fn available(&self) -> u64 {
        self.0.lock().available()
    }

    /// An empty reservation.
    pub(crate) fn reserve(self: &Arc<Self>) -> Reservation {
        Reservation { budget: Arc::clone(self), bytes: 0, progress: 0, rank: None, key: None }
    }
}

impl Default for BodyBudget {
    fn default() -> Self {
        Self(Mutex::new(Ledger::new(MAX_BUFFERED_BYTES)))
    }
}

impl Reservation {
    /// Adds bytes, or fails and adds none.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), BufferFull> {
        if bytes == 0 {
            return Ok(());
        }
        let bytes = bytes as u64;
        let evicted = {
            let mut ledger = self.budget.0.lock();
            let evicted = ledger.allocate(bytes)?;
            let steps = |bytes: u64| bytes.div_ceil(BODY_PROGRESS_BYTES);
            if steps(self.bytes) < steps(self.bytes + bytes) {
                self.progress = ledger.progress();
            }
            evicted
        };
        self.bytes += bytes;
        for (buffer, waker) in evicted {
            drop(buffer);
            waker.wake();
        }
        Ok(())
    }

    /// Lends the buffer of an incomplete body to the budget while its client is waited for. An
    /// eviction wakes the reader.
    pub(super) fn park(&mut self, buffer: &mut BodyBuffer, waker: &Waker) {
        // Evicting an empty body frees nothing.
        if self.bytes > 0 {
            let parked = (mem::take(buffer), waker.clone());
            self.rank = Some(self.budget.0.lock().park(self.bytes, self.progress, parked));
        }
    }

    /// Takes the buffer back. Returns false if the body was evicted.
    pub(super) fn unpark(&mut self, buffer: &mut BodyBuffer) -> bool {
        let Some(rank) = self.rank.take() else { return true };
        let parked = self.budget.0.lock().unpark(rank);
        let Some((_, (bytes, _))) = parked else {
            // They belong to another body.
            self.bytes = 0;
            return false;
        };
        *buffer = bytes;
        true
    }

    /// Counts the complete body for this key, for which its request is about to wait.
    pub(crate) fn wait_for(&mut self, key: &LockKey) -> Result<(), BufferFull> {
        if self.bytes > 0 && self.key.is_none() {
            self.budget.0.lock().add_waiting(key, self.bytes)?;
            self.key = Some(key.clone());
        }
        Ok(())
    }

    pub(crate) fn budget(&self) -> &BodyBudget {
        &self.budget
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.unpark(&mut BodyBuffer::default());
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
    use std::{
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
        task::Wake,
    };

    use bytes::Bytes;

    use super::*;

    #[test]
    fn oldest_progress_is_evicted_first() {
        let mut ledger = Ledger::new(10);
        assert_eq!(ledger.allocate(7), Ok(vec![]));
        let one = ledger.park(3, 1, "one");
        ledger.park(4, 2, "two");
        // It makes progress, and is evicted last.
        assert_eq!(ledger.unpark(one), Some((3, "one")));
        assert_eq!(ledger.allocate(3), Ok(vec![]));
        let one = ledger.park(6, 3, "one");
        assert_eq!((ledger.free, ledger.available()), (0, 10));
        assert_eq!(ledger.allocate(2), Ok(vec!["two"]));
        assert_eq!((ledger.free, ledger.available()), (2, 8));
        assert_eq!(ledger.allocate(9), Err(BufferFull), "no body is evicted without a result");
        assert_eq!(ledger.allocate(8), Ok(vec!["one"]));
        assert_eq!(ledger.unpark(one), None);
        assert_eq!((ledger.free, ledger.parked_bytes, ledger.parked.len()), (0, 0, 0));
    }

    /// Each of them would free enough: only one is evicted.
    #[test]
    fn small_body_is_evicted_only_without_a_larger_one() {
        let mut ledger = Ledger::new(114);
        assert_eq!(ledger.allocate(114), Ok(vec![]));
        ledger.park(4, 1, "small");
        ledger.park(40, 2, "large");
        ledger.park(70, 3, "larger, and moves");
        assert_eq!(ledger.allocate(1), Ok(vec!["large"]), "of the larger ones it is the oldest");
        assert_eq!(ledger.allocate(40), Ok(vec!["larger, and moves"]), "the oldest is smaller");
        assert_eq!((ledger.free, ledger.available()), (69, 73));
        assert_eq!(ledger.allocate(70), Ok(vec!["small"]), "nothing else is left");
        assert_eq!((ledger.free, ledger.parked_bytes, ledger.allocate(4)), (3, 0, Err(BufferFull)));
    }

    #[test]
    fn waiting_bodies_of_one_key_share_a_part_of_the_budget() {
        let (hot, other) = (LockKey::from(("hot",)), LockKey::from(("other",)));
        let mut ledger: Ledger<()> = Ledger::new(800);
        let comes = |ledger: &mut Ledger<()>, key: &LockKey, bytes| {
            ledger.allocate(bytes).expect("fits");
            let waits = ledger.add_waiting(key, bytes).is_ok();
            if !waits {
                ledger.free += bytes;
            }
            waits
        };
        let waiting = (0..100).filter(|_| comes(&mut ledger, &hot, 10)).count();
        assert_eq!((waiting, ledger.available()), (9, 710), "with 8 there were 720 left, an eighth of it is 90");
        let waiting = (0..100).filter(|_| comes(&mut ledger, &other, 10)).count();
        assert_eq!((waiting, ledger.available()), (8, 630), "less is left");
        for _ in 0..9 {
            ledger.remove_waiting(&hot, 10);
            ledger.free += 10;
        }
        assert!(comes(&mut ledger, &hot, 700), "the first of a key waits, of any size");
        assert!(!comes(&mut ledger, &hot, 1));
        ledger.remove_waiting(&hot, 700);
        assert_eq!(ledger.waiting_bytes.len(), 1, "a key without waiters is removed");
    }

    #[derive(Default)]
    struct Counts(AtomicUsize);

    impl Wake for Counts {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    fn budget(bytes: u64) -> Arc<BodyBudget> {
        Arc::new(BodyBudget(Mutex::new(Ledger::new(bytes))))
    }

    fn buffer(bytes: &'static str) -> BodyBuffer {
        BodyBuffer::SingleFrame(Bytes::from_static(bytes.as_bytes()))
    }

    #[test]
    fn rejected_reservation_takes_nothing_and_drop_frees() {
        let budget = budget(10);
        let (mut one, mut other) = (budget.reserve(), budget.reserve());
        one.grow(6).expect("fits");
        assert_eq!(other.grow(5), Err(BufferFull), "one too many");
        assert_eq!(budget.available(), 4, "nothing was allocated");
        other.grow(4).expect("just fits");
        other.grow(0).expect("nothing always fits");
        assert_eq!(other.grow(1), Err(BufferFull));
        drop(one);
        assert_eq!(budget.available(), 6);
        other.grow(6).expect("fits again");
        drop(other);
        assert_eq!(budget.available(), 10);
    }

    #[test]
    fn only_parked_bodies_are_evicted_and_they_are_woken() {
        let budget = budget(10);
        let (wakes, one_waker) = (Arc::new(Counts::default()), Arc::new(Counts::default()));
        let [mut one, mut two, mut three] = [budget.reserve(), budget.reserve(), budget.reserve()];
        let (mut of_one, mut of_two) = (buffer("abcd"), buffer("012345"));
        one.grow(4).expect("fits");
        two.grow(6).expect("just fits");
        assert_eq!(three.grow(1), Err(BufferFull), "none of them is parked");
        one.park(&mut of_one, &one_waker.clone().into());
        two.park(&mut of_two, &wakes.clone().into());
        assert!(two.unpark(&mut of_two) && of_two.into_bytes() == "012345");
        three.grow(1).expect("one is parked");
        assert_eq!([&one_waker, &wakes].map(|wakes| wakes.0.load(SeqCst)), [1, 0]);
        assert!(!one.unpark(&mut of_one) && of_one.into_bytes().is_empty(), "it has nothing any more");
        assert_eq!((three.grow(4), budget.available()), (Err(BufferFull), 3));
        drop((one, two, three));
        assert_eq!(budget.available(), 10, "each byte was freed once");
    }

    /// Its client disconnected before it was woken.
    #[test]
    fn evicted_body_does_not_free_its_bytes_twice() {
        let budget = budget(10);
        let (mut one, mut other) = (budget.reserve(), budget.reserve());
        one.grow(10).expect("fits");
        one.park(&mut buffer("0123456789"), Waker::noop());
        other.grow(4).expect("it evicts");
        drop(one);
        assert_eq!(budget.available(), 6);
        drop(other);
        assert_eq!(budget.available(), 10);
    }

    #[test]
    fn parked_body_that_is_dropped_frees_its_bytes() {
        let budget = budget(10);
        let mut one = budget.reserve();
        one.grow(10).expect("fits");
        one.park(&mut buffer("0123456789"), Waker::noop());
        drop(one);
        assert_eq!((budget.available(), budget.0.lock().parked.len()), (10, 0));
    }

    #[test]
    fn single_bytes_are_no_progress() {
        let step = usize::try_from(BODY_PROGRESS_BYTES).expect("small");
        for (rest, is_progress) in [(vec![1; 100], false), (vec![step], true)] {
            let budget = budget((10 * step - 200 + rest.iter().sum::<usize>()) as u64);
            let [mut one, mut two, mut three] = [budget.reserve(), budget.reserve(), budget.reserve()];
            one.grow(5 * step - 100).expect("fits");
            two.grow(5 * step - 100).expect("fits");
            let mut of_one = buffer("one");
            for bytes in rest {
                one.park(&mut of_one, Waker::noop());
                assert!(one.unpark(&mut of_one));
                one.grow(bytes).expect("fits");
            }
            one.park(&mut of_one, Waker::noop());
            two.park(&mut buffer("two"), Waker::noop());
            three.grow(1).expect("one of them is evicted");
            assert_eq!(one.unpark(&mut of_one), is_progress);
        }
    }
}
