//! How to behave: what is set is set, what is not is inherited.

use std::time::Duration;

use super::terms::{Lease, Terms};
use crate::defaults::{LOCK_DELAY, LOCK_DELAY_MAX, MAX_HOLD, REQUEST_WAIT};

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
    lease: Option<Lease>,
    max_hold: Option<Duration>,
    hold_at_least: Option<Duration>,
    lock_delay: Option<Duration>,
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
        /// Waits at most this long for the key, first come first served. Default: zero for a request, which is refused at once
        /// while somebody else has the key; 30 seconds for [`Locks::lock`](crate::Locks::lock).
        ///
        /// Waiting is for requests of which each shall have its turn (ten buyers, five items); refusing is for those of
        /// which one is enough (the second tap on "claim").
        pub fn wait(self, limit: ::std::time::Duration) -> Self {
            self.policy($crate::Policy::new().wait(limit))
        }

        /// How long the lock is held if nobody gives it back. Default: [`Watched`](crate::Lease::Watched), as long as its holder lives.
        pub fn lease(self, lease: $crate::Lease) -> Self {
            self.policy($crate::Policy::new().lease(lease))
        }

        /// Holds the lock at most this long: then it is lost, and what ran under it is broken off. Default: 5 minutes for a request, for a
        /// handler that hangs; without end for a [`Locks::lock`](crate::Locks::lock), for a job.
        pub fn max_hold(self, limit: ::std::time::Duration) -> Self {
            self.policy($crate::Policy::new().max_hold(limit))
        }

        /// Keeps the key taken for at least this long from the grant on, even if the work is done sooner. Default: zero.
        ///
        /// For the job that three machines start at the same minute, give or take: it runs once. After work that failed (a status of 400 and more, an
        /// error, [`LockGuard::release_failed`](crate::LockGuard::release_failed)) the key is free at once.
        pub fn hold_at_least(self, least: ::std::time::Duration) -> Self {
            self.policy($crate::Policy::new().hold_at_least(least))
        }

        /// Keeps the key taken for this long after its section ended badly (a panic, a drop, a loss): a statement of it may be on its way still.
        /// Default: a second; at most a day. Longer than the slowest statement is safe; zero is for sections whose writes check the fencing token. (Chubby's lock-delay,
        /// Burrows 2006.)
        pub fn lock_delay(self, delay: ::std::time::Duration) -> Self {
            self.policy($crate::Policy::new().lock_delay(delay))
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
        Self { wait: None, lease: None, max_hold: None, hold_at_least: None, lock_delay: None, key_in_logs: None }
    }

    /// Waits at most this long for the key, first come first served. Default: zero for a request, which is refused at once
    /// while somebody else has the key; 30 seconds for [`Locks::lock`](crate::Locks::lock).
    ///
    /// Waiting is for requests of which each shall have its turn (ten buyers, five items); refusing is for those of
    /// which one is enough (the second tap on "claim").
    pub const fn wait(mut self, limit: Duration) -> Self {
        self.wait = Some(limit);
        self
    }

    /// How long the lock is held if nobody gives it back. Default: [`Watched`](crate::Lease::Watched), as long as its holder lives.
    pub const fn lease(mut self, lease: Lease) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Holds the lock at most this long: then it is lost, and what ran under it is broken off. Default: 5 minutes for a request, for a
    /// handler that hangs; without end for a [`Locks::lock`](crate::Locks::lock), for a job.
    pub const fn max_hold(mut self, limit: Duration) -> Self {
        self.max_hold = Some(limit);
        self
    }

    /// Keeps the key taken for at least this long from the grant on, even if the work is done sooner. Default: zero.
    ///
    /// For the job that three machines start at the same minute, give or take: it runs once. After work that failed (a status of 400 and more, an
    /// error, [`LockGuard::release_failed`](crate::LockGuard::release_failed)) the key is free at once.
    pub const fn hold_at_least(mut self, least: Duration) -> Self {
        self.hold_at_least = Some(least);
        self
    }

    /// Keeps the key taken for this long after its section ended badly (a panic, a drop, a loss): a statement of it may be on its way still.
    /// Default: a second; at most a day. Longer than the slowest statement is safe; zero is for sections whose writes check the fencing token. (Chubby's lock-delay,
    /// Burrows 2006.)
    pub const fn lock_delay(mut self, delay: Duration) -> Self {
        self.lock_delay = Some(delay);
        self
    }

    /// What a log shows of the key. Default: [`Shown`](crate::KeyInLogs::Shown). To be redacted where a part is
    /// personal data; to hide it from the store, too, make the key with [`LockKey::hashed`](crate::LockKey::hashed).
    pub const fn key_in_logs(mut self, key: KeyInLogs) -> Self {
        self.key_in_logs = Some(key);
        self
    }

    /// What is set here, else what is set there.
    pub fn or(self, outer: Self) -> Self {
        let Self { wait, lease, max_hold, hold_at_least, lock_delay, key_in_logs } = self;
        Self {
            wait: wait.or(outer.wait),
            lease: lease.or(outer.lease),
            max_hold: max_hold.or(outer.max_hold),
            hold_at_least: hold_at_least.or(outer.hold_at_least),
            lock_delay: lock_delay.or(outer.lock_delay),
            key_in_logs: key_in_logs.or(outer.key_in_logs),
        }
    }

    /// How long a request waits.
    pub(crate) fn request_wait(&self) -> Duration {
        self.wait.unwrap_or(REQUEST_WAIT)
    }

    /// On which terms a request holds its key.
    pub(crate) fn request_terms(&self) -> Terms {
        Terms { max_hold: Some(self.max_hold.unwrap_or(MAX_HOLD)), ..self.call_terms() }
    }

    /// How long a call without HTTP waits, if anything says so.
    pub(crate) fn call_wait(&self) -> Option<Duration> {
        self.wait
    }

    /// On which terms a call without HTTP holds its key.
    pub(crate) fn call_terms(&self) -> Terms {
        Terms {
            lease: self.lease.unwrap_or_default(),
            max_hold: self.max_hold,
            hold_at_least: self.hold_at_least.unwrap_or_default(),
            lock_delay: self.lock_delay.unwrap_or(LOCK_DELAY).min(LOCK_DELAY_MAX),
        }
    }

    #[cfg(feature = "tracing")]
    pub(crate) fn shows_key(&self) -> bool {
        self.key_in_logs.unwrap_or_default() == KeyInLogs::Shown
    }
}
