//! Raises that a server executes after the release of their acquisition.
//!
//! Acquires and releases have connections of their own. If that of the acquires is slow at one
//! server, it may execute the release first, and find nothing, and then the vote and the raise. The
//! lock would stay there for a lease. So a release that has found nothing beside a raise under way
//! is repeated when the raise was executed.

use std::collections::HashMap;

use crate::{
    acquisition::AcquisitionId,
    store::{
        ReleaseReply, ReleaseRequest,
        redis::wire::{KeyError, Raised},
    },
    sync::Mutex,
};

/// The acquisitions with raises under way at one server, or with a release beside one.
#[derive(Debug, Default)]
pub(super) struct LateRaises(Mutex<HashMap<AcquisitionId, Entry>>);

#[derive(Debug, Default)]
struct Entry {
    /// The raises under way.
    raises: usize,
    /// The releases under way.
    releases: usize,
    /// Whether a raise has found the vote, or may have.
    is_held: bool,
    /// A release that has found nothing, or may have.
    missed: Option<ReleaseRequest>,
}

type Replies<T> = [Result<T, KeyError>];

impl LateRaises {
    /// A raise of these acquisitions is sent. It ends with [`raised`](Self::raised).
    pub(super) fn raise<'a>(&self, ids: impl Iterator<Item = &'a AcquisitionId>) {
        let mut entries = self.0.lock();
        ids.for_each(|id| entries.entry(id.clone()).or_default().raises += 1);
    }

    /// A raise was answered, or is not waited for. Returns the releases to repeat.
    pub(super) fn raised<'a>(
        &self,
        ids: impl Iterator<Item = &'a AcquisitionId>,
        replies: Option<&Replies<Raised>>,
    ) -> Vec<ReleaseRequest> {
        let mut entries = self.0.lock();
        let end = |(at, id): (usize, &AcquisitionId)| {
            let entry = entries.get_mut(id)?;
            entry.raises -= 1;
            entry.is_held |= replies.is_none_or(|replies| matches!(replies[at], Ok(Raised::Held { .. }) | Err(_)));
            settle(&mut entries, id)
        };
        ids.enumerate().filter_map(end).collect()
    }

    /// These releases are sent. They end with [`released`](Self::released).
    pub(super) fn release(&self, requests: &[ReleaseRequest]) {
        let mut entries = self.0.lock();
        for request in requests {
            if let Some(entry) = entries.get_mut(&request.id) {
                entry.releases += 1;
            }
        }
    }

    /// Releases were answered, or are not waited for. Returns those to repeat.
    pub(super) fn released(
        &self,
        requests: &[ReleaseRequest],
        replies: Option<&Replies<ReleaseReply>>,
    ) -> Vec<ReleaseRequest> {
        let mut entries = self.0.lock();
        let end = |(at, request): (usize, &ReleaseRequest)| {
            let entry = entries.get_mut(&request.id).filter(|entry| entry.releases > 0)?;
            entry.releases -= 1;
            // It has found the vote: a raise after it finds none.
            let has_found =
                replies.is_some_and(|replies| matches!(replies[at], Ok(ReleaseReply::Freed | ReleaseReply::HandedOff)));
            entry.missed = entry.missed.take().or_else(|| (!has_found).then(|| request.clone()));
            settle(&mut entries, &request.id)
        };
        requests.iter().enumerate().filter_map(end).collect()
    }
}

/// Forgets an acquisition without calls. Returns its release if that must be repeated.
fn settle(entries: &mut HashMap<AcquisitionId, Entry>, id: &AcquisitionId) -> Option<ReleaseRequest> {
    if entries.get(id).is_some_and(|entry| entry.raises + entry.releases > 0) {
        return None;
    }
    let Entry { is_held, missed, .. } = entries.remove(id)?;
    missed.filter(|_| is_held)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{acquisition::AcquisitionIds, lock_key::LockKey, proto::QUEUE};

    /// The release is sent while the raise is under way. Which reply comes first does not matter.
    #[test]
    fn release_that_found_nothing_is_repeated_after_the_raise() {
        use ReleaseReply::{Freed, NotHolder};

        let held = || Some(Ok(Raised::Held { fence: 7 }));
        for (raised, released, is_repeated) in [
            (held(), Some(Ok(NotHolder)), true),
            (held(), None, true),
            (None, Some(Ok(NotHolder)), true),
            (held(), Some(Ok(Freed)), false),
            (None, Some(Ok(Freed)), false),
            (Some(Ok(Raised::NotHolder)), Some(Ok(NotHolder)), false),
        ] {
            for is_raised_first in [false, true] {
                let (late, id) = (LateRaises::default(), AcquisitionIds::new("a", 1).next());
                let release = [ReleaseRequest::new(LockKey::from(("k",)), id.clone(), Duration::ZERO, QUEUE)];
                let raised = || late.raised([&id].into_iter(), raised.as_ref().map(std::slice::from_ref));
                let released = || late.released(&release, released.as_ref().map(std::slice::from_ref));
                late.raise([&id].into_iter());
                late.release(&release);
                let repeated = if is_raised_first { [raised(), released()] } else { [released(), raised()] };
                let ids: Vec<_> = repeated.concat().into_iter().map(|request| request.id).collect();
                assert_eq!(ids, if is_repeated { vec![id] } else { vec![] }, "raised first: {is_raised_first}");
                assert!(late.0.lock().is_empty());
            }
        }
    }

    #[test]
    fn release_after_its_raise_is_sent_once() {
        let (late, id) = (LateRaises::default(), AcquisitionIds::new("a", 1).next());
        let release = [ReleaseRequest::new(LockKey::from(("k",)), id.clone(), Duration::ZERO, QUEUE)];
        late.raise([&id].into_iter());
        assert_eq!(late.raised([&id].into_iter(), Some(&[Ok(Raised::Held { fence: 7 })])).len(), 0);
        late.release(&release);
        assert_eq!(late.released(&release, Some(&[Ok(ReleaseReply::NotHolder)])).len(), 0);
        assert!(late.0.lock().is_empty());
    }
}
