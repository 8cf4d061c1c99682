//! Several keys that are locked together.

use std::collections::BTreeSet;

use super::{AllKeys, KeyCountError, LockKey};
use crate::limits::MAX_KEYS_TOGETHER;

/// Creates several keys that are locked together: from 1 to 64, in any order, duplicates once.
///
/// In a key function, for a handler that needs more than one subject for itself:
///
/// ```
/// # use std::time::Duration;
/// # use axum::Json;
/// # use tower_lock::{HeldLocks, LockLayer, LockManager, key};
/// #[derive(serde::Deserialize)]
/// struct Transfer { from: u64, to: u64, amount: u32 }
///
/// # fn layer(locks: &LockManager) {
/// LockLayer::new(locks, key::from_fn(|Json(transfer): Json<Transfer>| {
///     key::all([("account", transfer.from), ("account", transfer.to)])
/// }))
/// .wait(Duration::from_secs(5));
/// # }
///
/// async fn transfer(locks: HeldLocks, Json(transfer): Json<Transfer>) {
///     let from = locks.get(("account", transfer.from));
///     // .. write under the fencing token of each account
/// }
/// ```
///
/// Keys of different types are made first: `key::all([LockKey::from(("account", id)),
/// LockKey::from(("country", code))])`.
///
/// Without HTTP, [`LockManager::lock_all`](crate::LockManager::lock_all) takes the list itself.
///
/// # Errors
///
/// An empty list and more than 64 different keys are reported where the keys are used: a layer
/// rejects the request with 422 `invalid-key`, and `lock_all` fails.
pub fn all<K: Into<LockKey>>(keys: impl IntoIterator<Item = K>) -> AllKeys {
    let mut sorted = BTreeSet::new();
    for key in keys {
        sorted.insert(key.into());
        // The list may come from a client.
        if sorted.len() > MAX_KEYS_TOGETHER {
            return AllKeys(Err(KeyCountError::TooMany { max: MAX_KEYS_TOGETHER }));
        }
    }
    AllKeys(if sorted.is_empty() { Err(KeyCountError::Empty) } else { Ok(sorted.into_iter().collect()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_sorted_and_each_is_there_once() {
        let keys = all([("b", 1), ("a", 2), ("b", 1), ("a", 10)]).into_sorted().expect("valid");
        let texts: Vec<_> = keys.iter().map(LockKey::as_str).collect();
        assert_eq!(texts, ["a:10", "a:2", "b:1"]);
    }

    #[test]
    fn no_key_and_too_many_keys_are_errors() {
        assert_eq!(all::<LockKey>([]).into_sorted(), Err(KeyCountError::Empty));
        assert_eq!(
            all((0..65).map(|n| ("k", n))).into_sorted(),
            Err(KeyCountError::TooMany { max: MAX_KEYS_TOGETHER })
        );
        assert_eq!(all((0..64).map(|n| ("k", n))).into_sorted().map(|keys| keys.len()), Ok(64));
        assert_eq!(all((0..1000).map(|n| ("k", n % 64))).into_sorted().map(|keys| keys.len()), Ok(64));
        assert_eq!(
            all((0..).map(|n: u64| ("k", n))).into_sorted(),
            Err(KeyCountError::TooMany { max: MAX_KEYS_TOGETHER }),
            "without an end"
        );
    }
}
