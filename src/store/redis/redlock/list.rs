//! Statuses and listings: a majority holds each key that is held.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    group::{Answers, Group, STORE},
    node::Node,
};
use crate::{
    lock_key::LockKey,
    store::{
        Cursor, KeyStatus, ListEntry, ListReply, ListRequest, StoreError, StoreErrorKind,
        redis::{
            error::CallError,
            list::{MAX_SCANS, Phase, inspect_each, scan},
            operations::Inspect,
        },
    },
};

/// Inspects in flight, each at all servers.
const MAX_INSPECTS: usize = 64;

/// Position in a listing. A majority of the servers is scanned, one after the other: each key that
/// a majority holds is on one of them, whichever servers these are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    /// The servers that were scanned completely, one bit for each.
    done: u16,
    /// The server that is scanned.
    index: usize,
    /// The cursor of the `SCAN` there.
    scan: u64,
}

/// A lock that a server has.
struct Found {
    name: String,
    /// The servers that were scanned before.
    done: u16,
}

/// One page.
pub(super) async fn list(group: &Arc<Group>, request: &ListRequest) -> Result<ListReply, StoreError> {
    let start = Position { done: 0, index: 0, scan: 0 };
    let position = match request.after.as_ref() {
        None => Some(start),
        Some(cursor) => Position::parse(cursor).filter(|position| position.index < group.nodes.len()),
    };
    let unknown = || StoreError::new(STORE, "list", StoreErrorKind::Unsupported).with_source(CallError::InvalidCursor);
    let position = position.ok_or_else(unknown)?;
    if request.contended_only {
        // No server knows who waits.
        return Ok(ListReply::new(Vec::new(), None));
    }
    let (found, next) = group.scan_page(position, request.limit).await?;
    let entries = found.into_iter().map(|Found { name, done }| async move {
        let key = group.keyspace.parse_lock(&name);
        let (status, answers) = match group.inspect("list", &key).await {
            Ok(found) => found,
            // Another program has replaced the lock by another type.
            Err(error) if error.kind() == StoreErrorKind::Refused => return Ok(None),
            Err(error) => return Err(error),
        };
        let is_there = |index: usize| answers.keys[0].of(index).is_some_and(|status| !status.lease_left.is_zero());
        // It was listed as one of these.
        let was_listed = (0..group.nodes.len()).any(|index| done & 1 << index != 0 && is_there(index));
        let is_listed = !status.lease_left.is_zero() && !was_listed;
        Ok(is_listed.then(|| ListEntry::new(key, status)))
    });
    Ok(ListReply::new(inspect_each(entries, MAX_INSPECTS).await?, next.map(Position::cursor)))
}

impl Group {
    /// The status of a key, and the replies of the servers.
    pub(super) async fn inspect(
        &self,
        operation: &'static str,
        key: &LockKey,
    ) -> Result<(KeyStatus, Answers<KeyStatus>), StoreError> {
        let inspect = |node: Arc<Node>| {
            let inspect = Inspect(key.clone());
            async move { Ok(vec![Ok(node.call(inspect).await?)]) }
        };
        let (mut outcomes, answers) = self.ask(1, self.limit(), inspect, |_, replies| replies.decide()).await;
        match outcomes.swap_remove(0) {
            Ok(status) => Ok((status, answers)),
            Err(()) => Err(self.store_error(operation, 0, &answers)),
        }
    }

    /// The locks of one page, and the position of the next one.
    async fn scan_page(
        &self,
        mut position: Position,
        limit: usize,
    ) -> Result<(Vec<Found>, Option<Position>), StoreError> {
        // The inspects need the rest of the time.
        let scan_until = Instant::now() + self.timeouts.call / 3;
        let (mut found, mut failed) = (Vec::new(), 0_u16);
        for _ in 0..MAX_SCANS {
            let node = &self.nodes[position.index];
            let count = limit.saturating_sub(found.len()).max(1);
            match scan(&node.shared.server, Phase::Locks, position.scan, count, self.limit()).await {
                Ok((scan, names)) => {
                    found.extend(names.into_iter().map(|name| Found { name, done: position.done }));
                    position.scan = scan;
                    position.done |= u16::from(scan == 0) << position.index;
                }
                Err(error) => {
                    failed |= 1 << position.index;
                    if self.nodes.len() - servers_in(failed) < self.majority() {
                        return Err(node.shared.server.store_error("list", error));
                    }
                }
            }
            if servers_in(position.done) >= self.majority() {
                return Ok((found, None));
            }
            if position.done & 1 << position.index != 0 || failed & 1 << position.index != 0 {
                let is_next = |index: &usize| (position.done | failed) & 1 << index == 0;
                let index = (0..self.nodes.len()).find(is_next);
                position = Position { done: position.done, index: index.unwrap_or(0), scan: 0 };
            }
            if found.len() >= limit || Instant::now() >= scan_until {
                break;
            }
        }
        Ok((found, Some(position)))
    }
}

fn servers_in(set: u16) -> usize {
    set.count_ones() as usize
}

impl Position {
    fn cursor(self) -> Cursor {
        let Self { done, index, scan } = self;
        Cursor::new(format!("{done}:{index}:{scan}"))
    }

    fn parse(cursor: &Cursor) -> Option<Self> {
        let [done, index, scan] = cursor.as_str().split(':').collect::<Vec<_>>()[..] else { return None };
        Some(Self { done: done.parse().ok()?, index: index.parse().ok()?, scan: scan.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_in_a_listing_has_a_text() {
        let position = Position { done: 0b101, index: 1, scan: u64::MAX };
        assert_eq!(Position::parse(&position.cursor()), Some(position));
        for other in ["", "1:2", "1:2:x", "1:2:3:4", "-1:0:0", "l7", "99999:0:0"] {
            assert_eq!(Position::parse(&Cursor::new(other)), None, "{other}");
        }
    }
}
