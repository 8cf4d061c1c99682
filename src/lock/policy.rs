//! How to behave: what is set is set, what is not is inherited.

use std::time::Duration;

use crate::defaults::REQUEST_WAIT;

/// Settings for requests that need a lock. What is not set is inherited: a route from the nearest
/// [`LocksLayer`](crate::LocksLayer), that from its [`Locks`](crate::Locks), those from the defaults.
///
/// ```
/// # use std::time::Duration;
/// # use tower_lock::{Locks, Policy};
/// # #[cfg(feature = "memory")]
/// let patient = Locks::in_memory().with_policy(Policy::new().wait(Duration::from_secs(2)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "setters consume and return the policy"]
pub struct Policy {
    wait: Option<Duration>,
    key_in_logs: Option<KeyInLogs>,
}

/// What a log shows of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyInLogs {
    /// Its text.
    #[default]
    Shown,
    /// Its namespace and a hash: equal keys can be told, parts cannot be read.
    Redacted,
}

/// The setters of [`Policy`], for each thing that carries one and has a method `policy(self, Policy) -> Self`.
macro_rules! policy_setters {
    () => {
        /// Waits at most this long for the key, first come first served. Default: zero, the request is refused at once
        /// while somebody else has the key.
        ///
        /// Waiting is for requests of which each shall have its turn (ten buyers, five items); refusing is for those of
        /// which one is enough (the second tap on "claim").
        pub fn wait(self, limit: ::std::time::Duration) -> Self {
            self.policy($crate::Policy::new().wait(limit))
        }

        /// What a log shows of the key. Default: [`Shown`](crate::KeyInLogs::Shown). To be redacted where a part is
        /// personal data; to hide it from the store, too, make the key with [`LockKey::hashed`](crate::LockKey::hashed).
        pub fn key_in_logs(self, key: $crate::KeyInLogs) -> Self {
            self.policy($crate::Policy::new().key_in_logs(key))
        }
    };
}

pub(crate) use policy_setters;

impl Policy {
    /// Nothing set: everything is inherited.
    pub const fn new() -> Self {
        Self { wait: None, key_in_logs: None }
    }

    /// Waits at most this long for the key, first come first served. Default: zero, the request is refused at once
    /// while somebody else has the key.
    pub const fn wait(mut self, limit: Duration) -> Self {
        self.wait = Some(limit);
        self
    }

    /// What a log shows of the key. Default: [`Shown`](KeyInLogs::Shown).
    pub const fn key_in_logs(mut self, key: KeyInLogs) -> Self {
        self.key_in_logs = Some(key);
        self
    }

    /// What is set here, else what is set there.
    pub fn or(self, outer: Self) -> Self {
        let Self { wait, key_in_logs } = self;
        Self { wait: wait.or(outer.wait), key_in_logs: key_in_logs.or(outer.key_in_logs) }
    }

    /// How long a request waits.
    pub(crate) fn request_wait(&self) -> Duration {
        self.wait.unwrap_or(REQUEST_WAIT)
    }

    /// How long a call without HTTP waits, if anything says so.
    pub(crate) fn call_wait(&self) -> Option<Duration> {
        self.wait
    }

    #[cfg(feature = "tracing")]
    pub(crate) fn shows_key(&self) -> bool {
        self.key_in_logs.unwrap_or_default() == KeyInLogs::Shown
    }
}
