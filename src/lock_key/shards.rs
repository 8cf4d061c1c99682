//! State that is divided by key, so that keys that differ rarely share a mutex.

use super::LockKey;
use crate::sync::Mutex;

/// One value for each shard of the keys, each under a mutex of its own.
#[derive(Debug)]
pub(crate) struct KeyShards<T>(Box<[Shard<T>]>);

/// Two cache lines, which some processors load together: a thread that locks a shard does not slow
/// down one that locks its neighbour.
#[derive(Debug)]
#[repr(align(128))]
struct Shard<T>(Mutex<T>);

impl<T> KeyShards<T> {
    /// The number of shards: many more than threads that run at once.
    pub(crate) const COUNT: usize = 64;

    pub(crate) fn new(create: impl Fn() -> T) -> Self {
        Self((0..Self::COUNT).map(|_| Shard(Mutex::new(create()))).collect())
    }

    /// The shard of this key.
    pub(crate) fn of(&self, key: &LockKey) -> &Mutex<T> {
        &self.0[Self::index_of(key)].0
    }

    pub(crate) fn index_of(key: &LockKey) -> usize {
        // Bits that the maps of the shards do not use first.
        let [.., bits] = key.hash.to_le_bytes();
        usize::from(bits) % Self::COUNT
    }

    /// All shards, one after the other: no caller locks two of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Mutex<T>> {
        self.0.iter().map(|shard| &shard.0)
    }
}

impl<T: Default> Default for KeyShards<T> {
    fn default() -> Self {
        Self::new(T::default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_divided_over_all_shards() {
        let shards = KeyShards::<usize>::default();
        for n in 0..64 * KeyShards::<usize>::COUNT {
            *shards.of(&LockKey::from(("n", n))).lock() += 1;
        }
        let counts: Vec<_> = shards.iter().map(|shard| *shard.lock()).collect();
        assert!(counts.iter().all(|count| (16..256).contains(count)), "{counts:?}");
    }
}
