//! The deadline of a grant or a section, and after its end the reason.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{clock::BootInstant, error::LockLost};

/// A deadline, replaced by a reason at its end.
///
/// The end is final (I5): no later call changes the reason or sets another deadline.
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

    /// The reason of the end, or `None` before it.
    pub(super) fn end_reason(&self) -> Option<LockLost> {
        match self.get() {
            Deadline::At(_) => None,
            Deadline::Ended(reason) => Some(reason),
        }
    }

    /// The deadline, or an instant in the past after the end.
    pub(super) fn at(&self) -> BootInstant {
        match self.get() {
            Deadline::At(at) => at,
            Deadline::Ended(_) => BootInstant::default(),
        }
    }

    /// Ends it, unless it has ended.
    pub(super) fn end(&self, reason: LockLost) {
        while let Deadline::At(at) = self.get() {
            self.end_if(at, reason);
        }
    }

    /// Ends it, unless it has ended or the deadline has been extended since it was read.
    pub(super) fn end_if(&self, at: BootInstant, reason: LockLost) {
        let _ = self.0.compare_exchange(at.as_nanos(), reason as u64, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Lowers the deadline; a later `to` changes nothing.
    pub(super) fn lower(&self, to: BootInstant) {
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |raw| match Deadline::from_raw(raw) {
            Deadline::At(at) => Some(at.min(to).as_nanos()),
            Deadline::Ended(_) => None,
        });
    }

    /// Extends the deadline; an earlier `to` changes nothing. Returns `false` if it has ended, or
    /// if the deadline has passed at `now`.
    pub(super) fn extend(&self, to: BootInstant, now: BootInstant) -> bool {
        let extended = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |raw| match Deadline::from_raw(raw) {
            Deadline::At(at) if now < at => Some(at.max(to).as_nanos()),
            _ => None,
        });
        extended.is_ok()
    }
}

impl Deadline {
    /// The reasons in the order of their codes. The codes are instants in the first nanoseconds
    /// after boot, which no deadline is.
    const REASONS: [LockLost; 6] = [
        LockLost::Expired,
        LockLost::Revoked,
        LockLost::HoldLimitReached,
        LockLost::ShuttingDown,
        LockLost::Superseded,
        LockLost::Released,
    ];

    fn from_raw(raw: u64) -> Self {
        let reason = usize::try_from(raw).ok().and_then(|code| Self::REASONS.get(code));
        reason.map_or(Self::At(BootInstant::from_nanos(raw)), |reason| Self::Ended(*reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> BootInstant {
        BootInstant::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn each_end_reason_is_read_as_it_was_written() {
        for reason in Deadline::REASONS {
            let deadline = AtomicDeadline::new(at(10));
            deadline.end(reason);
            assert_eq!(deadline.end_reason(), Some(reason));
        }
    }

    #[test]
    fn the_first_end_reason_is_final() {
        let deadline = AtomicDeadline::new(at(10));
        assert_eq!((deadline.end_reason(), deadline.at()), (None, at(10)));
        deadline.end(LockLost::Revoked);
        deadline.end(LockLost::Released);
        assert!(!deadline.extend(at(20), at(1)), "it has ended");
        assert_eq!((deadline.end_reason(), deadline.at()), (Some(LockLost::Revoked), BootInstant::default()));
    }

    #[test]
    fn a_deadline_is_extended_in_time_and_never_shortened() {
        let deadline = AtomicDeadline::new(at(10));
        assert!(deadline.extend(at(20), at(9)) && deadline.extend(at(15), at(9)));
        assert_eq!(deadline.get(), Deadline::At(at(20)));
        assert!(!deadline.extend(at(40), at(20)), "it has passed");
        deadline.end_if(at(10), LockLost::Expired);
        assert_eq!(deadline.get(), Deadline::At(at(20)), "the deadline was extended");
    }
}
