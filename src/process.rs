//! The identity of the current process. `fork()` copies all state, ids and tables included.

#[cfg(any(test, feature = "__internals"))]
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};
use std::{
    hash::{BuildHasher, RandomState},
    time::SystemTime,
};

/// The source of the process id: the system, or a test.
#[derive(Clone, Debug, Default)]
pub(crate) struct Process {
    #[cfg(any(test, feature = "__internals"))]
    simulated: Option<Arc<AtomicU32>>,
}

/// Mark of the process that created it. Its copy in a forked child is not current.
///
/// `fork()` counts the generations of processes. To compare that count costs one load. `getpid` is
/// a system call, and each cycle of a lock compares several times.
#[derive(Debug)]
pub(crate) struct ProcessMark {
    generation: forkguard::Guard,
    #[cfg(any(test, feature = "__internals"))]
    simulated: Option<(Arc<AtomicU32>, u32)>,
}

impl Process {
    #[cfg(any(test, feature = "__internals"))]
    pub(crate) fn simulated(id: Arc<AtomicU32>) -> Self {
        Self { simulated: Some(id) }
    }

    /// A mark of the current process.
    pub(crate) fn mark(&self) -> ProcessMark {
        ProcessMark {
            generation: forkguard::new(),
            #[cfg(any(test, feature = "__internals"))]
            simulated: self.simulated.as_ref().map(|id| (Arc::clone(id), id.load(Ordering::Relaxed))),
        }
    }

    /// The process id: one `getpid`.
    pub(crate) fn id(&self) -> u32 {
        #[cfg(any(test, feature = "__internals"))]
        if let Some(id) = &self.simulated {
            return id.load(Ordering::Relaxed);
        }
        std::process::id()
    }

    /// 64 random bits that differ between processes, also after a `fork()`.
    #[expect(clippy::disallowed_methods, reason = "an input of the random bits, never compared")]
    pub(crate) fn random_bits(&self) -> u64 {
        // The only source of random bits in the standard library: each state has its own keys.
        bits(&RandomState::new(), self.id(), SystemTime::now())
    }
}

impl ProcessMark {
    /// Whether the current process created this mark.
    pub(crate) fn is_current(&self) -> bool {
        #[cfg(any(test, feature = "__internals"))]
        if let Some((id, marked)) = &self.simulated
            && id.load(Ordering::Relaxed) != *marked
        {
            return false;
        }
        // A check changes the guard, and the mark stays the one of its process.
        !self.generation.clone().detected_fork()
    }
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
