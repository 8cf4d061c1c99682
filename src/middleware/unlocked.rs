/// Why a request passed its [`LockLayer`](crate::LockLayer) without a lock. It is in the extensions
/// of the request, for the error of an extractor that needs the lock.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unlocked {
    /// A predicate of the layer matched.
    Skipped,
    /// The key function returned `None`.
    NoKey,
}
