//! Which process this is: `fork()` copies everything that was made before it, ids and tables
//! included.

#[cfg(any(test, feature = "__internals"))]
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};
use std::{
    hash::{BuildHasher, RandomState},
    time::SystemTime,
};

/// Where the number of the process comes from: the system, or a test.
#[derive(Clone, Debug, Default)]
pub(crate) struct Process {
    #[cfg(any(test, feature = "__internals"))]
    simulated: Option<Arc<AtomicU32>>,
}

impl Process {
    #[cfg(any(test, feature = "__internals"))]
    pub(crate) fn simulated(id: Arc<AtomicU32>) -> Self {
        Self { simulated: Some(id) }
    }

    /// One `getpid`.
    pub(crate) fn id(&self) -> u32 {
        #[cfg(any(test, feature = "__internals"))]
        if let Some(id) = &self.simulated {
            return id.load(Ordering::Relaxed);
        }
        std::process::id()
    }

    /// 64 bits that no other process draws, not even one that is a copy of this one.
    #[expect(clippy::disallowed_methods, reason = "drawn with, and compared with no other moment")]
    pub(crate) fn random_bits(&self) -> u64 {
        // The one source of random bits in the standard library: each state has keys of its own.
        bits(&RandomState::new(), self.id(), SystemTime::now())
    }
}

/// The keys of a thread are drawn once, and `fork()` copies them: two children of one process have
/// the same. They differ by their process id, and two processes that have the same id one after the
/// other by the time.
fn bits(keys: &RandomState, process: u32, now: SystemTime) -> u64 {
    keys.hash_one((process, now))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any moment will do")]
    fn forked_children_draw_different_random_bits() {
        let (keys, now) = (RandomState::new(), SystemTime::now());
        assert_ne!(bits(&keys, 1, now), bits(&keys, 2, now), "two process ids");
        assert_ne!(bits(&keys, 1, now), bits(&keys, 1, now + Duration::from_nanos(100)), "two moments");
    }
}
