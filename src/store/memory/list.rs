//! One page of a listing.

use std::collections::BTreeMap;

use crate::{
    lock_key::LockKey,
    store::{Cursor, KeyStatus, ListEntry, ListReply},
};

/// The first keys of all that were added.
pub(super) struct Page {
    limit: usize,
    /// One more than the page, to know whether it is the last page.
    first: BTreeMap<LockKey, KeyStatus>,
}

impl Page {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, first: BTreeMap::new() }
    }

    /// Whether the page is not full, or this key is before one of its keys.
    pub(super) fn has_place_for(&self, key: &LockKey) -> bool {
        self.first.len() <= self.limit || self.first.last_key_value().is_some_and(|(last, _)| key < last)
    }

    pub(super) fn add(&mut self, key: LockKey, status: KeyStatus) {
        self.first.insert(key, status);
        if self.first.len() > self.limit + 1 {
            self.first.pop_last();
        }
    }

    pub(super) fn finish(self) -> ListReply {
        let is_last = self.first.len() <= self.limit;
        let listed = self.first.into_iter().map(|(key, status)| ListEntry::new(key, status));
        let entries: Vec<_> = listed.take(self.limit).collect();
        let next = entries.last().filter(|_| !is_last).map(|last| cursor(&last.key));
        ListReply::new(entries, next)
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
