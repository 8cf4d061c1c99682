//! Clients that hold a key with others: as one of two or four, or as readers.

use super::*;

/// How the clients of a simulation share their keys. The random numbers are separate, so that a
/// simulation without shares is the same as before.
pub(super) struct Shares(fastrand::Rng);

impl Shares {
    pub(super) const KEYS: u64 = 3;

    pub(super) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed ^ 0x0073_6861_7265))
    }

    pub(super) fn next(&mut self) -> Sharing {
        [Sharing::Alone, Sharing::Permit(2), Sharing::Permit(4), Sharing::Permit(4), Sharing::Reader]
            [self.0.usize(0..5)]
    }
}

/// How many may hold a key together with this acquisition.
pub(super) fn limit_of(id: &str) -> usize {
    id.split_once('/').map_or(1, |(_, limit)| limit.split(':').next().and_then(|limit| limit.parse().ok()).unwrap_or(1))
}

impl Simulation {
    /// Each new holder fits beside those that were there, in some order.
    pub(super) fn check_limits(&mut self, after: &KeyData, before: &KeyData, script: &str) {
        let is_new = |id: &String| before.holders.iter().all(|(holder, _)| holder != id);
        let (new, old): (Vec<_>, Vec<_>) = after.holders.iter().map(|(id, _)| id).partition(|id| is_new(id));
        let (mut new, old): (Vec<_>, Vec<_>) =
            (new.into_iter().filter(|id| !is_block(id)).map(|id| limit_of(id)).collect(), old);
        let blocks = after.holders.iter().filter(|(id, _)| is_new(id) && is_block(id)).count();
        new.sort_unstable();
        let has_alone = after.holders.iter().any(|(id, _)| limit_of(id) == 1);
        let fits = |(n, limit): (usize, &usize)| old.len() + blocks + n < *limit;
        if has_alone && after.holders.len() > 1 || !new.iter().enumerate().all(fits) {
            self.report_violation(format!("{script} leaves too many holders: {after:?} after {before:?}"));
        }
    }
}

/// Whether a holder is the rest of one that has ended.
pub(super) fn is_block(id: &str) -> bool {
    id.ends_with(":end") || id.ends_with(":forced")
}
