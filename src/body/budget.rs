//! The memory budget of request bodies (I11), shared by all clones of a manager.
//! Hand-written in rank of a semaphore: a body that is still being read can be evicted, and the
//! waiters of one key may use only a part of the budget.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Weak},
};

use crate::{
    limits::{BUFFERED_SHARE_DIVISOR, MAX_BUFFERED_BYTES},
    lock_key::{KeyMap, LockKey},
    sync::Mutex,
};

/// The budget of one manager.
#[derive(Debug)]
pub(crate) struct BodyBudget(Mutex<Ledger<Weak<dyn EvictableBody>>>);

/// The bytes that one body uses. Its drop frees them.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<BodyBudget>,
    bytes: u64,
    /// A body that is being read and can be evicted.
    reader: Option<Arc<dyn EvictableBody>>,
    /// Its rank among the readers.
    rank: Option<EvictionRank>,
    /// The key that the request of a complete body waits for.
    key: Option<LockKey>,
}

/// A body that is being read.
pub(crate) trait EvictableBody: fmt::Debug + Send + Sync {
    /// Drops the bytes that were read and wakes the reader. Not called under the mutex of the
    /// budget.
    fn evict(&self);
}

/// Why a body cannot grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReservationError {
    /// Complete bodies use the whole budget.
    Exhausted,
    /// Another body needed the bytes, and this one was the longest idle of the larger ones.
    Evicted,
}

/// The free bytes, and the readers that can be evicted. Pure.
///
/// Complete bodies of requests that wait are counted and not evicted. One key may use a part of the
/// budget for them, so that its waiters leave capacity for other keys.
///
/// Of the readers, those above the average size are evicted first, and of these the longest idle
/// one: a client that keeps many large bodies in progress does not evict a small one that pauses. A
/// reader that makes progress gets a new sequence number, so the order needs no clock.
#[derive(Debug)]
struct Ledger<T> {
    free: u64,
    /// The bytes of all readers.
    reader_bytes: u64,
    /// The sequence number of the next reader.
    next_sequence: u64,
    readers: BTreeMap<EvictionRank, (u64, T)>,
    /// The bytes of complete bodies whose requests wait, by key. Each body has at least one byte:
    /// there are no more keys than bodies.
    waiting_bytes: KeyMap<u64>,
}

/// The rank of a reader: by size class, and within a class the longest idle one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct EvictionRank {
    /// The binary logarithm of its bytes.
    size_class: u32,
    sequence: u64,
}

impl<T> Ledger<T> {
    fn new(bytes: u64) -> Self {
        Self {
            free: bytes,
            reader_bytes: 0,
            next_sequence: 0,
            readers: BTreeMap::new(),
            waiting_bytes: KeyMap::default(),
        }
    }

    /// The bytes that could be allocated if all readers were evicted.
    fn available(&self) -> u64 {
        self.free.saturating_add(self.reader_bytes)
    }

    /// Allocates bytes. Returns the readers that were evicted for them, or `None` if that is not
    /// enough.
    fn allocate(&mut self, bytes: u64) -> Option<Vec<T>> {
        if bytes > self.available() {
            // No reader is evicted without a result.
            return None;
        }
        let mut evicted = Vec::new();
        while self.free < bytes {
            let (freed, reader) = self.readers.remove(&self.eviction_candidate()?)?;
            self.reader_bytes -= freed;
            self.free += freed;
            evicted.push(reader);
        }
        self.free -= bytes;
        Some(evicted)
    }

    /// The longest idle reader of at least average size. The average is rounded down to a power of
    /// two: at least one reader reaches it, and each size class is looked up once.
    fn eviction_candidate(&self) -> Option<EvictionRank> {
        let average = self.reader_bytes.checked_div(self.readers.len() as u64)?;
        let idlest = |size| {
            let of_size =
                EvictionRank { size_class: size, sequence: 0 }..=EvictionRank { size_class: size, sequence: u64::MAX };
            self.readers.range(of_size).next().map(|(&rank, _)| rank)
        };
        (size_class(average)..=size_class(self.reader_bytes)).filter_map(idlest).min_by_key(|rank| rank.sequence)
    }

    fn release(&mut self, bytes: u64) {
        self.free += bytes;
    }

    /// Adds a reader with its bytes as the most recent one.
    fn add_reader(&mut self, bytes: u64, reader: T) -> EvictionRank {
        let rank = EvictionRank { size_class: size_class(bytes), sequence: self.next_sequence };
        self.next_sequence += 1;
        self.reader_bytes += bytes;
        self.readers.insert(rank, (bytes, reader));
        rank
    }

    /// Removes a reader, which keeps its bytes. `None`: it was evicted, and has no bytes.
    fn remove_reader(&mut self, rank: EvictionRank) -> Option<T> {
        let (bytes, reader) = self.readers.remove(&rank)?;
        self.reader_bytes -= bytes;
        Some(reader)
    }

    /// Counts allocated bytes for a waiter of this key. Returns false if the key has used its part.
    ///
    /// The part shrinks with the free bytes, as that of queue entries does. The first body of a key
    /// is always accepted: a body larger than the part could otherwise never wait.
    fn add_waiting(&mut self, key: &LockKey, bytes: u64) -> bool {
        let part = self.available().saturating_add(bytes) / BUFFERED_SHARE_DIVISOR;
        match self.waiting_bytes.get_mut(key) {
            Some(of_key) if of_key.saturating_add(bytes) > part => false,
            Some(of_key) => {
                *of_key += bytes;
                true
            }
            None => {
                self.waiting_bytes.insert(key.clone(), bytes);
                true
            }
        }
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
        Reservation { budget: Arc::clone(self), bytes: 0, reader: None, rank: None, key: None }
    }
}

impl Default for BodyBudget {
    fn default() -> Self {
        Self(Mutex::new(Ledger::new(MAX_BUFFERED_BYTES)))
    }
}

impl Reservation {
    /// Allows the eviction of this body.
    pub(crate) fn set_reader(&mut self, reader: impl FnOnce() -> Arc<dyn EvictableBody>) {
        if self.reader.is_none() {
            let reader = reader();
            // Evicting an empty body frees nothing.
            if self.bytes > 0 {
                self.rank = Some(self.budget.0.lock().add_reader(self.bytes, Arc::downgrade(&reader)));
            }
            self.reader = Some(reader);
        }
    }

    /// Adds bytes, or fails and adds none.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), ReservationError> {
        if bytes == 0 {
            return Ok(());
        }
        let bytes = bytes as u64;
        let evicted = {
            let mut ledger = self.budget.0.lock();
            // It does not evict itself.
            if let Some(rank) = self.rank.take()
                && ledger.remove_reader(rank).is_none()
            {
                self.bytes = 0;
                return Err(ReservationError::Evicted);
            }
            let Some(evicted) = ledger.allocate(bytes) else { return Err(ReservationError::Exhausted) };
            self.bytes += bytes;
            if let Some(reader) = &self.reader {
                self.rank = Some(ledger.add_reader(self.bytes, Arc::downgrade(reader)));
            }
            evicted
        };
        for reader in evicted.iter().filter_map(Weak::upgrade) {
            reader.evict();
        }
        Ok(())
    }

    /// Counts the complete body for this key, for which its request is about to wait.
    pub(crate) fn wait_for(&mut self, key: &LockKey) -> Result<(), ReservationError> {
        if self.bytes == 0 || self.key.is_some() {
            return Ok(());
        }
        if !self.budget.0.lock().add_waiting(key, self.bytes) {
            return Err(ReservationError::Exhausted);
        }
        self.key = Some(key.clone());
        Ok(())
    }

    pub(crate) fn budget(&self) -> &BodyBudget {
        &self.budget
    }

    /// Ends the reading: the body cannot be evicted any more.
    pub(crate) fn complete(&mut self) -> Result<(), ReservationError> {
        self.reader = None;
        match self.rank.take() {
            Some(rank) if self.budget.0.lock().remove_reader(rank).is_none() => {
                self.bytes = 0;
                Err(ReservationError::Evicted)
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // On an error the bytes belong to another body.
        if self.complete().is_ok() && self.bytes > 0 {
            let mut ledger = self.budget.0.lock();
            if let Some(key) = &self.key {
                ledger.remove_waiting(key, self.bytes);
            }
            ledger.release(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    #[test]
    fn longest_idle_reader_is_evicted_first() {
        let mut ledger = Ledger::new(10);
        assert_eq!(ledger.allocate(3), Some(vec![]));
        let one = ledger.add_reader(3, "one");
        assert_eq!(ledger.allocate(4), Some(vec![]));
        ledger.add_reader(4, "two");
        // It makes progress, and is evicted last.
        assert_eq!(ledger.remove_reader(one), Some("one"));
        assert_eq!(ledger.allocate(3), Some(vec![]));
        let one = ledger.add_reader(6, "one");
        assert_eq!((ledger.free, ledger.available()), (0, 10));
        assert_eq!(ledger.allocate(2), Some(vec!["two"]));
        assert_eq!((ledger.free, ledger.available()), (2, 8));
        assert_eq!(ledger.allocate(9), None, "no reader is evicted without a result");
        assert_eq!(ledger.allocate(8), Some(vec!["one"]));
        assert_eq!(ledger.remove_reader(one), None);
        ledger.release(10);
        assert_eq!((ledger.free, ledger.reader_bytes, ledger.readers.len()), (10, 0, 0));
    }

    /// Each of them would free enough: only one is evicted.
    #[test]
    fn small_reader_is_evicted_only_without_a_larger_one() {
        let mut ledger = Ledger::new(114);
        assert_eq!(ledger.allocate(114), Some(vec![]));
        ledger.add_reader(4, "small");
        ledger.add_reader(40, "large");
        ledger.add_reader(70, "larger, and moves");
        assert_eq!(ledger.allocate(1), Some(vec!["large"]), "of the larger ones it is the idlest");
        assert_eq!(ledger.allocate(40), Some(vec!["larger, and moves"]), "the idlest is smaller");
        assert_eq!((ledger.free, ledger.available()), (69, 73));
        assert_eq!(ledger.allocate(70), Some(vec!["small"]), "nothing else is left");
        assert_eq!((ledger.free, ledger.reader_bytes, ledger.allocate(4)), (3, 0, None));
    }

    #[test]
    fn among_equal_readers_the_longest_idle_is_evicted() {
        let mut ledger = Ledger::new(1000);
        assert_eq!(ledger.allocate(1000), Some(vec![]));
        let readers: Vec<_> = (0..100).map(|n| ledger.add_reader(10, n)).collect();
        assert_eq!(ledger.remove_reader(readers[0]), Some(0));
        ledger.add_reader(10, 0);
        assert_eq!(ledger.allocate(25), Some(vec![1, 2, 3]));
    }

    #[test]
    fn waiting_bodies_of_one_key_share_a_part_of_the_budget() {
        let (hot, other) = (LockKey::from(("hot",)), LockKey::from(("other",)));
        let mut ledger: Ledger<()> = Ledger::new(800);
        let comes = |ledger: &mut Ledger<()>, key: &LockKey, bytes| {
            ledger.allocate(bytes).expect("fits");
            let waits = ledger.add_waiting(key, bytes);
            if !waits {
                ledger.release(bytes);
            }
            waits
        };
        let waiting = (0..100).filter(|_| comes(&mut ledger, &hot, 10)).count();
        assert_eq!((waiting, ledger.available()), (9, 710), "with 8 there were 720 left, an eighth of it is 90");
        let waiting = (0..100).filter(|_| comes(&mut ledger, &other, 10)).count();
        assert_eq!((waiting, ledger.available()), (8, 630), "less is left");
        for _ in 0..9 {
            ledger.remove_waiting(&hot, 10);
            ledger.release(10);
        }
        assert!(comes(&mut ledger, &hot, 700), "the first of a key waits, of any size");
        assert!(!comes(&mut ledger, &hot, 1));
        ledger.remove_waiting(&hot, 700);
        assert_eq!(ledger.waiting_bytes.len(), 1, "a key without waiters is removed");
    }

    #[derive(Debug, Default)]
    struct Counts(AtomicUsize);

    impl EvictableBody for Counts {
        fn evict(&self) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    fn budget(bytes: u64) -> Arc<BodyBudget> {
        Arc::new(BodyBudget(Mutex::new(Ledger::new(bytes))))
    }

    #[test]
    fn rejected_reservation_takes_nothing_and_drop_frees() {
        let budget = budget(10);
        let (mut one, mut other) = (budget.reserve(), budget.reserve());
        one.grow(6).expect("fits");
        assert_eq!(other.grow(5), Err(ReservationError::Exhausted), "one too many");
        assert_eq!(budget.available(), 4, "nothing was allocated");
        other.grow(4).expect("just fits");
        other.grow(0).expect("nothing always fits");
        assert_eq!(other.grow(1), Err(ReservationError::Exhausted));
        drop(one);
        assert_eq!(budget.available(), 6);
        other.grow(6).expect("fits again");
        drop(other);
        assert_eq!(budget.available(), 10);
    }

    #[test]
    fn readers_are_evicted_and_complete_bodies_are_not() {
        let budget = budget(10);
        let (idle, busy) = (Arc::new(Counts::default()), Arc::new(Counts::default()));
        let aborts = || [&idle, &busy].map(|counts| counts.0.load(SeqCst));
        let [mut one, mut two, mut three] = [budget.reserve(), budget.reserve(), budget.reserve()];
        one.set_reader(|| idle.clone());
        two.set_reader(|| busy.clone());
        two.grow(1).expect("fits");
        one.grow(4).expect("fits");
        two.grow(5).expect("just fits");
        three.grow(1).expect("there is one that is idle");
        assert_eq!(aborts(), [1, 0]);
        assert_eq!((one.grow(1), one.complete()), (Err(ReservationError::Evicted), Ok(())), "it has nothing any more");
        two.complete().expect("not aborted");
        assert_eq!((three.grow(4), budget.available()), (Err(ReservationError::Exhausted), 3));
        drop((one, two, three));
        assert_eq!((budget.available(), aborts()), (10, [1, 0]), "each byte was freed once");
    }

    /// Its client disconnected before it was woken.
    #[test]
    fn evicted_reader_does_not_free_its_bytes_twice() {
        let budget = budget(10);
        let counts = Arc::new(Counts::default());
        let (mut one, mut other) = (budget.reserve(), budget.reserve());
        one.set_reader(|| counts.clone());
        one.grow(10).expect("fits");
        other.grow(4).expect("it evicts");
        drop(one);
        assert_eq!((budget.available(), counts.0.load(SeqCst)), (6, 1));
        drop(other);
        assert_eq!(budget.available(), 10);
    }

    #[test]
    fn reader_is_not_evicted_for_itself() {
        let budget = budget(10);
        let counts = Arc::new(Counts::default());
        let mut one = budget.reserve();
        one.grow(6).expect("fits");
        one.set_reader(|| counts.clone());
        assert_eq!((one.grow(5), counts.0.load(SeqCst)), (Err(ReservationError::Exhausted), 0));
        drop(one);
        assert_eq!(budget.available(), 10);
    }
}
