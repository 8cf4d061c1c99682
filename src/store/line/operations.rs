//! The operations of an operator: inspect, list, revoke.

use std::time::{Duration, UNIX_EPOCH};

use futures_util::future::try_join_all;

use super::{
    lines::{Line, LineError, Lines},
    shared::Shared,
};
use crate::{
    acquisition::AcquisitionId,
    lock_key::LockKey,
    store::{
        Cursor, ForceReleaseReply, ForceReleaseRequest, Holder, KeyStatus, ListEntry, ListReply, ListRequest,
        StoreErrorKind, StoreEvent,
    },
};

impl<L: Lines> Shared<L> {
    pub(super) async fn inspect(&self, key: &LockKey) -> Result<KeyStatus, L::Error> {
        self.end_expired(Some(key)).await?;
        let line = self.lines.line(key).await?;
        self.status(key, &line).await
    }

    async fn status(&self, key: &LockKey, line: &Line) -> Result<KeyStatus, L::Error> {
        let lease_left = self.table().lease_left(key, line, self.lines.session_time(), self.clock.now());
        let Some(first) = line.entries.first().filter(|_| line.block.is_none()) else {
            return Ok(KeyStatus::new(None, lease_left, line.entries.len()));
        };
        let Some((fence, since_ms)) = self.lines.detail(&first.handle).await? else {
            return Ok(KeyStatus::new(None, Duration::ZERO, 0));
        };
        let holder = Holder::new(AcquisitionId::from_text(first.id()), fence);
        let since = UNIX_EPOCH + Duration::from_millis(since_ms);
        Ok(KeyStatus::new([holder.since(since)], lease_left, line.entries.len() - 1))
    }

    pub(super) async fn list(&self, request: &ListRequest) -> Result<ListReply, L::Error> {
        let page = self.lines.page(request.after.as_ref().map_or("", Cursor::as_str)).await?;
        let waits = |line: &Line| line.entries.len() > usize::from(line.block.is_none());
        let lines = page.lines.iter().filter(|(_, line)| !request.contended_only || waits(line));
        let statuses = try_join_all(lines.map(|(key, line)| async {
            let status = self.status(key, line).await?;
            Ok((status.waiting > 0 || !status.lease_left.is_zero()).then(|| ListEntry::new(key.clone(), status)))
        }));
        let entries: Vec<_> = statuses.await?.into_iter().flatten().collect();
        Ok(ListReply::new(entries, page.next.map(Cursor::new)))
    }

    pub(super) async fn force_release(&self, request: &ForceReleaseRequest) -> Result<ForceReleaseReply, L::Error> {
        let ForceReleaseRequest { key, block_for, holder, .. } = request;
        self.end_expired(Some(key)).await?;
        let line = self.lines.line(key).await?;
        let is_other = |id: &str| holder.as_ref().is_some_and(|holder| holder.to_string() != id);
        let revoked = |id: &str| {
            let id = AcquisitionId::from_text(id);
            let sink = self.table().sinks.get(id.manager()).cloned();
            if let Some(sink) = sink {
                sink.send(StoreEvent::Revoked { key: key.clone(), id: id.clone() });
            }
            Ok(ForceReleaseReply::Revoked { holders: vec![id] })
        };
        if let Some(block) = &line.block {
            return match &block.revoked {
                Some(id) if is_other(id) => Ok(ForceReleaseReply::Free),
                Some(id) => revoked(id),
                None if holder.is_some() => Ok(ForceReleaseReply::Free),
                None => {
                    self.lines.unblock(&block.handle).await?;
                    Ok(ForceReleaseReply::Unblocked { blocked_for: block.left })
                }
            };
        }
        let Some(first) = line.entries.first().filter(|first| !is_other(first.id())) else {
            return Ok(ForceReleaseReply::Free);
        };
        let has_ended = if block_for.is_zero() {
            self.lines.leave(key, &first.handle).await?.0
        } else if let Some(handle) = self.lines.block(key, &first.handle, *block_for, Some(first.id())).await? {
            self.table().blocks.push((handle, self.clock.now().saturating_add(*block_for)));
            self.changed.notify_one();
            true
        } else {
            false
        };
        if !has_ended {
            // Another acquisition may hold the key now, which the caller has not seen.
            return Err(L::Error::of(StoreErrorKind::Unavailable, "the holder has left the key during the call"));
        }
        self.table().remove(key, &first.name);
        revoked(first.id())
    }
}
