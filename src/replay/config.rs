//! The configuration of a layer that keeps answers.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Extensions, Method};
use tower::BoxError;

use super::{
    docs_link::DocsLink,
    idempotency_key::IdempotencyKeyField,
    recorder::AnswerSettings,
    scope_usage::{ScopeLimits, ScopeUsage},
};
use crate::{
    lock::{HeldLock, HeldLocks},
    lock_key::LockKey,
    middleware::config::RouteConfig,
    telemetry::{notice, route::Route},
};

/// Shared by a replay layer and all its services.
#[derive(Clone)]
pub(super) struct ReplayConfig<K> {
    pub(super) route: RouteConfig,
    pub(super) scope: K,
    pub(super) key_field: IdempotencyKeyField,
    pub(super) is_required: bool,
    /// `None`: the default.
    pub(super) methods: Option<Vec<Method>>,
    pub(super) docs: Option<DocsLink>,
    pub(super) answers: Arc<AnswerSettings>,
    pub(super) scope_limits: ScopeLimits,
    /// Shared by all clones, because they share a store.
    pub(super) scope_usage: Arc<ScopeUsage>,
    pub(super) find_answer: Option<Arc<FindAnswer>>,
    pub(super) equal_requests: Option<EqualRequests>,
    /// It is inside of a lock layer, and has warned.
    pub(super) has_warned: Arc<AtomicBool>,
}

/// The terms of requests without a key that are equal.
#[derive(Clone)]
pub(super) struct EqualRequests {
    /// How long an answer is kept.
    pub(super) window: Duration,
    /// Another one than that of keys, because a usage counts the answers of one time.
    pub(super) scope_usage: Arc<ScopeUsage>,
}

/// Finds the answer that a handler has stored in its own database.
pub(super) type FindAnswer = dyn Fn(LockKey) -> FoundAnswer + Send + Sync;

pub(super) type FoundAnswer = Pin<Box<dyn Future<Output = Result<Option<Bytes>, BoxError>> + Send>>;

impl<K> ReplayConfig<K> {
    /// Warns once of a lock layer outside of this one: a retry waits for the lock before it gets
    /// its answer.
    pub(super) fn check_position(&self, extensions: &Extensions, route: &Route) {
        let is_inside = extensions.get::<HeldLock>().is_some() || extensions.get::<HeldLocks>().is_some();
        if is_inside && !self.has_warned.swap(true, Relaxed) {
            notice::replay_inside_lock(route);
        }
    }

    /// Whether requests with this method can have a key.
    pub(super) fn applies_to(&self, method: &Method) -> bool {
        match &self.methods {
            // A tunnel has no answer, and an answer to `HEAD` has no body.
            _ if [Method::CONNECT, Method::HEAD].contains(method) => false,
            Some(methods) => methods.contains(method),
            // Without a key, no such request must run.
            None if self.is_required => !method.is_safe(),
            None => [Method::POST, Method::PATCH].contains(method),
        }
    }
}
