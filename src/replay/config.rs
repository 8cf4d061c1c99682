use std::{future::Future, pin::Pin, sync::Arc};

use bytes::Bytes;
use http::{Method, Response, request::Parts};
use tower::BoxError;

use crate::{
    lock::LockManager,
    lock_key::LockKey,
    middleware::config::{InheritedConfig, LayerParams, PerOuter},
    policy::LockPolicy,
    rejection::{OnReject, Rejection, RejectionBody, retry_after::HoldEstimate},
    replay::{docs_link::DocsLink, idempotency_key::IdempotencyKeyField, recorder::AnswerSettings},
};

/// Shared by a replay layer and all its services.
pub(super) struct ReplayConfig<K> {
    pub(super) locks: LockManager,
    pub(super) scope: K,
    pub(super) key_field: IdempotencyKeyField,
    pub(super) is_required: bool,
    /// `None`: the default.
    pub(super) methods: Option<Vec<Method>>,
    pub(super) policy: LockPolicy,
    pub(super) on_reject: OnReject,
    pub(super) docs: Option<DocsLink>,
    pub(super) name: Option<&'static str>,
    pub(super) hold_estimate: Arc<HoldEstimate>,
    pub(super) params: PerOuter<Arc<LayerParams>>,
    pub(super) answers: Arc<AnswerSettings>,
    pub(super) find_answer: Option<Arc<FindAnswer>>,
}

/// Finds the answer that a handler has stored in its own database.
pub(super) type FindAnswer = dyn Fn(LockKey) -> FoundAnswer + Send + Sync;

pub(super) type FoundAnswer = Pin<Box<dyn Future<Output = Result<Option<Bytes>, BoxError>> + Send>>;

impl<K> ReplayConfig<K> {
    /// Whether requests with this method can have a key.
    pub(super) fn applies_to(&self, method: &Method) -> bool {
        match &self.methods {
            // A tunnel has no answer.
            _ if method == Method::CONNECT => false,
            Some(methods) => methods.contains(method),
            // Without a key, no such request must run.
            None if self.is_required => !method.is_safe(),
            None => [Method::POST, Method::PATCH].contains(method),
        }
    }

    pub(super) fn params(&self, head: &Parts) -> Arc<LayerParams> {
        self.params.get_or_create(&head.extensions, |outside| {
            Arc::new(LayerParams {
                policy: InheritedConfig::policy(outside, self.policy, &self.locks),
                // The wait of this layer is for an answer, and its other settings are for its
                // record.
                handler_policy: InheritedConfig::policy(outside, LockPolicy::new(), &self.locks),
                on_reject: self.on_reject.or(outside.map(InheritedConfig::on_reject)).clone(),
                hold_estimate: Arc::clone(&self.hold_estimate),
                name: self.name,
            })
        })
    }

    pub(super) fn respond(&self, rejection: Rejection, on_reject: &OnReject) -> Response<RejectionBody> {
        let mut response = on_reject.respond(rejection);
        if let Some(docs) = &self.docs {
            docs.add_to(&mut response);
        }
        response
    }
}

/// A layer that is changed after it was cloned belongs to another route: its estimate starts anew.
impl<K: Clone> Clone for ReplayConfig<K> {
    fn clone(&self) -> Self {
        Self {
            locks: self.locks.clone(),
            scope: self.scope.clone(),
            key_field: self.key_field,
            is_required: self.is_required,
            methods: self.methods.clone(),
            policy: self.policy,
            on_reject: self.on_reject.clone(),
            docs: self.docs.clone(),
            name: self.name,
            hold_estimate: Arc::default(),
            params: PerOuter::default(),
            answers: Arc::clone(&self.answers),
            find_answer: self.find_answer.clone(),
        }
    }
}
