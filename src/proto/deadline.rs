//! The deadline of a grant or a section, and after its end the reason.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{clock::BootInstant, error::LockLost};

/// The deadline until which something may be counted on; the reason of its end once it has ended.
///
/// The end is final (I5): no later call changes the reason or sets a deadline again.
#[derive(Debug)]
pub(super) struct AtomicDeadline(AtomicU64);

/// The content of an [`AtomicDeadline`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deadline {
    At(BootInstant),
    Ended(LockLost),
}

impl AtomicDeadline {
    pub(super) fn new(at: BootInstant) -> Self {
        Self(AtomicU64::new(at.as_nanos()))
    }

    pub(super) fn get(&self) -> Deadline {
        Deadline::from_raw(self.0.load(Ordering::Acquire))
    }

    /// Why it has ended. `None` while it has not.
    pub(super) fn end_reason(&self) -> Option<LockLost> {
        match self.get() {
            Deadline::At(_) => None,
            Deadline::Ended(why) => Some(why),
        }
    }

    /// The deadline; the past after the end.
    pub(super) fn at(&self) -> BootInstant {
        match self.get() {
            Deadline::At(at) => at,
            Deadline::Ended(_) => BootInstant::default(),
        }
    }

    /// Ends it, unless it has ended.
    pub(super) fn end(&self, why: LockLost) {
        while let Deadline::At(at) = self.get() {
            self.end_if(at, why);
        }
    }

    /// Ends it, unless it has ended or its deadline was moved meanwhile.
    pub(super) fn end_if(&self, at: BootInstant, why: LockLost) {
        let _ = self.0.compare_exchange(at.as_nanos(), why.code(), Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Moves the deadline, never to an earlier instant. Returns `false` if it has ended or has passed
    /// at this instant: too late is too late.
    pub(super) fn extend(&self, to: BootInstant, now: BootInstant) -> bool {
        let extended = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |raw| match Deadline::from_raw(raw) {
            Deadline::At(at) if now < at => Some(at.max(to).as_nanos()),
            _ => None,
        });
        extended.is_ok()
    }
}

impl Deadline {
    /// The codes of the reasons are instants in the first nanoseconds after boot, which no deadline
    /// is.
    fn from_raw(raw: u64) -> Self {
        LockLost::from_code(raw).map_or(Self::At(BootInstant::from_nanos(raw)), Self::Ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> BootInstant {
        BootInstant::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn first_loss_reason_is_kept() {
        let deadline = AtomicDeadline::new(at(10));
        assert_eq!((deadline.end_reason(), deadline.at()), (None, at(10)));
        deadline.end(LockLost::Revoked);
        deadline.end(LockLost::Released);
        assert!(!deadline.extend(at(20), at(1)), "it has ended");
        assert_eq!((deadline.end_reason(), deadline.at()), (Some(LockLost::Revoked), BootInstant::default()));
    }

    #[test]
    fn deadline_is_extended_in_time_and_never_moved_back() {
        let deadline = AtomicDeadline::new(at(10));
        assert!(deadline.extend(at(20), at(9)) && deadline.extend(at(15), at(9)));
        assert_eq!(deadline.get(), Deadline::At(at(20)));
        assert!(!deadline.extend(at(40), at(20)), "it has passed");
        deadline.end_if(at(10), LockLost::Expired);
        assert_eq!(deadline.get(), Deadline::At(at(20)), "it was moved meanwhile");
    }
}
