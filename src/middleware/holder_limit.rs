//! With how many others the requests of a layer hold their keys.

use std::{fmt, sync::Arc};

use http::{Method, StatusCode, request::Parts};

use crate::{
    limits::MAX_HOLDERS,
    lock::LockManager,
    proto::sharing::Sharing,
    rejection::Rejection,
    telemetry::{
        route::Route,
        span::{LockSpan, RejectionCause},
    },
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
}

type LimitOf = dyn Fn(&Parts) -> u16 + Send + Sync;

/// How one request holds its key.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    pub(crate) sharing: Sharing,
    /// The number of permits, under `at_most`. Zero: the request gets none.
    pub(crate) permits: Option<u16>,
    /// Whether the handler gets a [`HeldPermit`](crate::HeldPermit), and a
    /// [`HeldLock`](crate::HeldLock).
    pub(crate) views: Views,
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
            && let Some(why) = locks.driver().shares_refused(false)
        {
            panic!("`{setting}` needs another store: {why}");
        }
        self
    }

    /// The terms of a request that has this number of keys.
    pub(super) fn terms(&self, head: &Parts, keys: usize, route: &Route) -> Result<Terms, Rejection> {
        if keys > 1 && !matches!(self, Self::Alone) {
            return Err(mistake(route, "`at_most` and `shared_for` are for one key, and the request has several"));
        }
        let of_permits = |limit| Terms { sharing: Sharing::permit(limit), permits: Some(limit), views: Views::Permit };
        Ok(match self {
            Self::Alone => Terms::default(),
            Self::AtMost(limit) => of_permits(*limit),
            Self::AtMostBy(limit) => match limit(head) {
                limit @ 0..=MAX_HOLDERS => of_permits(limit),
                limit => {
                    let text = format!("the function of `at_most_by` returned {limit}, and {MAX_HOLDERS} is the most");
                    return Err(mistake(route, text));
                }
            },
            Self::SharedFor(methods) if methods.contains(&head.method) => {
                Terms { sharing: Sharing::Reader, permits: None, views: Views::Permit }
            }
            Self::SharedFor(_) => Terms { views: Views::Both, ..Terms::default() },
        })
    }
}

/// A mistake of the service, which the log names.
fn mistake(route: &Route, text: impl Into<std::borrow::Cow<'static, str>>) -> Rejection {
    let status = StatusCode::INTERNAL_SERVER_ERROR;
    LockSpan::rejected_before_lock(route, "invalid_key", status, Some(RejectionCause::of(text)));
    Rejection::invalid_key(status)
}

impl fmt::Debug for HolderLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alone => f.write_str("Alone"),
            Self::AtMost(limit) => f.debug_tuple("AtMost").field(limit).finish(),
            Self::AtMostBy(_) => f.write_str("AtMostBy(..)"),
            Self::SharedFor(methods) => f.debug_tuple("SharedFor").field(methods).finish(),
        }
    }
}
