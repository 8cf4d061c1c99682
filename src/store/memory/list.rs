//! One page of a listing.

use std::{cmp::Ordering, collections::BinaryHeap};

use crate::{
    lock_key::LockKey,
    store::{Cursor, KeyStatus, ListEntry, ListReply},
};

/// The first keys of all that were added.
pub(super) struct Page {
    limit: usize,
    /// The last of them first. One more than the page, to know whether it is the last page.
    first: BinaryHeap<Listed>,
}

struct Listed {
    key: LockKey,
    status: KeyStatus,
}

impl Page {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, first: BinaryHeap::with_capacity(limit + 2) }
    }

    /// Whether the page is not full, or this key is before one of its keys.
    pub(super) fn has_place_for(&self, key: &LockKey) -> bool {
        self.first.len() <= self.limit || self.first.peek().is_some_and(|last| *key < last.key)
    }

    pub(super) fn add(&mut self, key: LockKey, status: KeyStatus) {
        self.first.push(Listed { key, status });
        if self.first.len() > self.limit + 1 {
            self.first.pop();
        }
    }

    pub(super) fn finish(self) -> ListReply {
        let mut first = self.first.into_sorted_vec();
        let is_last = first.len() <= self.limit;
        first.truncate(self.limit);
        let next = first.last().filter(|_| !is_last).map(|last| cursor(&last.key));
        ListReply::new(first.into_iter().map(|Listed { key, status }| ListEntry::new(key, status)).collect(), next)
    }
}

impl PartialEq for Listed {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Listed {}

impl PartialOrd for Listed {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Listed {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key.cmp(&other.key)
    }
}

/// The position after a key.
fn cursor(key: &LockKey) -> Cursor {
    Cursor::new(format!("{}{key}", if key.is_raw() { 'r' } else { 'c' }))
}

/// The key of a cursor.
pub(super) fn parse_cursor(cursor: &Cursor) -> Option<LockKey> {
    match cursor.as_str().split_at_checked(1)? {
        ("c", text) => Some(LockKey::from_composed(text)),
        ("r", name) => Some(LockKey::from_raw_name(name)),
        _ => None,
    }
}
