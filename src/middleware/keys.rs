//! The keys of one request at one layer.

use crate::{
    key_source::RequestKeys,
    lock_key::{LockKey, several::KeyCountError},
};

/// One key, or several in order.
#[derive(Debug)]
pub(crate) enum SortedKeys {
    One(LockKey),
    /// Each one once.
    Several(Vec<LockKey>),
}

impl SortedKeys {
    pub(crate) fn new(keys: RequestKeys) -> Result<Self, KeyCountError> {
        Ok(match keys {
            RequestKeys::One(key) => Self::One(key),
            RequestKeys::Several(keys) => Self::Several(keys.into_sorted()?),
        })
    }
}

impl From<LockKey> for SortedKeys {
    fn from(key: LockKey) -> Self {
        Self::One(key)
    }
}
