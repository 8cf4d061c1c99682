//! How many answers each scope keeps, as far as this process has counted.
//!
//! One client must not use the memory that the answers of all clients share. The count is
//! approximate: other processes count for themselves, and a sliding window stands for the end of
//! each record.

use std::{collections::HashMap, time::Duration};

use crate::{
    clock::BootInstant,
    limits::{MAX_SCOPE_ANSWERS, MAX_SCOPE_BYTES, MAX_SCOPES},
    lock_key::LockKey,
    sync::Mutex,
};

/// The bounds of one scope within the time for which its answers are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScopeLimits {
    pub(crate) answers: usize,
    pub(crate) bytes: usize,
}

/// What the scopes of one layer keep.
#[derive(Debug, Default)]
pub(super) struct ScopeUsage(Mutex<Windows>);

/// The current window, and the one before it. Each has the length of `keep_for`.
#[derive(Debug, Default)]
struct Windows {
    /// `None` before the first answer.
    began: Option<BootInstant>,
    current: HashMap<LockKey, Used>,
    previous: HashMap<LockKey, Used>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Used {
    pub(super) answers: f64,
    pub(super) bytes: f64,
}

impl Default for ScopeLimits {
    fn default() -> Self {
        Self { answers: MAX_SCOPE_ANSWERS, bytes: MAX_SCOPE_BYTES }
    }
}

impl ScopeUsage {
    /// What this scope keeps now.
    pub(super) fn of(&self, scope: &LockKey, keep_for: Duration, now: BootInstant) -> Used {
        let mut windows = self.0.lock();
        let part = windows.advance(keep_for, now);
        let [current, previous] =
            [&windows.current, &windows.previous].map(|window| window.get(scope).copied().unwrap_or_default());
        Used {
            answers: current.answers + previous.answers * (1.0 - part),
            bytes: current.bytes + previous.bytes * (1.0 - part),
        }
    }

    /// Counts one answer of this scope.
    pub(super) fn add(&self, scope: &LockKey, bytes: usize, keep_for: Duration, now: BootInstant) {
        let mut windows = self.0.lock();
        windows.advance(keep_for, now);
        // A scope beyond the bound of the table is not counted: many clients share the memory then.
        if windows.current.len() < MAX_SCOPES || windows.current.contains_key(scope) {
            let used = windows.current.entry(scope.clone()).or_default();
            used.answers += 1.0;
            used.bytes += bytes as f64;
        }
    }
}

impl Windows {
    /// Moves on to the window of this instant. Returns which part of it has passed.
    fn advance(&mut self, keep_for: Duration, now: BootInstant) -> f64 {
        let began = *self.began.get_or_insert(now);
        let passed = now.saturating_duration_since(began).as_secs_f64() / keep_for.as_secs_f64();
        if passed < 1.0 {
            return passed;
        }
        let current = std::mem::take(&mut self.current);
        self.previous = if passed < 2.0 { current } else { HashMap::new() };
        self.began = Some(if passed < 2.0 { began.saturating_add(keep_for) } else { now });
        (passed - 1.0).clamp(0.0, 1.0) * f64::from(u8::from(passed < 2.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEEP_FOR: Duration = Duration::from_secs(100);

    fn scope(n: usize) -> LockKey {
        LockKey::from(("user", n))
    }

    #[test]
    fn usage_fades_with_the_records() {
        let usage = ScopeUsage::default();
        let at = |seconds| BootInstant::default().saturating_add(Duration::from_secs(seconds));
        let used = |seconds| usage.of(&scope(1), KEEP_FOR, at(seconds)).answers;
        for _ in 0..100 {
            usage.add(&scope(1), 10, KEEP_FOR, at(50));
        }
        assert_eq!([50, 100, 149].map(used), [100.0; 3]);
        assert_eq!(usage.of(&scope(1), KEEP_FOR, at(149)).bytes, 1_000.0);
        assert_eq!(used(150), 100.0);
        assert!((49.0..51.0).contains(&used(200)), "half of its window has passed: {}", used(200));
        assert_eq!([250, 1_000].map(used), [0.0; 2]);
        assert_eq!(usage.of(&scope(2), KEEP_FOR, at(1_000)), Used::default());
    }

    #[test]
    fn number_of_scopes_is_bounded() {
        let usage = ScopeUsage::default();
        for n in 0..MAX_SCOPES + 10 {
            usage.add(&scope(n), 1, KEEP_FOR, BootInstant::default());
        }
        usage.add(&scope(0), 1, KEEP_FOR, BootInstant::default());
        assert_eq!(usage.0.lock().current.len(), MAX_SCOPES);
        assert_eq!(usage.of(&scope(0), KEEP_FOR, BootInstant::default()).answers, 2.0);
    }
}
