//! Listing: a `SCAN` for locks, one for queues, and an inspect of each lock that they find.

use std::{future::ready, sync::Arc};

use deadpool_redis::redis::cmd;
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::time::Instant;

use super::{
    error::CallError,
    shared::Shared,
    topology::{Servers, server::Server},
    wire,
};
use crate::store::{Cursor, KeyStatus, ListEntry, ListReply, ListRequest, StoreError};

/// The `SCAN`s of one page at most: names of other programs fill no page, and cost time.
pub(super) const MAX_SCANS: usize = 100;
/// Inspects in flight.
const MAX_INSPECTS: usize = 256;

/// Position in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Position {
    phase: Phase,
    /// The cursor of the `SCAN`.
    scan: u64,
    /// The id of a node of a Cluster; empty if there is one server.
    node: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The locks of composed keys, which have the prefix.
    Locks,
    /// The queues. They are the only trace of a free key with waiters, and the only one with the
    /// prefix of a raw key.
    Queues,
}

/// One page.
pub(super) async fn list(servers: &Servers<Shared>, request: &ListRequest) -> Result<ListReply, StoreError> {
    let mut all = servers.known("list").await?;
    all.sort_unstable_by(|a, b| a.list_name().cmp(b.list_name()));
    let first_phase = if request.contended_only { Phase::Queues } else { Phase::Locks };
    let first_of = |shared: &Arc<Shared>| {
        let node = shared.list_name().to_owned();
        Position { phase: first_phase, scan: 0, node }
    };
    let is_of_cluster = all[0].server.is_cluster();
    let position = match request.after.as_ref().map(Position::parse) {
        None => first_of(&all[0]),
        Some(Some(position)) if position.node.is_empty() != is_of_cluster => position,
        Some(_) => return Err(all[0].server.store_error("list", CallError::InvalidCursor)),
    };
    // In place of a node that has left the Cluster, the next one is listed.
    let at = all.partition_point(|shared| *shared.list_name() < *position.node);
    let Some(shared) = all.get(at) else { return Ok(ListReply::new(Vec::new(), None)) };
    let position = if shared.list_name() == position.node { position } else { first_of(shared) };
    let deadline = shared.server.timeouts.call_deadline();
    let page = page_of(shared, position, request, deadline).await;
    let (entries, next) = page.map_err(|error| shared.server.store_error("list", error))?;
    let next = next.or_else(|| all.get(at + 1).map(first_of));
    Ok(ListReply::new(entries, next.map(Position::cursor)))
}

/// A page of one server, and the next position on it.
async fn page_of(
    shared: &Shared,
    mut position: Position,
    request: &ListRequest,
    deadline: Instant,
) -> Result<(Vec<ListEntry>, Option<Position>), CallError> {
    let server = &*shared.server;
    // The inspects need the rest of the time.
    let began = Instant::now();
    let scan_until = began + deadline.saturating_duration_since(began) / 3;
    let mut found = Vec::new();
    let mut next = Some(position.clone());
    for _ in 0..MAX_SCANS {
        let (cursor, names) =
            scan(server, position.phase, position.scan, request.limit - found.len(), deadline).await?;
        position.scan = cursor;
        found.extend(names.into_iter().map(|name| (position.phase, name)));
        next = position.clone().following();
        match &next {
            Some(following) if found.len() < request.limit && Instant::now() < scan_until => {
                position = following.clone();
            }
            _ => break,
        }
    }
    let inspects = found.into_iter().map(|(phase, name)| async move {
        let Some(status) = inspect(server, &name, deadline).await? else { return Ok(None) };
        let key = server.keyspace.parse_lock(&name);
        let is_listed = match phase {
            _ if request.contended_only => status.waiting > 0,
            Phase::Locks => !is_free(&status),
            // The others are found by their locks.
            Phase::Queues => status.waiting > 0 && (key.is_raw() || is_free(&status)),
        };
        Ok::<_, CallError>(is_listed.then(|| ListEntry::new(key, status)))
    });
    Ok((inspect_each(inspects, MAX_INSPECTS).await?, next))
}

/// One `SCAN` for the names of a phase. Returns its next cursor, and the names of locks.
pub(super) async fn scan(
    server: &Server,
    phase: Phase,
    cursor: u64,
    count: usize,
    deadline: Instant,
) -> Result<(u64, Vec<String>), CallError> {
    let keyspace = &server.keyspace;
    let mut command = cmd("SCAN");
    command.arg(cursor).arg("COUNT").arg(count).arg("MATCH");
    match phase {
        // A hash, or a sorted set.
        Phase::Locks => command.arg(keyspace.lock_pattern()),
        Phase::Queues => command.arg(keyspace.queue_pattern()).arg("TYPE").arg("list"),
    };
    let (cursor, mut names) = wire::parse_scan(&server.release_conn.command(&command, deadline).await?)?;
    if phase == Phase::Queues {
        names = names.iter().filter_map(|queue| keyspace.lock_of_queue(queue)).map(str::to_owned).collect();
    }
    Ok((cursor, names))
}

/// The entries of the locks that were found, which are inspected side by side.
pub(super) async fn inspect_each<E>(
    inspects: impl Iterator<Item = impl Future<Output = Result<Option<ListEntry>, E>>>,
    at_once: usize,
) -> Result<Vec<ListEntry>, E> {
    stream::iter(inspects).buffered(at_once).try_filter_map(|entry| ready(Ok(entry))).try_collect().await
}

/// The status of a lock. `None`: it is of another program, or its queue is of another type.
async fn inspect(server: &Server, lock: &str, deadline: Instant) -> Result<Option<KeyStatus>, CallError> {
    let call = server.keyspace.inspect_name(lock.into());
    match server.release_conn.script(&call, deadline).await {
        Ok(reply) => Ok(Some(wire::parse_inspect(&reply)?)),
        Err(CallError::Redis(error)) if error.code() == Some("WRONGTYPE") => Ok(None),
        // The lock moves, or has moved to another node.
        Err(CallError::Redis(error)) if server.is_cluster() && CallError::is_of_cluster(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Shared {
    /// The name of a server in a cursor; empty for the only one.
    fn list_name(&self) -> &str {
        self.server.keyspace.node_id().unwrap_or_default()
    }
}

fn is_free(status: &KeyStatus) -> bool {
    status.lease_left.is_zero() && status.holders.is_empty()
}

impl Position {
    /// The position after a `SCAN`. `None`: it was the last one of its server.
    fn following(self) -> Option<Self> {
        match self {
            Self { scan: 0, phase: Phase::Locks, node } => Some(Self { phase: Phase::Queues, scan: 0, node }),
            Self { scan: 0, phase: Phase::Queues, .. } => None,
            position => Some(position),
        }
    }

    fn cursor(self) -> Cursor {
        let phase = match self.phase {
            Phase::Locks => 'l',
            Phase::Queues => 'q',
        };
        Cursor::new(format!("{phase}{}{}{}", self.scan, if self.node.is_empty() { "" } else { "-" }, self.node))
    }

    fn parse(cursor: &Cursor) -> Option<Self> {
        let (phase, rest) = cursor.as_str().split_at_checked(1)?;
        let phase = match phase {
            "l" => Phase::Locks,
            "q" => Phase::Queues,
            _ => return None,
        };
        let (scan, node) = rest.split_once('-').unwrap_or((rest, ""));
        Some(Self { phase, scan: scan.parse().ok()?, node: node.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listing_has_two_phases_and_an_end() {
        let at = |phase, scan| Position { phase, scan, node: String::new() };
        assert_eq!(at(Phase::Locks, 7).following(), Some(at(Phase::Locks, 7)));
        assert_eq!(at(Phase::Locks, 0).following(), Some(at(Phase::Queues, 0)));
        assert_eq!(at(Phase::Queues, 0).following(), None);
        let of_node = Position { node: "0a1b".to_owned(), ..at(Phase::Queues, 7) };
        for position in [at(Phase::Locks, 0), at(Phase::Queues, u64::MAX), of_node] {
            assert_eq!(Position::parse(&position.clone().cursor()), Some(position));
        }
        for other in ["", "7", "l", "lx", "é7", "cn:1"] {
            assert_eq!(Position::parse(&Cursor::new(other)), None, "{other}");
        }
    }
}
