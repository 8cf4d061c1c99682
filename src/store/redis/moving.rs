//! A lock whose slot moves between two nodes of a Cluster.
//!
//! While a slot moves, a lock, its fence and its record may be on different nodes, and a move may
//! stop half-way. A script then grants the lock with an incomplete fence, and the caller fetches
//! what is on the other node: under the grant, so that no other one comes between.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    error::CallError,
    routing::{Purpose, Route},
    shared::Shared,
    wire::{self, ClusterRelease, Keyspace},
};
use crate::{
    acquisition::AcquisitionId,
    lock_key::LockKey,
    store::{AcquireReply, DeleteRecordReply, QueueConfig, Record, ReleaseReply, ReleaseRequest},
};

/// A grant without its fence.
pub(super) struct Incomplete<'a> {
    pub(super) key: &'a LockKey,
    pub(super) id: &'a AcquisitionId,
    /// The fence that the script has given it.
    pub(super) fence: u64,
    pub(super) queue: QueueConfig,
    /// A record stands in place of the grant.
    pub(super) takes_record: bool,
}

/// What a complete grant is.
pub(super) enum Completed {
    Granted { fence: u64 },
    Recorded(Record),
}

impl From<Completed> for AcquireReply {
    fn from(completed: Completed) -> Self {
        match completed {
            Completed::Granted { fence } => Self::Granted { fence },
            Completed::Recorded(record) => Self::Recorded(record),
        }
    }
}

/// Completes a grant. The record is read under the lock: nobody else leaves one meanwhile. So is
/// the fence: each grant after this one gets a larger one.
pub(super) async fn complete(
    route: &mut Route,
    grant: Incomplete<'_>,
    deadline: Instant,
) -> Result<Completed, CallError> {
    let Incomplete { key, id, fence, queue, takes_record } = grant;
    if takes_record && let Some((_, record)) = record_of(route, key, deadline).await? {
        // Such an acquisition holds nothing. If this fails, it is in doubt: its caller releases it.
        let request = ReleaseRequest::new(key.clone(), id.clone(), Duration::ZERO, queue);
        release(&mut route.beside(), &request, deadline).await?;
        return Ok(Completed::Recorded(record));
    }
    let mut fences = route.beside();
    let next_fence = |names: &Keyspace, _: &Shared| names.next_fence(key, fence);
    let (reply, _) = fences.execute(Purpose::Once, next_fence, deadline).await?;
    fences.check_fence(&reply);
    let fence = fences.parsed(Purpose::Once, wire::parse_next_fence(&reply))?;
    let complete = |names: &Keyspace, _: &Shared| names.complete(key, id, fence);
    let (reply, replicated) = route.execute(Purpose::Acquire, complete, deadline).await?;
    if !route.parsed(Purpose::Acquire, wire::parse_complete(&reply))? {
        // The lease has expired meanwhile, or the key was revoked.
        return Err(CallError::Expired);
    }
    replicated?;
    // An entry that stays behind would be offered the key after the move.
    leave_queue(route, key, id, deadline).await;
    Ok(Completed::Granted { fence })
}

/// Releases a lock. Its record is left first, where it belongs, if the node of the lock cannot keep
/// it.
pub(super) async fn release(
    route: &mut Route,
    request: &ReleaseRequest,
    deadline: Instant,
) -> Result<ReleaseReply, CallError> {
    let reply = release_with_record(route, request, deadline).await?;
    continue_release(route, request, reply, deadline).await
}

/// Continues a release after its first reply.
pub(super) async fn continue_release(
    route: &mut Route,
    request: &ReleaseRequest,
    reply: ClusterRelease,
    deadline: Instant,
) -> Result<ReleaseReply, CallError> {
    match (reply, &request.record) {
        (ClusterRelease::Done(reply), _) => Ok(reply),
        (ClusterRelease::QueueElsewhere, _) => {
            wake_queue(route, &request.key, deadline).await;
            Ok(ReleaseReply::Freed)
        }
        (ClusterRelease::RecordElsewhere, Some(record)) => {
            let mut records = route.beside();
            let write = |names: &Keyspace, _: &Shared| names.write_record(&request.key, &request.id, record);
            let (_, _) = records.execute(Purpose::Release, write, deadline).await?;
            let without = ReleaseRequest { record: None, ..request.clone() };
            let released = Box::pin(release(route, &without, deadline)).await?;
            if released == ReleaseReply::NotHolder {
                // The lock was lost between the two steps: its record must answer nobody.
                delete_record_alone(route, &request.key, Some(&request.id), deadline).await?;
            }
            Ok(released)
        }
        (ClusterRelease::RecordUnknown, Some(_)) => {
            let left_by = record_of(route, &request.key, deadline).await?.map(|(id, _)| id);
            Ok(match left_by {
                Some(id) if id == request.id.to_string() => ReleaseReply::RecordedBefore,
                _ => ReleaseReply::NotHolder,
            })
        }
        // Without a record no script sends them.
        (ClusterRelease::RecordElsewhere | ClusterRelease::RecordUnknown, None) => Ok(ReleaseReply::NotHolder),
    }
}

async fn release_with_record(
    route: &mut Route,
    request: &ReleaseRequest,
    deadline: Instant,
) -> Result<ClusterRelease, CallError> {
    let call = |names: &Keyspace, _: &Shared| names.release(std::slice::from_ref(request));
    let (reply, _) = route.execute(Purpose::Release, call, deadline).await?;
    route.check_fence(&reply);
    route.parsed(Purpose::Release, wire::parse_cluster_release(&reply))
}

/// Deletes the record of a key without a holder.
pub(super) async fn delete_record(
    route: &mut Route,
    key: &LockKey,
    deadline: Instant,
) -> Result<DeleteRecordReply, CallError> {
    let call = |names: &Keyspace, _: &Shared| names.delete_record(key);
    // Not repeated: a later record would be deleted.
    let (reply, _) = route.execute(Purpose::Once, call, deadline).await?;
    if let Some(reply) = route.parsed(Purpose::Once, wire::parse_delete_record(&reply))? {
        return Ok(reply);
    }
    let deleted = delete_record_alone(route, key, None, deadline).await?;
    Ok(if deleted { DeleteRecordReply::Deleted } else { DeleteRecordReply::NotFound })
}

async fn delete_record_alone(
    route: &Route,
    key: &LockKey,
    left_by: Option<&AcquisitionId>,
    deadline: Instant,
) -> Result<bool, CallError> {
    let mut records = route.beside();
    let delete = |names: &Keyspace, _: &Shared| names.delete_record_alone(key, left_by);
    let (reply, _) = records.execute(Purpose::Once, delete, deadline).await?;
    records.parsed(Purpose::Once, wire::parse_complete(&reply))
}

/// The record of a key, and the acquisition id that left it.
async fn record_of(route: &Route, key: &LockKey, deadline: Instant) -> Result<Option<(String, Record)>, CallError> {
    let mut records = route.beside();
    let read = |names: &Keyspace, _: &Shared| names.read_record(key);
    let (reply, _) = records.execute(Purpose::Release, read, deadline).await?;
    records.parsed(Purpose::Release, wire::parse_record(&reply))
}

/// Removes the entry of an acquisition from the queue of the former node. A hint: an error is
/// ignored.
async fn leave_queue(route: &Route, key: &LockKey, id: &AcquisitionId, deadline: Instant) {
    let leave = |names: &Keyspace, _: &Shared| names.leave_queue(key, id);
    let _ = route.beside().execute(Purpose::Once, leave, deadline).await;
}

/// Wakes the first waiter of a key that was freed. Otherwise it would ask with its next poll. A
/// hint: an error is ignored.
pub(super) async fn wake_queue(route: &Route, key: &LockKey, deadline: Instant) {
    let owner = route.owner().server.keyspace.clone();
    let wake = |_: &Keyspace, _: &Shared| owner.wake_queue(key);
    let _ = route.beside().execute(Purpose::Once, wake, deadline).await;
}
