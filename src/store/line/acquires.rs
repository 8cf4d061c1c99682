//! Acquires and yields.

use std::time::Duration;

use super::{
    lines::{Line, LineError, Lines, OwnEntry},
    shared::Shared,
    table::{Own, State},
};
use crate::{
    clock::BootInstant,
    lock_key::LockKey,
    store::{AcquireReply, AcquireRequest, IfBusy, StoreErrorKind, YieldReply, YieldRequest},
};

/// After a call has expired, its entry is purged.
const UNKNOWN_FOR: Duration = Duration::from_secs(1);

impl<L: Lines> Shared<L> {
    pub(super) async fn acquire(
        &self,
        request: &AcquireRequest,
        called: BootInstant,
    ) -> Result<AcquireReply, L::Error> {
        let AcquireRequest { key, id, lease, if_busy, queue, valid_for, .. } = request;
        let expires = called.saturating_add(*valid_for);
        self.in_time(expires)?;
        self.cover(called, *lease).await?;
        self.end_expired(Some(key)).await?;
        let (name, entry, line) = match self.known(request).await? {
            Some(known) => known,
            None => {
                let begun = self.table().begin(key, id, expires.saturating_add(UNKNOWN_FOR), queue.offer_ttl);
                let name = begun.ok_or_else(ended::<L>)?;
                self.in_time(expires)?;
                let reads = *if_busy == IfBusy::Fail && self.table().may_be_busy(key, self.clock.now());
                let (joined, line) = self.lines.join(key, &name, reads).await?;
                let Some(entry) = joined else {
                    self.table().remove(key, &name);
                    self.table().found_busy(key, self.clock.now());
                    return Ok(AcquireReply::busy(self.lease_left(request, &line)));
                };
                self.made(key, &name, &entry)?;
                (name, entry, line)
            }
        };
        let before = line.before(&entry.handle).ok_or_else(ended::<L>)?;
        if before == 0 && line.block.is_none() {
            if let Err(expired) = self.in_time(expires) {
                self.end(key, &name).await?;
                return Err(expired);
            }
            let until = self.clock.now().saturating_add(*lease);
            self.alive(key, &name, |own| {
                own.until = if own.state == State::Held { own.until.max(until) } else { until };
                own.state = State::Held;
            })?;
            self.changed.notify_one();
            return Ok(AcquireReply::granted(entry.fence));
        }
        self.wait(request, &name, &line, before).await
    }

    /// The entry that an earlier call has made, and its line.
    async fn known(&self, request: &AcquireRequest) -> Result<Option<(String, OwnEntry, Line)>, L::Error> {
        let AcquireRequest { key, id, .. } = request;
        let known = |own: &mut Own| (own.name.clone(), own.entry.clone().filter(|_| own.state != State::Ending));
        match self.own(key, id, known) {
            None => Ok(None),
            Some((name, None)) => {
                self.end(key, &name).await?;
                Ok(None)
            }
            Some((name, Some(entry))) => {
                let line = self.lines.line(key).await?;
                if line.before(&entry.handle).is_some() {
                    return Ok(Some((name, entry, line)));
                }
                // It was revoked.
                self.table().remove(key, &name);
                Ok(None)
            }
        }
    }

    /// The entry is not the first one.
    async fn wait(
        &self,
        request: &AcquireRequest,
        name: &str,
        line: &Line,
        before: usize,
    ) -> Result<AcquireReply, L::Error> {
        let AcquireRequest { key, if_busy, queue, .. } = request;
        let lease_left = self.lease_left(request, line);
        let ahead = before - usize::from(line.block.is_none());
        let refused = match if_busy {
            IfBusy::Fail => {
                self.table().found_busy(key, self.clock.now());
                Some(AcquireReply::busy(lease_left))
            }
            _ if ahead >= queue.capacity => Some(AcquireReply::QueueFull { lease_left, waiting: ahead }),
            IfBusy::Enqueue => None,
        };
        if let Some(refused) = refused {
            self.end(key, name).await?;
            return Ok(refused);
        }
        let until = self.clock.now().saturating_add(queue.entry_ttl);
        self.alive(key, name, |own| (own.state, own.until) = (State::Waiting, until))?;
        if let Some(predecessor) = line.predecessor(before) {
            self.watch(key, name, predecessor).await?;
        }
        Ok(AcquireReply::Queued { ahead, lease_left, poll_in: None, held_by: None })
    }

    pub(super) async fn yield_to_queue(
        &self,
        request: &YieldRequest,
        called: BootInstant,
    ) -> Result<YieldReply, L::Error> {
        let YieldRequest { key, id, fence, next_id, lease, queue, valid_for, .. } = request;
        let expires = called.saturating_add(*valid_for);
        self.in_time(expires)?;
        let next = AcquireRequest::new(key.clone(), next_id.clone(), *lease, IfBusy::Enqueue, *queue, *valid_for);
        self.cover(called, *lease).await?;
        self.end_expired(Some(key)).await?;
        let acquire = async || Ok(YieldReply::NotHolder(self.acquire(&next, called).await?));
        let held = |own: &mut Own| (own.state == State::Held).then(|| (own.name.clone(), own.entry.clone()));
        let Some((name, Some(entry))) = self.own(key, id, held).flatten() else { return acquire().await };
        let line = self.lines.line(key).await?;
        if !line.is_held_by(&entry.handle) {
            self.table().remove(key, &name);
            return acquire().await;
        }
        let extended = |fence| {
            let until = self.clock.now().saturating_add(*lease);
            self.alive(key, &name, |own| own.until = own.until.max(until))?;
            Ok(YieldReply::Extended { fence })
        };
        // A copy of an executed yield: a section may run under the new fence.
        if entry.fence != *fence {
            return extended(entry.fence);
        }
        if line.entries.len() > 1 || self.own(key, next_id, |_| ()).is_some() {
            self.end(key, &name).await?;
            return acquire().await;
        }
        // Before the call, whose reply may be lost.
        self.alive(key, &name, |own| own.entry = None)?;
        let Some((new, line)) = self.lines.replace(key, &entry.handle, &name).await? else {
            self.table().remove(key, &name);
            return acquire().await;
        };
        self.made(key, &name, &new)?;
        if line.is_held_by(&new.handle) {
            return extended(new.fence);
        }
        // A waiter came in between.
        self.end(key, &name).await?;
        acquire().await
    }

    /// A call has made an entry. Fails if the call has ended since, and the entry was removed.
    fn made(&self, key: &LockKey, name: &str, entry: &OwnEntry) -> Result<(), L::Error> {
        self.table().made(key, name, entry).then_some(()).ok_or_else(ended::<L>)
    }

    fn in_time(&self, expires: BootInstant) -> Result<(), L::Error> {
        if self.clock.now() > expires {
            return Err(L::Error::of(StoreErrorKind::Timeout, "the call has expired"));
        }
        Ok(())
    }

    fn lease_left(&self, request: &AcquireRequest, line: &Line) -> Duration {
        self.table().lease_left(&request.key, line, self.lines.session_time(), self.clock.now())
    }
}

fn ended<L: Lines>() -> L::Error {
    L::Error::of(StoreErrorKind::Unavailable, "the acquisition ended during the call")
}
