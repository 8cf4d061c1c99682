use std::future::{Future, ready};

use http::Request;

use super::key_source::{Derived, KeySource, KeySourceFor, NoKey};
use crate::{key::LockKey, lock::Locks};

/// One key for every request. Made by [`constant`].
#[derive(Clone, Debug)]
pub struct Constant(LockKey);

/// The same key for every request: for what there is once, such as the nightly job. With any body, and without Axum.
///
/// ```
/// # use tower_lock::{LockLayer, Locks, constant};
/// # fn layer(locks: &Locks) {
/// LockLayer::new(locks, constant(("nightly", "mail")));
/// # }
/// ```
pub fn constant(key: impl Into<LockKey>) -> Constant {
    Constant(key.into())
}

impl KeySource for Constant {}

impl<B: Send + 'static> KeySourceFor<B> for Constant {
    type Body = B;

    fn pass(request: Request<B>) -> Request<B> {
        request
    }

    fn derive(&self, request: Request<B>, _: &Locks) -> impl Future<Output = Result<Derived<B>, NoKey>> + Send {
        ready(Ok(Derived { request, key: Some(self.0.clone()), room: None }))
    }
}
