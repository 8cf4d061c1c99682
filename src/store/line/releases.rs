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
        let known = |own: &mut Own| (own.name.clone(), own.entry.clone(), own.state == State::Held, own.until <= now);
        let known = self.own(key, id, known);
        let (name, entry, is_held) = match known {
            None => return Ok(ReleaseReply::NotHolder),
            Some((name, Some(entry), is_held, false)) => (name, entry, is_held),
            // Its outcome is unknown, or it has ended.
            Some((name, ..)) => {
                self.end(key, &name).await?;
                return Ok(ReleaseReply::NotHolder);
            }
        };
        // It may have become the first one.
        if !is_held && !self.lines.line(key).await?.is_held_by(&entry.handle) {
            self.end(key, &name).await?;
            return Ok(ReleaseReply::NotHolder);
        }
        if !block_for.is_zero() {
            // From now on the end of the entry is no revocation.
            self.own(key, id, |own| own.state = State::Ending);
            let blocked = self.lines.block(key, &entry.handle, *block_for, None).await?;
            let mut table = self.table();
            table.remove(key, &name);
            let Some(handle) = blocked else { return Ok(ReleaseReply::NotHolder) };
            table.blocks.push((handle, now.saturating_add(*block_for)));
            self.changed.notify_one();
            return Ok(ReleaseReply::Freed);
        }
        Ok(match self.end(key, &name).await? {
            Some((true, line)) if line.entries.is_empty() => ReleaseReply::Freed,
            Some((true, _)) => ReleaseReply::HandedOff,
            Some((false, _)) | None => ReleaseReply::NotHolder,
        })
    }

    pub(super) async fn renew(&self, requests: &[RenewRequest]) -> Result<Vec<RenewReply>, L::Error> {
        let now = self.clock.now();
        let held = |own: &mut Own| {
            let entry = own.entry.as_ref().filter(|_| own.state == State::Held && own.until > now)?;
            Some((own.name.clone(), entry.handle.clone()))
        };
        let held = |request: &RenewRequest| self.own(&request.key, &request.id, held).flatten();
        let held: Vec<_> = requests.iter().map(held).collect();
        // The session has ended: the servers may be down, or refuse another one.
        if held.iter().all(Option::is_none) {
            return Ok(requests.iter().map(|_| RenewReply::NotHolder).collect());
        }
        let longest = requests.iter().map(|request| request.lease).max().unwrap_or_default();
        self.cover(now, longest).await?;
        let handles: Vec<_> = held.iter().flatten().map(|(_, handle)| handle.clone()).collect();
        let mut exist = self.lines.exist(&handles).await?.into_iter();
        let mut reply = |(request, held): (&RenewRequest, &Option<(String, String)>)| {
            let Some((name, _)) = held else { return RenewReply::NotHolder };
            if exist.next() != Some(true) {
                self.table().remove(&request.key, name);
                return RenewReply::NotHolder;
            }
            let until = now.saturating_add(request.lease);
            match self.alive(&request.key, name, |own| own.until = own.until.max(until)) {
                Ok(()) => RenewReply::Extended,
                Err(_) => RenewReply::NotHolder,
            }
        };
        Ok(requests.iter().zip(&held).map(&mut reply).collect())
    }
}
