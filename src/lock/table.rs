//! Who converses with the store about a key, and who in this process waits to. No clock, no wakers of its own.

use std::collections::{HashMap, VecDeque, hash_map};

use tokio::{sync::oneshot, time::Instant};

use super::turn::Turn;
use crate::{
    defaults::{LINE_PER_KEY, LINE_PER_PROCESS},
    key::LockKey,
};

/// One conversation with the store per key and process: an entry is here while one goes on.
///
/// I11: bounded by the sections that run and the waiters it admits.
#[derive(Debug, Default)]
pub(super) struct Table {
    by_key: HashMap<LockKey, Entry>,
    waiting: usize,
    next_place: u64,
}

#[derive(Debug)]
struct Entry {
    /// When the one whose turn it is began to ask: its lease is over one lease later.
    since: Instant,
    /// The section has ended and the store has not yet said that the key is free.
    giving_back: bool,
    line: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    place: u64,
    call: oneshot::Sender<Turn>,
}

/// What becomes of a request that comes to the table.
#[derive(Debug)]
pub(super) enum Entered {
    /// Nobody was here.
    YourTurn,
    /// In the line; the turn comes through the channel.
    InLine { place: u64, call: oneshot::Receiver<Turn> },
    /// In the line, although it does not care to wait: the key is on its way back, and nobody else wants it.
    InLineForGiveBack { place: u64, call: oneshot::Receiver<Turn> },
    /// Somebody has the key, and the request does not wait.
    Taken(Ahead),
    /// No place left.
    LineFull(Ahead),
}

/// Who is before a request that was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ahead {
    /// Since when the first one has its turn.
    pub(super) since: Instant,
    /// How many there are, the first included.
    pub(super) places: usize,
}

impl Table {
    pub(super) fn enter(&mut self, key: &LockKey, now: Instant, waits: bool) -> Entered {
        let entry = match self.by_key.entry(key.clone()) {
            hash_map::Entry::Vacant(vacant) => {
                vacant.insert(Entry { since: now, giving_back: false, line: VecDeque::new() });
                return Entered::YourTurn;
            }
            hash_map::Entry::Occupied(occupied) => occupied.into_mut(),
        };
        let ahead = Ahead { since: entry.since, places: entry.line.len() + 1 };
        // A client that saw its own answer end is not refused because the lock of it is still on the way back.
        let for_give_back = !waits && entry.giving_back && entry.line.is_empty();
        if !waits && !for_give_back {
            return Entered::Taken(ahead);
        }
        if entry.line.len() >= LINE_PER_KEY || self.waiting >= LINE_PER_PROCESS {
            return Entered::LineFull(ahead);
        }
        let (call, called) = oneshot::channel();
        let place = self.next_place;
        self.next_place += 1;
        self.waiting += 1;
        entry.line.push_back(Waiter { place, call });
        if for_give_back {
            Entered::InLineForGiveBack { place, call: called }
        } else {
            Entered::InLine { place, call: called }
        }
    }

    /// Out of the line: who was before it, and its call, which may wake somebody when it is dropped: not in here.
    /// `None`: it is not in the line any more, because it was called.
    pub(super) fn leave(&mut self, key: &LockKey, place: u64) -> Option<(Ahead, oneshot::Sender<Turn>)> {
        let entry = self.by_key.get_mut(key)?;
        let at = entry.line.iter().position(|waiter| waiter.place == place)?;
        let Waiter { call, place: _ } = entry.line.remove(at)?;
        self.waiting -= 1;
        Some((Ahead { since: entry.since, places: at + 1 }, call))
    }

    /// The section has ended; what follows is the way back.
    pub(super) fn giving_back(&mut self, key: &LockKey) {
        if let Some(entry) = self.by_key.get_mut(key) {
            entry.giving_back = true;
        }
    }

    /// The turn is over: whose is it now? `None`: nobody's, and nothing is left of the key.
    pub(super) fn next(&mut self, key: &LockKey, now: Instant) -> Option<oneshot::Sender<Turn>> {
        let entry = self.by_key.get_mut(key)?;
        if let Some(Waiter { call, place: _ }) = entry.line.pop_front() {
            self.waiting -= 1;
            entry.since = now;
            entry.giving_back = false;
            return Some(call);
        }
        self.by_key.remove(key);
        None
    }

    /// How many keys somebody converses about, and how many wait.
    #[cfg(test)]
    pub(super) fn size(&self) -> (usize, usize) {
        (self.by_key.len(), self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: usize) -> LockKey {
        LockKey::from(("n", n))
    }

    fn place(entered: Entered) -> u64 {
        match entered {
            Entered::InLine { place, .. } => place,
            other => panic!("not in line: {other:?}"),
        }
    }

    #[test]
    fn one_has_its_turn_and_the_others_are_in_line_or_turned_away() {
        let (mut table, now) = (Table::default(), Instant::now());
        assert!(matches!(table.enter(&key(1), now, false), Entered::YourTurn));
        assert!(matches!(table.enter(&key(2), now, true), Entered::YourTurn), "another key");
        for places in 1..=3 {
            let ahead = Ahead { since: now, places };
            assert!(matches!(table.enter(&key(1), now, false), Entered::Taken(taken) if taken == ahead));
            place(table.enter(&key(1), now, true));
        }
        assert_eq!(table.size(), (2, 3));
    }

    #[test]
    fn nothing_is_left_of_a_key_when_nobody_is() {
        let (mut table, now) = (Table::default(), Instant::now());
        assert!(matches!(table.enter(&key(1), now, true), Entered::YourTurn));
        let first = place(table.enter(&key(1), now, true));
        let second = place(table.enter(&key(1), now, true));
        assert!(matches!(table.leave(&key(1), second), Some((Ahead { places: 2, .. }, _))));
        assert!(table.leave(&key(1), second).is_none(), "the second time it is not there");
        assert!(table.next(&key(1), now).is_some());
        assert!(table.leave(&key(1), first).is_none(), "called: not in line any more");
        assert!(table.next(&key(1), now).is_none());
        assert_eq!(table.size(), (0, 0));
    }

    #[test]
    fn the_line_is_bounded_for_a_key_and_for_the_process() {
        let (mut table, now) = (Table::default(), Instant::now());
        let mut calls = Vec::new();
        let mut fill = |table: &mut Table, n: usize| {
            table.enter(&key(n), now, true);
            loop {
                match table.enter(&key(n), now, true) {
                    Entered::InLine { call, .. } => calls.push(call),
                    Entered::LineFull(ahead) => return ahead.places - 1,
                    other => panic!("{other:?}"),
                }
            }
        };
        assert_eq!(fill(&mut table, 0), LINE_PER_KEY);
        let whole = LINE_PER_PROCESS / LINE_PER_KEY;
        for n in 1..whole {
            assert_eq!(fill(&mut table, n), LINE_PER_KEY);
        }
        assert_eq!(fill(&mut table, whole), LINE_PER_PROCESS % LINE_PER_KEY, "the process is full");
        assert!(matches!(table.enter(&key(whole + 1), now, true), Entered::YourTurn), "a free key needs no place");
        assert_eq!(table.size().1, LINE_PER_PROCESS);
        // A place that is free again can be taken, of whatever key.
        assert!(table.next(&key(0), now).is_some());
        place(table.enter(&key(whole + 1), now, true));
    }

    #[test]
    fn who_does_not_wait_waits_for_a_give_back_if_nobody_else_does() {
        let (mut table, now) = (Table::default(), Instant::now());
        table.enter(&key(1), now, false);
        table.giving_back(&key(1));
        let entered = table.enter(&key(1), now, false);
        assert!(matches!(entered, Entered::InLineForGiveBack { .. }), "{entered:?}");
        assert!(matches!(table.enter(&key(1), now, false), Entered::Taken(Ahead { places: 2, .. })), "one is enough");
        assert!(table.next(&key(1), now).is_some());
        assert!(matches!(table.enter(&key(1), now, false), Entered::Taken(_)), "its turn has only begun");
    }
}
