//! The identity of the current process. `fork()` copies all state, ids and tables included.

#[cfg(feature = "__internals")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::{
    hash::{BuildHasher, RandomState},
    time::SystemTime,
};

/// Mark of the process that created it. Its copy in a forked child is not current.
///
/// `fork()` counts the generations of processes. To compare that count costs one load. `getpid` is
/// a system call, and each cycle of a lock compares several times.
#[derive(Debug)]
pub(crate) struct ProcessMark {
    generation: forkguard::Guard,
    #[cfg(feature = "__internals")]
    is_copy: AtomicBool,
}

impl ProcessMark {
    /// A mark of the current process.
    pub(crate) fn new() -> Self {
        Self {
            generation: forkguard::new(),
            #[cfg(feature = "__internals")]
            is_copy: AtomicBool::new(false),
        }
    }

    /// Whether the current process created this mark.
    pub(crate) fn is_current(&self) -> bool {
        #[cfg(feature = "__internals")]
        if self.is_copy.load(Ordering::Relaxed) {
            return false;
        }
        // A check changes the guard, and the mark stays the one of its process.
        !self.generation.clone().detected_fork()
    }

    /// Makes this mark a copy in a forked child, for a test.
    #[cfg(feature = "__internals")]
    pub(crate) fn simulate_fork(&self) {
        self.is_copy.store(true, Ordering::Relaxed);
    }
}

/// 64 random bits that differ between processes, also after a `fork()`.
#[expect(clippy::disallowed_methods, reason = "an input of the random bits, never compared")]
pub(crate) fn random_bits() -> u64 {
    // The only source of random bits in the standard library: each state has its own keys.
    bits(&RandomState::new(), std::process::id(), SystemTime::now())
}

/// The random keys of a thread are created once, and `fork()` copies them: two children of a
/// process have the same keys. The process id distinguishes them. The time distinguishes processes
/// that have the same id one after the other.
fn bits(keys: &RandomState, process: u32, now: SystemTime) -> u64 {
    keys.hash_one((process, now))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Guarantee: G1.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "any time will do")]
    fn forked_children_draw_different_random_bits() {
        let (keys, now) = (RandomState::new(), SystemTime::now());
        assert_ne!(bits(&keys, 1, now), bits(&keys, 2, now), "two process ids");
        assert_ne!(bits(&keys, 1, now), bits(&keys, 1, now + Duration::from_nanos(100)), "two times");
    }
}
