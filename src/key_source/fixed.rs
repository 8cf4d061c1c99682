use std::future::{Future, ready};

use http::request::Parts;

use super::{KeySource, NoKey};
use crate::{body::reader::BodyReader, lock_key::LockKey};

/// One key for every request. Made by [`fixed`].
#[derive(Clone, Debug)]
pub struct Fixed(LockKey);

/// The same key for every request: for what there is once, such as the nightly job. Without Axum, too.
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
    fn derive(
        &self,
        _: &mut Parts,
        _: &mut BodyReader<'_>,
    ) -> impl Future<Output = Result<Option<LockKey>, NoKey>> + Send {
        ready(Ok(Some(self.0.clone())))
    }
}
