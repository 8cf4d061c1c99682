//! One key for all requests of a layer.

use http::request::Parts;

use super::{KeyRejection, KeySource};
use crate::{body::reader::BodyReader, lock_key::LockKey};

/// Source of one key for all requests. Created by [`fixed`].
// A type with a name: an `impl KeySource` would borrow from the parts of the key.
#[derive(Clone, Debug)]
pub struct Fixed(LockKey);

/// Creates a source with one key for all requests, for work that exists once, such as a nightly
/// job. Works without Axum.
///
/// ```
/// # use tower_lock::{LockLayer, LockManager, key};
/// # fn layer(locks: &LockManager) {
/// LockLayer::new(locks, key::fixed(("nightly", "mail")));
/// # }
/// ```
pub fn fixed(key: impl Into<LockKey>) -> Fixed {
    Fixed(key.into())
}

impl KeySource for Fixed {
    type Keys = LockKey;

    async fn extract_key(&self, _: &mut Parts, _: &mut BodyReader<'_>) -> Result<Option<LockKey>, KeyRejection> {
        Ok(Some(self.0.clone()))
    }
}
