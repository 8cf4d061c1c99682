//! What a server of lines provides, and what a line is. Pure, but for the trait.

use std::{fmt, time::Duration};

use crate::{
    lock_key::LockKey,
    store::{StoreError, StoreErrorKind},
};

/// An entry of a line: an acquisition that holds the key, or waits for it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    /// The node at the server.
    pub(crate) handle: String,
    /// The acquisition, and the number of the call that has made the entry: `<id>+<number>`.
    pub(crate) name: String,
}

/// An entry that this process has just made, and the fence of its grant, should it be the first
/// one.
#[derive(Clone, Debug)]
pub(crate) struct OwnEntry {
    pub(crate) handle: String,
    pub(crate) fence: u64,
}

/// A key without a holder, for a time. It is before all entries, and outlives its process.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Block {
    pub(crate) handle: String,
    pub(crate) left: Duration,
    /// The holder that a forced release has ended.
    pub(crate) revoked: Option<String>,
}

/// The entries of a key, in the order in which they came. The first one holds the key, unless there
/// is a block.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Line {
    pub(crate) entries: Vec<Entry>,
    pub(crate) block: Option<Block>,
}

/// A page of a list.
pub(crate) struct Page {
    pub(crate) lines: Vec<(LockKey, Line)>,
    /// The cursor of the next page.
    pub(crate) next: Option<String>,
}

/// What happens to the session of this process.
pub(crate) enum SessionEvent {
    /// A connection is open. Events may have been lost before.
    Connected,
    /// There is another session. The entries of the one before are gone, or end with it.
    Ended,
    /// A node that was watched is gone: an entry or a block.
    Gone { node: String },
}

pub(crate) type OnEvent = Box<dyn Fn(SessionEvent) + Send + Sync>;

/// A server of lines. Each operation but [`page`](Self::page) is one step at the server.
///
/// After an error the outcome is unknown, and the operation may be executed later, until
/// [`purge`](Self::purge).
pub(crate) trait Lines: fmt::Debug + Send + Sync + 'static {
    /// The name of the store, for errors.
    const STORE: &'static str;
    type Error: LineError;

    /// The error of a call, for its caller.
    fn store_error(&self, operation: &'static str, error: Self::Error) -> StoreError;

    /// Gets the events of the session from now on.
    fn on_event(&self, on_event: OnEvent);

    /// The time that the session lasts after a heartbeat.
    fn session_time(&self) -> Duration;

    /// Makes the session last for its time from now on. Succeeds only at a leader of a majority.
    fn heartbeat(&self) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Appends an entry of this name; `only_if_free`: to an empty line. Returns the line with it.
    fn join(
        &self,
        key: &LockKey,
        name: &str,
        only_if_free: bool,
    ) -> impl Future<Output = Result<(Option<OwnEntry>, Line), Self::Error>> + Send;

    /// The line as of now, or later.
    fn line(&self, key: &LockKey) -> impl Future<Output = Result<Line, Self::Error>> + Send;

    /// Removes an entry. Returns whether it was there, and the line after it.
    fn leave(&self, key: &LockKey, handle: &str) -> impl Future<Output = Result<(bool, Line), Self::Error>> + Send;

    /// Removes the entries of this name. From then on no earlier call makes one.
    fn purge(&self, key: &LockKey, name: &str) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Replaces an entry by one of this name at the end of the line. Returns the line with it.
    /// `None`: the entry was gone.
    fn replace(
        &self,
        key: &LockKey,
        handle: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<(OwnEntry, Line)>, Self::Error>> + Send;

    /// Replaces an entry by a block. Returns the handle of the block, which no other one has.
    /// `None`: the entry was gone.
    fn block(
        &self,
        key: &LockKey,
        handle: &str,
        time: Duration,
        revoked: Option<&str>,
    ) -> impl Future<Output = Result<Option<String>, Self::Error>> + Send;

    fn unblock(&self, handle: &str) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Whether each of these entries is in its line.
    fn exist(&self, handles: &[String]) -> impl Future<Output = Result<Vec<bool>, Self::Error>> + Send;

    /// Sends [`SessionEvent::Gone`] when the entry or the block is gone. `false`: it is.
    fn watch(&self, handle: &str) -> impl Future<Output = Result<bool, Self::Error>> + Send;

    /// The fence of an entry, and the time of its creation in milliseconds since 1970.
    fn detail(&self, handle: &str) -> impl Future<Output = Result<Option<(u64, u64)>, Self::Error>> + Send;

    /// The lines after this cursor that have entries or a block. Ends the blocks that have expired.
    fn page(&self, after: &str) -> impl Future<Output = Result<Page, Self::Error>> + Send;

    /// Ends the session, if there is a connection.
    fn close(&self);
}

/// The error of a server.
pub(crate) trait LineError: Send + Sync + Sized + 'static {
    /// An error of the adapter.
    fn of(kind: StoreErrorKind, text: impl Into<String>) -> Self;
}

impl Entry {
    /// The acquisition.
    pub(crate) fn id(&self) -> &str {
        self.name.rsplit_once('+').map_or(&self.name, |(id, _)| id)
    }
}

impl Line {
    pub(crate) fn is_free(&self) -> bool {
        self.entries.is_empty() && self.block.is_none()
    }

    /// The number of entries before this one. `None`: it is not in the line.
    pub(crate) fn before(&self, handle: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.handle == handle)
    }

    /// Whether this entry holds the key.
    pub(crate) fn is_held_by(&self, handle: &str) -> bool {
        self.block.is_none() && self.before(handle) == Some(0)
    }

    /// What must be gone before the entry with so many others before it.
    pub(crate) fn predecessor(&self, before: usize) -> Option<&str> {
        match before.checked_sub(1) {
            Some(previous) => self.entries.get(previous).map(|entry| &*entry.handle),
            None => self.block.as_ref().map(|block| &*block.handle),
        }
    }
}
