//! Errors of a store.

use std::{error::Error, fmt, sync::Arc};

/// Error of a store: the name of the store, the operation, the kind, and the cause.
///
/// The outcome of the operation is unknown: it may have been executed, or may be executed later.
/// The kind says where it is not.
///
/// An error of [`LockManager::health`](crate::LockManager::health) contains the text of its cause,
/// because the log of a readiness probe usually prints no causes. Its source is the cause of that
/// one. `Debug` prints the message and all causes on one line.
#[derive(Clone)]
pub struct StoreError(Arc<Inner>);

/// Behind a pointer: results and waiters that have no error stay small.
#[derive(Clone)]
struct Inner {
    store: &'static str,
    operation: &'static str,
    kind: StoreErrorKind,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

/// Kind of a [`StoreError`].
///
/// A call that failed with `Unavailable`, `Timeout`, `Overloaded` or `Failover` is repeated within
/// the caller's wait. A caller that does not wait is rejected after twice the call timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store cannot be reached. The next call may succeed, because the store may be restarting.
    Unavailable,
    /// The store did not reply within [`call_timeout`](crate::store::LockStore::call_timeout).
    Timeout,
    /// Too many calls wait for the store. The operation was not sent, and changes nothing.
    Overloaded,
    /// The store refused the operation. The cause is a setting of the store, or data of another
    /// program.
    Refused,
    /// The reply violates the contract of [`LockStore`](crate::store::LockStore).
    Protocol,
    /// The server is a replica or is being promoted, or it cannot be reached and sentinels will
    /// promote another one.
    Failover,
    /// The store can never lock a key with this name. The operation was not sent.
    InvalidKey,
    /// The request needs an ability that the store does not have: see
    /// [`StoreTraits`](crate::store::StoreTraits). The operation was not executed.
    Unsupported,
}

/// Source of an error that the caller of the store makes.
const NO_REPLY: &str =
    "no reply and no error within the call timeout: is the store stopped, or are too many calls under way?";

impl StoreErrorKind {
    /// Whether a retry may succeed.
    pub(crate) fn is_transient(self) -> bool {
        matches!(self, Self::Unavailable | Self::Timeout | Self::Overloaded | Self::Failover)
    }
}

impl StoreError {
    /// Creates an error of an operation of a store.
    #[must_use]
    pub fn new(store: &'static str, operation: &'static str, kind: StoreErrorKind) -> Self {
        Self(Arc::new(Inner { store, operation, kind, source: None }))
    }

    /// The error of an operation without a reply within the call timeout, as the caller of the
    /// store measures it.
    pub(crate) fn no_reply(operation: &'static str) -> Self {
        Self::new("lock", operation, StoreErrorKind::Timeout).with_source(NO_REPLY)
    }

    /// Sets the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Arc::make_mut(&mut self.0).source = Some(Arc::from(source.into()));
        self
    }

    /// Returns the name of the store.
    #[must_use]
    pub fn store(&self) -> &'static str {
        self.0.store
    }

    /// Returns the operation that failed.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.0.kind
    }

    fn is_of_health_check(&self) -> bool {
        self.0.operation == "health"
    }

    /// Whether a retry may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        self.0.kind.is_transient()
    }

    /// Whether the operation was not sent, so that its outcome is known.
    pub(crate) fn is_unsent(&self) -> bool {
        self.0.kind == StoreErrorKind::Overloaded
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { store, operation, kind, source } = &*self.0;
        if self.is_of_health_check() {
            write!(f, "the {store} store is not ready for locks")?;
            return match (source, kind) {
                (Some(source), _) => write!(f, ": {source}"),
                (None, StoreErrorKind::Timeout) => f.write_str(": it did not reply in time"),
                (None, _) => Ok(()),
            };
        }
        match kind {
            StoreErrorKind::Unavailable => write!(f, "the {store} store cannot be reached to {operation} a lock"),
            StoreErrorKind::Timeout => write!(f, "the {store} store did not {operation} a lock in time"),
            StoreErrorKind::Overloaded => {
                write!(f, "the {store} store is too slow, or has too many calls, to {operation} a lock")
            }
            StoreErrorKind::Refused => write!(f, "the {store} store refused to {operation} a lock"),
            StoreErrorKind::Protocol => {
                write!(f, "the {store} store sent an unexpected reply to a request to {operation} a lock")
            }
            StoreErrorKind::Failover => {
                write!(f, "the {store} store cannot {operation} a lock for now")
            }
            StoreErrorKind::InvalidKey => write!(f, "the {store} store does not accept this key"),
            StoreErrorKind::Unsupported => {
                write!(f, "the {store} store does not support this request (`{operation}`)")
            }
        }
    }
}

// By hand: `thiserror` would return the `Arc` as the source, and `downcast_ref` would not find the
// error in it.
impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        let cause = self.0.source.as_deref().map(|source| source as &(dyn Error + 'static));
        // The text of the cause is in that of a failed health check.
        if self.is_of_health_check() { cause.and_then(Error::source) } else { cause }
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&error_chain(self))
    }
}

/// The error of a call, whose text contains its causes, so that the result has no source. Adds a
/// hint, which may be empty. `server`: the name of the server before the error, unless the text
/// around it has the name.
#[cfg(feature = "__remote")]
pub(crate) fn with_hint(
    server: Option<&dyn fmt::Display>,
    error: impl fmt::Display,
    hint: &str,
) -> Box<dyn Error + Send + Sync> {
    let server = server.map_or_else(String::new, |server| format!("{server}: "));
    let hint = if hint.is_empty() { String::new() } else { format!(" ({hint})") };
    format!("{server}{error}{hint}").into()
}

/// An error and its causes on one line, without control characters: a server may have chosen the
/// text.
pub(crate) fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text += &format!(": {message}");
        }
        cause = error.source();
    }
    escape_control(&text)
}

/// A text that another program has chosen, without control characters.
pub(crate) fn escape_control(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_error_names_operation_and_keeps_source() {
        let error = StoreError::new("shelf", "acquire", StoreErrorKind::Unavailable)
            .with_source(std::io::Error::other("no shelf"));
        assert_eq!(error.to_string(), "the shelf store cannot be reached to acquire a lock");
        let source = error.source().expect("kept").downcast_ref::<std::io::Error>().expect("unchanged");
        assert_eq!(source.to_string(), "no shelf");
        assert_eq!(format!("{error:?}"), "the shelf store cannot be reached to acquire a lock: no shelf");
    }

    #[test]
    fn health_error_contains_its_cause_once() {
        let error = StoreError::new("shelf", "health", StoreErrorKind::Unavailable)
            .with_source(std::io::Error::other("no shelf"));
        assert_eq!(error.to_string(), "the shelf store is not ready for locks: no shelf");
        assert_eq!(format!("{error:?}"), error.to_string());
        assert!(error.source().is_none());
    }
}
