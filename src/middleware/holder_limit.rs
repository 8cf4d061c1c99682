//! With how many others the requests of a layer hold their keys.

use std::{fmt, sync::Arc, time::Duration};

use http::{Method, request::Parts};

use crate::{
    key_source::KeyRejection,
    limits::{MAX_GRACE, MAX_HOLDERS},
    lock::LockManager,
    lock_key::LockKey,
    proto::sharing::Sharing,
};

/// The setting of a layer.
#[derive(Clone, Default)]
pub(crate) enum HolderLimit {
    #[default]
    Alone,
    AtMost(u16),
    AtMostBy(Arc<LimitOf>),
    /// Requests with these methods are readers.
    SharedFor(Arc<[Method]>),
    /// The newest request replaces the others, whose handlers have this time for their end.
    Newest(Grace),
}

type LimitOf = dyn Fn(&Parts) -> u16 + Send + Sync;

/// How long a handler has for its end, in milliseconds: each request has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grace(u16);

impl Grace {
    #[track_caller]
    pub(super) fn new(grace: Duration) -> Self {
        assert!(grace <= MAX_GRACE, "the grace of `newest_wins` is {grace:?}, and {MAX_GRACE:?} is the most");
        Self(u16::try_from(grace.as_millis()).unwrap_or(u16::MAX))
    }
}

impl From<Grace> for Duration {
    fn from(Grace(ms): Grace) -> Self {
        Self::from_millis(ms.into())
    }
}

/// How one request holds its key.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    pub(crate) sharing: Sharing,
    /// The number of permits, under `at_most`. Zero: the request gets none.
    pub(crate) permits: Option<u16>,
    /// Whether the handler gets a [`HeldPermit`](crate::HeldPermit), and a
    /// [`HeldLock`](crate::HeldLock).
    pub(crate) views: Views,
    /// Under `newest_wins`: how long the handler has for its end.
    pub(crate) grace: Option<Grace>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Views {
    #[default]
    Lock,
    Permit,
    /// A writer: its handler may be that of the readers, too.
    Both,
}

impl HolderLimit {
    /// Checks the setting when it is made.
    #[track_caller]
    pub(super) fn checked(self, locks: &LockManager, setting: &str) -> Self {
        if !matches!(self, Self::AtMost(1))
            && let Some(why) = locks.driver().shares_refused(self.sharing(), false)
        {
            panic!("`{setting}` needs another store: {why}");
        }
        self
    }

    /// How its requests hold their keys, those that share them.
    fn sharing(&self) -> Sharing {
        match self {
            Self::SharedFor(_) => Sharing::Reader,
            Self::Newest(_) => Sharing::Newest,
            _ => Sharing::permit(MAX_HOLDERS),
        }
    }

    /// The terms of a request for these keys.
    pub(super) fn terms(&self, head: &Parts, keys: &[LockKey]) -> Result<Terms, KeyRejection> {
        let mistake = |text: &str| Err(KeyRejection::Mistake(text.to_owned()));
        if keys.len() > 1 && !matches!(self, Self::Alone) {
            return mistake("`at_most` and `shared_for` are for one key, and the request has several");
        }
        if keys.iter().any(LockKey::is_raw) && !matches!(self, Self::Alone | Self::AtMost(1)) {
            return mistake("`at_most`, `shared_for` and `newest_wins` are not for raw keys, which have one holder");
        }
        let of_permits = |limit| Terms {
            sharing: Sharing::permit(limit),
            permits: Some(limit),
            views: Views::Permit,
            ..Terms::default()
        };
        Ok(match self {
            Self::Alone => Terms::default(),
            Self::AtMost(limit) => of_permits(*limit),
            Self::AtMostBy(limit) => match limit(head) {
                limit @ 0..=MAX_HOLDERS => of_permits(limit),
                limit => {
                    return mistake(&format!(
                        "the function of `at_most_by` returned {limit}, and {MAX_HOLDERS} is the most"
                    ));
                }
            },
            Self::SharedFor(methods) if methods.contains(&head.method) => {
                Terms { sharing: Sharing::Reader, views: Views::Permit, ..Terms::default() }
            }
            Self::Newest(grace) => Terms { sharing: Sharing::Newest, grace: Some(*grace), ..Terms::default() },
            Self::SharedFor(_) => Terms { views: Views::Both, ..Terms::default() },
        })
    }
}

impl fmt::Debug for HolderLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alone => f.write_str("Alone"),
            Self::AtMost(limit) => f.debug_tuple("AtMost").field(limit).finish(),
            Self::AtMostBy(_) => f.write_str("AtMostBy(..)"),
            Self::SharedFor(methods) => f.debug_tuple("SharedFor").field(methods).finish(),
            Self::Newest(grace) => f.debug_tuple("Newest").field(grace).finish(),
        }
    }
}
