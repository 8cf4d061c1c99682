use std::{error::Error, fmt, sync::Arc};

/// A store could not answer: which one, asked for what, and why.
///
/// Whatever was asked may have happened all the same.
#[derive(Clone, Debug)]
pub struct StoreError {
    store: &'static str,
    operation: &'static str,
    kind: StoreErrorKind,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

/// What kind of trouble a store has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// It cannot be reached. It may be restarting: the next request may succeed.
    Unavailable,
    /// It did not answer in time (a second a call).
    Timeout,
    /// It refused to do this. Its settings, or what somebody else wrote there, need a look.
    Refused,
    /// It answered what its contract does not know.
    Protocol,
    /// The server is a replica or is being promoted. The call is retried within the caller's wait.
    Failover,
    /// This store cannot lock a key of this name, now or later. Nothing was asked of it.
    InvalidKey,
}

impl StoreError {
    /// The store named so failed at this operation.
    #[must_use]
    pub fn new(store: &'static str, operation: &'static str, kind: StoreErrorKind) -> Self {
        Self { store, operation, kind, source: None }
    }

    /// Keeps the reason.
    #[must_use]
    pub fn with_source(self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { source: Some(Arc::from(source.into())), ..self }
    }

    /// The name of the store.
    #[must_use]
    pub fn store(&self) -> &'static str {
        self.store
    }

    /// The verb that failed.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.operation
    }

    /// What kind of trouble it is.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Whether it is worth to ask once more.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Unavailable | StoreErrorKind::Timeout | StoreErrorKind::Failover)
    }

    /// Whether the store answers, but accepts no writes until a failover has ended.
    pub(crate) fn is_failover(&self) -> bool {
        self.kind == StoreErrorKind::Failover
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, operation, kind, source: _ } = self;
        if *operation == "health" {
            return write!(f, "the {store} store is not ready for locks");
        }
        match kind {
            StoreErrorKind::Unavailable => write!(f, "the {store} store cannot be reached to {operation} a lock"),
            StoreErrorKind::Timeout => write!(f, "the {store} store did not {operation} a lock in time"),
            StoreErrorKind::Refused => write!(f, "the {store} store refused to {operation} a lock"),
            StoreErrorKind::Protocol => {
                write!(f, "the {store} store broke its contract when asked to {operation} a lock")
            }
            StoreErrorKind::Failover => {
                write!(f, "the {store} store is a replica or is being promoted and cannot {operation} a lock")
            }
            StoreErrorKind::InvalidKey => write!(f, "the {store} store has no lock of this name"),
        }
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_error_names_operation_and_keeps_source() {
        let error = StoreError::new("shelf", "acquire", StoreErrorKind::Unavailable)
            .with_source(std::io::Error::other("no shelf"));
        assert_eq!(error.to_string(), "the shelf store cannot be reached to acquire a lock");
        let source = error.source().expect("kept").downcast_ref::<std::io::Error>().expect("as it was");
        assert_eq!(source.to_string(), "no shelf");
    }
}
