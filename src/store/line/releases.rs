//! Releases and renewals.

use super::{
    lines::Lines,
    shared::Shared,
    table::{Own, State},
};
use crate::store::{ReleaseReply, ReleaseRequest, RenewReply, RenewRequest};

impl<L: Lines> Shared<L> {
    pub(super) async fn release(&self, request: &ReleaseRequest) -> Result<ReleaseReply, L::Error> {
        let ReleaseRequest { key, id, block_for, .. } = request;
        let now = self.clock.now();
        let known = self.own(key, id, |own| (own.entry.clone(), own.state == State::Held, own.until <= now));
        let (entry, is_held) = match known {
            None => return Ok(ReleaseReply::NotHolder),
            Some((Some(entry), is_held, false)) => (entry, is_held),
            // Its outcome is unknown, or it has ended.
            Some(_) => {
                self.end(key, id).await?;
                return Ok(ReleaseReply::NotHolder);
            }
        };
        // It may have become the first one.
        if !is_held && !self.lines.line(key).await?.is_held_by(&entry.handle) {
            self.end(key, id).await?;
            return Ok(ReleaseReply::NotHolder);
        }
        if !block_for.is_zero() {
            let blocked = self.lines.block(key, &entry.handle, *block_for, None).await?;
            let mut table = self.table();
            table.remove(key, id);
            let Some(handle) = blocked else { return Ok(ReleaseReply::NotHolder) };
            table.blocks.push((handle, now.saturating_add(*block_for)));
            self.changed.notify_one();
            return Ok(ReleaseReply::Freed);
        }
        Ok(match self.end(key, id).await? {
            Some((true, line)) if line.entries.is_empty() => ReleaseReply::Freed,
            Some((true, _)) => ReleaseReply::HandedOff,
            Some((false, _)) | None => ReleaseReply::NotHolder,
        })
    }

    pub(super) async fn renew(&self, requests: &[RenewRequest]) -> Result<Vec<RenewReply>, L::Error> {
        let now = self.clock.now();
        let longest = requests.iter().map(|request| request.lease).max().unwrap_or_default();
        self.cover(now, longest).await?;
        let held = |request: &RenewRequest| {
            let is_held = |own: &Own| own.state == State::Held && own.until > now;
            self.own(&request.key, &request.id, |own| own.entry.clone().filter(|_| is_held(own)))
        };
        let held: Vec<_> = requests.iter().map(|request| held(request).flatten().map(|entry| entry.handle)).collect();
        let handles: Vec<_> = held.iter().flatten().cloned().collect();
        let mut exist = self.lines.exist(&handles).await?.into_iter();
        let mut reply = |(request, handle): (&RenewRequest, &Option<String>)| {
            if handle.is_none() {
                return RenewReply::NotHolder;
            }
            if exist.next() != Some(true) {
                self.table().remove(&request.key, &request.id);
                return RenewReply::NotHolder;
            }
            let until = now.saturating_add(request.lease);
            match self.alive(&request.key, &request.id, |own| own.until = own.until.max(until)) {
                Ok(()) => RenewReply::Extended,
                Err(_) => RenewReply::NotHolder,
            }
        };
        Ok(requests.iter().zip(&held).map(&mut reply).collect())
    }
}
