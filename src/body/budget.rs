//! What is kept in memory of request bodies has a bound (I11): one for all clones of a handle.

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

/// For the bodies of all requests of one handle.
#[derive(Debug)]
pub(crate) struct Room(Mutex<Ledger<Weak<dyn Abort>>>);

/// What one body takes up. Dropped, there is room again.
#[derive(Debug)]
pub(crate) struct Share {
    room: Arc<Room>,
    bytes: u64,
    /// Of a body that is still being read, and can be aborted.
    reader: Option<Arc<dyn Abort>>,
    /// Among the readers.
    place: Option<Place>,
    /// Of a complete body: the key that its request waits for.
    key: Option<LockKey>,
}

/// A body that is still being read.
pub(crate) trait Abort: fmt::Debug + Send + Sync {
    /// Drops what was read, at once, and tells the reader. Not under the mutex of the room.
    fn abort(&self);
}

/// Why a body does not grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// Bodies that are complete take up all of it.
    Full,
    /// Another body needed the bytes, and of the larger ones it had been idle for longest.
    Aborted,
}

/// How much is left, and which readers could make room. Pure.
///
/// Complete bodies of requests that wait for their lock count, and are not aborted. One key has a
/// part of the room for those, so that the waiters of one key leave room for other keys.
///
/// Of the readers, those larger than their share go first, the idlest of them first: a client that
/// keeps many large bodies moving does not make a small one go that pauses. A reader that makes
/// progress goes to the back, so the order needs no clock.
#[derive(Debug)]
struct Ledger<T> {
    left: u64,
    /// Bytes of all readers together.
    reading: u64,
    /// The next number at the back.
    next: u64,
    readers: BTreeMap<Place, (u64, T)>,
    /// Complete bodies of requests that wait, by key. Each has a byte: no more keys than bodies.
    waiting: KeyMap<u64>,
}

/// Of a reader: by size, and among those of about one size the idlest comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// The power of two of its bytes.
    size: u32,
    number: u64,
}

impl<T> Ledger<T> {
    fn new(bytes: u64) -> Self {
        Self { left: bytes, reading: 0, next: 0, readers: BTreeMap::new(), waiting: KeyMap::default() }
    }

    /// So much could be taken, if all readers had to go.
    fn at_most(&self) -> u64 {
        self.left.saturating_add(self.reading)
    }

    /// Takes so many bytes. Those who are handed back have to go for it: their bytes are taken from them.
    fn take(&mut self, bytes: u64) -> Option<Vec<T>> {
        if bytes > self.at_most() {
            // Nobody has to go for nothing.
            return None;
        }
        let mut gone = Vec::new();
        while self.left < bytes {
            let (freed, reader) = self.readers.remove(&self.first_to_go()?)?;
            self.reading -= freed;
            self.left += freed;
            gone.push(reader);
        }
        self.left -= bytes;
        Some(gone)
    }

    /// The idlest of those that have their share or more. The share is what a reader has on
    /// average, rounded down to a power of two: there is always one that has it, and each size is
    /// looked at once.
    fn first_to_go(&self) -> Option<Place> {
        let share = self.reading.checked_div(self.readers.len() as u64)?;
        let idlest = |size| {
            let of_size = Place { size, number: 0 }..=Place { size, number: u64::MAX };
            self.readers.range(of_size).next().map(|(&place, _)| place)
        };
        (size(share)..=size(self.reading)).filter_map(idlest).min_by_key(|place| place.number)
    }

    fn give_back(&mut self, bytes: u64) {
        self.left += bytes;
    }

    /// One that is being read, and has taken so many bytes. Its place, at the back.
    fn enter(&mut self, bytes: u64, reader: T) -> Place {
        let place = Place { size: size(bytes), number: self.next };
        self.next += 1;
        self.reading += bytes;
        self.readers.insert(place, (bytes, reader));
        place
    }

    /// No reader any more; its bytes are its own. `None`: it had to go, and has none.
    fn leave(&mut self, place: Place) -> Option<T> {
        let (bytes, reader) = self.readers.remove(&place)?;
        self.reading -= bytes;
        Some(reader)
    }

    /// So many bytes that were taken are of a waiter of this key. False: the key has its part.
    ///
    /// The part shrinks with what is left, as that of the places in the queue does. The first body
    /// of a key is never refused for it: one that is larger than the part could never wait.
    fn waits_for(&mut self, key: &LockKey, bytes: u64) -> bool {
        let part = self.at_most().saturating_add(bytes) / BUFFERED_SHARE_DIVISOR;
        match self.waiting.get_mut(key) {
            Some(of_key) if of_key.saturating_add(bytes) > part => false,
            Some(of_key) => {
                *of_key += bytes;
                true
            }
            None => {
                self.waiting.insert(key.clone(), bytes);
                true
            }
        }
    }

    fn waits_no_longer(&mut self, key: &LockKey, bytes: u64) {
        if let Some(of_key) = self.waiting.get_mut(key) {
            *of_key -= bytes;
            if *of_key == 0 {
                self.waiting.remove(key);
            }
        }
    }
}

/// Of about one size are those between two powers of two.
fn size(bytes: u64) -> u32 {
    bytes.checked_ilog2().unwrap_or(0)
}

impl Room {
    /// So much could be taken now.
    pub(crate) fn at_most(&self) -> u64 {
        self.0.lock().at_most()
    }

    /// A share of nothing yet.
    pub(crate) fn share(self: &Arc<Self>) -> Share {
        Share { room: Arc::clone(self), bytes: 0, reader: None, place: None, key: None }
    }
}

impl Default for Room {
    fn default() -> Self {
        Self(Mutex::new(Ledger::new(MAX_BUFFERED_BYTES)))
    }
}

impl Share {
    /// From now on it may have to go when another body needs its bytes.
    pub(crate) fn reads(&mut self, reader: impl FnOnce() -> Arc<dyn Abort>) {
        if self.reader.is_none() {
            let reader = reader();
            // Nothing is gained by those that have nothing.
            if self.bytes > 0 {
                self.place = Some(self.room.0.lock().enter(self.bytes, Arc::downgrade(&reader)));
            }
            self.reader = Some(reader);
        }
    }

    /// Takes up so much more, or nothing.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), NoRoom> {
        if bytes == 0 {
            return Ok(());
        }
        let bytes = bytes as u64;
        let gone = {
            let mut ledger = self.room.0.lock();
            // It does not make room for itself.
            if let Some(place) = self.place.take()
                && ledger.leave(place).is_none()
            {
                self.bytes = 0;
                return Err(NoRoom::Aborted);
            }
            let Some(gone) = ledger.take(bytes) else { return Err(NoRoom::Full) };
            self.bytes += bytes;
            if let Some(reader) = &self.reader {
                self.place = Some(ledger.enter(self.bytes, Arc::downgrade(reader)));
            }
            gone
        };
        for reader in gone.iter().filter_map(Weak::upgrade) {
            reader.abort();
        }
        Ok(())
    }

    /// The body is complete, and its request is about to wait for this key.
    pub(crate) fn waits_for(&mut self, key: &LockKey) -> Result<(), NoRoom> {
        if self.bytes == 0 || self.key.is_some() {
            return Ok(());
        }
        if !self.room.0.lock().waits_for(key, self.bytes) {
            return Err(NoRoom::Full);
        }
        self.key = Some(key.clone());
        Ok(())
    }

    pub(crate) fn room(&self) -> &Room {
        &self.room
    }

    /// The body is complete: it does not have to go for others any more.
    pub(crate) fn is_complete(&mut self) -> Result<(), NoRoom> {
        self.reader = None;
        match self.place.take() {
            Some(place) if self.room.0.lock().leave(place).is_none() => {
                self.bytes = 0;
                Err(NoRoom::Aborted)
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // An error: its bytes are another's.
        if self.is_complete().is_ok() && self.bytes > 0 {
            let mut ledger = self.room.0.lock();
            if let Some(key) = &self.key {
                ledger.waits_no_longer(key, self.bytes);
            }
            ledger.give_back(self.bytes);
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
        assert_eq!(ledger.take(3), Some(vec![]));
        let one = ledger.enter(3, "one");
        assert_eq!(ledger.take(4), Some(vec![]));
        ledger.enter(4, "two");
        // It makes progress, and so is the last one to go.
        assert_eq!(ledger.leave(one), Some("one"));
        assert_eq!(ledger.take(3), Some(vec![]));
        let one = ledger.enter(6, "one");
        assert_eq!((ledger.left, ledger.at_most()), (0, 10));
        assert_eq!(ledger.take(2), Some(vec!["two"]));
        assert_eq!((ledger.left, ledger.at_most()), (2, 8));
        assert_eq!(ledger.take(9), None, "nobody goes for nothing");
        assert_eq!(ledger.take(8), Some(vec!["one"]));
        assert_eq!(ledger.leave(one), None);
        ledger.give_back(10);
        assert_eq!((ledger.left, ledger.reading, ledger.readers.len()), (10, 0, 0));
    }

    /// Each of them would make room enough: only one has to go.
    #[test]
    fn small_reader_is_evicted_only_without_a_larger_one() {
        let mut ledger = Ledger::new(114);
        assert_eq!(ledger.take(114), Some(vec![]));
        ledger.enter(4, "small");
        ledger.enter(40, "large");
        ledger.enter(70, "larger, and moves");
        assert_eq!(ledger.take(1), Some(vec!["large"]), "of the larger ones it is the idlest");
        assert_eq!(ledger.take(40), Some(vec!["larger, and moves"]), "the idlest is smaller");
        assert_eq!((ledger.left, ledger.at_most()), (69, 73));
        assert_eq!(ledger.take(70), Some(vec!["small"]), "nothing else is left");
        assert_eq!((ledger.left, ledger.reading, ledger.take(4)), (3, 0, None));
    }

    #[test]
    fn among_equal_readers_the_longest_idle_is_evicted() {
        let mut ledger = Ledger::new(1000);
        assert_eq!(ledger.take(1000), Some(vec![]));
        let places: Vec<_> = (0..100).map(|n| ledger.enter(10, n)).collect();
        assert_eq!(ledger.leave(places[0]), Some(0));
        ledger.enter(10, 0);
        assert_eq!(ledger.take(25), Some(vec![1, 2, 3]));
    }

    #[test]
    fn waiting_bodies_of_one_key_share_a_part_of_the_budget() {
        let (hot, other) = (LockKey::from(("hot",)), LockKey::from(("other",)));
        let mut ledger: Ledger<()> = Ledger::new(800);
        let comes = |ledger: &mut Ledger<()>, key: &LockKey, bytes| {
            ledger.take(bytes).expect("there is room");
            let waits = ledger.waits_for(key, bytes);
            if !waits {
                ledger.give_back(bytes);
            }
            waits
        };
        let waiting = (0..100).filter(|_| comes(&mut ledger, &hot, 10)).count();
        assert_eq!((waiting, ledger.at_most()), (9, 710), "with 8 there were 720 left, an eighth of it is 90");
        let waiting = (0..100).filter(|_| comes(&mut ledger, &other, 10)).count();
        assert_eq!((waiting, ledger.at_most()), (8, 630), "less is left");
        for _ in 0..9 {
            ledger.waits_no_longer(&hot, 10);
            ledger.give_back(10);
        }
        assert!(comes(&mut ledger, &hot, 700), "the first of a key waits, whatever it has");
        assert!(!comes(&mut ledger, &hot, 1));
        ledger.waits_no_longer(&hot, 700);
        assert_eq!(ledger.waiting.len(), 1, "a key that nobody waits for is not kept");
    }

    #[derive(Debug, Default)]
    struct Counts(AtomicUsize);

    impl Abort for Counts {
        fn abort(&self) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    fn room(bytes: u64) -> Arc<Room> {
        Arc::new(Room(Mutex::new(Ledger::new(bytes))))
    }

    #[test]
    fn rejected_reservation_takes_nothing_and_drop_frees() {
        let room = room(10);
        let (mut one, mut other) = (room.share(), room.share());
        one.grow(6).expect("fits");
        assert_eq!(other.grow(5), Err(NoRoom::Full), "one too many");
        assert_eq!(room.at_most(), 4, "a part of it is not taken");
        other.grow(4).expect("just fits");
        other.grow(0).expect("nothing always fits");
        assert_eq!(other.grow(1), Err(NoRoom::Full));
        drop(one);
        assert_eq!(room.at_most(), 6);
        other.grow(6).expect("fits again");
        drop(other);
        assert_eq!(room.at_most(), 10);
    }

    #[test]
    fn readers_are_evicted_and_complete_bodies_are_not() {
        let room = room(10);
        let (idle, busy) = (Arc::new(Counts::default()), Arc::new(Counts::default()));
        let aborts = || [&idle, &busy].map(|counts| counts.0.load(SeqCst));
        let [mut one, mut two, mut three] = [room.share(), room.share(), room.share()];
        one.reads(|| idle.clone());
        two.reads(|| busy.clone());
        two.grow(1).expect("fits");
        one.grow(4).expect("fits");
        two.grow(5).expect("just fits");
        three.grow(1).expect("there is one that is idle");
        assert_eq!(aborts(), [1, 0]);
        assert_eq!((one.grow(1), one.is_complete()), (Err(NoRoom::Aborted), Ok(())), "it has nothing any more");
        two.is_complete().expect("not aborted");
        assert_eq!((three.grow(4), room.at_most()), (Err(NoRoom::Full), 3));
        drop((one, two, three));
        assert_eq!((room.at_most(), aborts()), (10, [1, 0]), "each byte was given back once");
    }

    /// Its client has left before it was told.
    #[test]
    fn evicted_reader_does_not_free_its_bytes_twice() {
        let room = room(10);
        let counts = Arc::new(Counts::default());
        let (mut one, mut other) = (room.share(), room.share());
        one.reads(|| counts.clone());
        one.grow(10).expect("fits");
        other.grow(4).expect("it makes room");
        drop(one);
        assert_eq!((room.at_most(), counts.0.load(SeqCst)), (6, 1));
        drop(other);
        assert_eq!(room.at_most(), 10);
    }

    #[test]
    fn reader_is_not_evicted_for_itself() {
        let room = room(10);
        let counts = Arc::new(Counts::default());
        let mut one = room.share();
        one.grow(6).expect("fits");
        one.reads(|| counts.clone());
        assert_eq!((one.grow(5), counts.0.load(SeqCst)), (Err(NoRoom::Full), 0));
        drop(one);
        assert_eq!(room.at_most(), 10);
    }
}
