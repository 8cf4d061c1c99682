//! The request and the reply of [`LockStore::list`].

#[cfg(doc)]
use super::LockStore;
use super::types::KeyStatus;
use crate::{limits::MAX_LISTED_KEYS, lock_key::LockKey};

/// The request of [`LockStore::list`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ListRequest {
    /// The number of entries after which a page ends, from 1 to 1,000. A store that reads several
    /// keys in one step may return a few more.
    pub limit: usize,
    /// The [`next`](ListReply::next) of the page before. `None`: the first page.
    pub after: Option<Cursor>,
    /// Whether only keys with waiters are listed. Default: `false`.
    pub contended_only: bool,
}

/// The reply of [`LockStore::list`]: one page.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListReply {
    /// The keys of this page. A page may be empty although it is not the last one.
    pub entries: Vec<ListEntry>,
    /// The position of the next page. `None`: this is the last one.
    pub next: Option<Cursor>,
}

/// One key of a [`ListReply`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListEntry {
    /// The key.
    pub key: LockKey,
    /// Its status when the page was read.
    pub status: KeyStatus,
}

/// Position in a listing. Its text has a meaning only for the store that returned it: another one
/// may fail with [`StoreErrorKind::Unsupported`](super::StoreErrorKind::Unsupported).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor(String);

// === impl ListRequest ===

impl ListRequest {
    /// Creates a request for the first page. A limit of zero is 1, and one above 1,000 is 1,000.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit: limit.clamp(1, MAX_LISTED_KEYS), after: None, contended_only: false }
    }

    /// Sets [`after`](Self::after).
    #[must_use]
    pub fn after(mut self, cursor: Cursor) -> Self {
        self.after = Some(cursor);
        self
    }

    /// Sets [`contended_only`](Self::contended_only).
    #[must_use]
    pub fn contended_only(mut self, contended_only: bool) -> Self {
        self.contended_only = contended_only;
        self
    }
}

// === impl ListReply ===

impl ListReply {
    /// Creates a page.
    #[must_use]
    pub fn new(entries: Vec<ListEntry>, next: Option<Cursor>) -> Self {
        Self { entries, next }
    }
}

impl ListEntry {
    /// Creates an entry.
    #[must_use]
    pub fn new(key: LockKey, status: KeyStatus) -> Self {
        Self { key, status }
    }
}

// === impl Cursor ===

impl Cursor {
    /// Creates a cursor from its text, for example from the URL of an admin page.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text of the cursor.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_of_a_page_is_bounded() {
        assert_eq!([0, 1, 1000, 1001, usize::MAX].map(|limit| ListRequest::new(limit).limit), [1, 1, 1000, 1000, 1000]);
    }
}
