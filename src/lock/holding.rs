//! What one process holds, for operators.

use std::time::Duration;

use serde::{Serialize, Serializer};

use super::{driver::Driver, status::whole_ms};
use crate::{acquisition::AcquisitionId, fencing::FencingToken, lock_key::LockKey};

/// A lock, a permit or a read that this process holds.
///
/// Returned by [`LockManager::holding`](crate::lock::LockManager::holding). [`Serialize`] is for an
/// admin page. The names of the fields are stable: `key`, `raw`, `id`, `fencing_token` (or null),
/// `limit`, `held_ms`, `remaining_ms`, `guards`, `waiting`.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Holding {
    /// The key.
    #[serde(flatten, serialize_with = "LockKey::serialize_fields")]
    pub key: LockKey,
    /// The acquisition that holds it.
    pub id: AcquisitionId,
    /// The fencing token. `None` for a permit and a read, which have none.
    #[serde(serialize_with = "as_number")]
    pub fencing_token: Option<FencingToken>,
    /// How many may hold the key at the same time, this holder included. One for a lock.
    pub limit: u16,
    /// The time since the grant, or since the local handoff.
    #[serde(rename = "held_ms", serialize_with = "as_ms")]
    pub held_for: Duration,
    /// How long it is held at least, if it is neither renewed nor released. Zero if it is lost, and
    /// its work has not ended yet.
    #[serde(rename = "remaining_ms", serialize_with = "as_ms")]
    pub remaining: Duration,
    /// The number of guards: its owner may have acquired it several times.
    pub guards: u32,
    /// The number of calls that wait for the key in this process.
    pub waiting: usize,
}

impl Driver {
    pub(super) fn holding(&self) -> Vec<Holding> {
        // The sections are read first: they start before the time that their age is measured at.
        let sections = self.sections();
        let now = self.now();
        let mut held: Vec<_> = sections
            .into_iter()
            .map(|(section, guards, waiting)| {
                let (grant, limit) = (&section.grant, section.grant.id.max_holders());
                Holding {
                    key: grant.key.clone(),
                    id: grant.id.clone(),
                    fencing_token: (limit == 1).then_some(section.token),
                    limit,
                    held_for: now.saturating_duration_since(section.started_at),
                    remaining: section.remaining(now),
                    guards,
                    waiting,
                }
            })
            .collect();
        held.sort_by(|a, b| b.held_for.cmp(&a.held_for).then_with(|| a.key.cmp(&b.key)));
        held
    }
}

fn as_ms<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(whole_ms(*time))
}

fn as_number<S: Serializer>(token: &Option<FencingToken>, serializer: S) -> Result<S::Ok, S::Error> {
    token.map(FencingToken::as_u64).serialize(serializer)
}
