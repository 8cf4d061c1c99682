//! One section: what runs under a grant, alone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{LockLost, grant::Grant, terms::Terms, told::Told};
use crate::{
    clock::Moment,
    lease::FencingToken,
    store::{Released, StoreError},
};
#[cfg(feature = "test-util")]
use crate::{key::LockKey, lease::OwnerId};

/// Shared by its guards and their views.
#[derive(Debug)]
pub struct Section {
    /// What it runs under.
    pub grant: Arc<Grant>,
    /// What it writes with.
    pub token: FencingToken,
    pub(super) terms: Terms,
    pub(super) began: Moment,
    limit: Moment,
    /// [`RUNS`](Self::RUNS), or the [code](LockLost::code) of why it is over. Its grant may go on with the next one.
    over: AtomicU64,
    /// Guards that somebody has.
    #[allow(dead_code, reason = "counted where a recorder is built in")]
    guards: AtomicU32,
    #[allow(dead_code, reason = "counted where a recorder is built in")]
    is_loss_counted: AtomicBool,
    /// To how many callers it was sent that have not taken it yet.
    undelivered: AtomicU32,
    /// What became of its give-back, for who waits to hear it.
    pub(super) outcome: Told<Result<Released, StoreError>>,
}

impl Section {
    const RUNS: u64 = u64::MAX;

    /// Begins now.
    pub(super) fn new(grant: Arc<Grant>, token: FencingToken, terms: Terms, now: Moment) -> Self {
        let limit = terms.limit(now);
        grant.section(limit);
        Self {
            grant,
            token,
            terms,
            began: now,
            limit,
            over: AtomicU64::new(Self::RUNS),
            guards: AtomicU32::new(0),
            is_loss_counted: AtomicBool::new(false),
            undelivered: AtomicU32::new(0),
            outcome: Told::new(),
        }
    }

    /// Of no key, and without an end.
    #[cfg(feature = "test-util")]
    pub(super) fn detached(key: LockKey, token: FencingToken, owner: OwnerId) -> Self {
        let grant = Grant::new(key, owner, token, Duration::ZERO, Duration::ZERO, Moment::NEVER);
        Self::new(Arc::new(grant), token, Terms::default(), Moment::default())
    }

    /// For how long it can be claimed at this moment that it is alone. Zero is for ever.
    pub fn remaining(&self, now: Moment) -> Duration {
        if self.over.load(Ordering::Acquire) != Self::RUNS {
            return Duration::ZERO;
        }
        let left = self.limit.since(now);
        if left.is_zero() {
            self.end(LockLost::LimitReached);
            return Duration::ZERO;
        }
        left.min(self.grant.remaining(now))
    }

    /// It is sent to one more caller. How many had not taken it yet.
    pub(super) fn sent(&self) -> u32 {
        // A count and nothing else: whether one caller has taken it is decided where it was sent to.
        self.undelivered.fetch_add(1, Ordering::Relaxed)
    }

    /// A caller has taken it, or never will.
    pub fn taken(&self) {
        self.undelivered.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn is_delivered(&self) -> bool {
        self.undelivered.load(Ordering::Relaxed) == 0
    }

    /// Why it is over; `None` while it is not.
    pub fn why(&self) -> Option<LockLost> {
        LockLost::from_code(self.over.load(Ordering::Acquire)).or_else(|| self.grant.why())
    }

    /// It is over, for this reason; if it is not yet.
    pub(super) fn end(&self, why: LockLost) {
        let _ = self.over.compare_exchange(Self::RUNS, why.code(), Ordering::AcqRel, Ordering::Acquire);
    }

    /// Somebody has one more guard of it. Whether it is the first one.
    #[allow(dead_code, reason = "counted where a recorder is built in")]
    pub(super) fn guard_begins(&self) -> bool {
        self.guards.fetch_add(1, Ordering::AcqRel) == 0
    }

    /// A guard of it is about to end. Whether it is the last one.
    #[allow(dead_code, reason = "counted where a recorder is built in")]
    pub(super) fn guard_ends(&self) -> bool {
        self.guards.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether it was lost: once, for whoever counts.
    #[allow(dead_code, reason = "counted where a recorder is built in")]
    pub(super) fn counts_as_lost(&self) -> bool {
        self.why().is_some_and(LockLost::is_loss) && !self.is_loss_counted.swap(true, Ordering::AcqRel)
    }
}
