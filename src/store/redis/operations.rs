//! The operations of the store: the script of each, and what its reply means.

use std::{sync::Arc, time::Duration};

use deadpool_redis::redis::{Value, make_extension_error};
use futures_util::future::join_all;

use super::{
    calls::{Call, Purpose, send},
    error::CallError,
    shared::Shared,
    topology::{Servers, connection::Replicated},
    wire::{self, InvalidName, KeyError, ScriptCall},
};
use crate::{
    clock::BootInstant,
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, DeleteRecordReply, ForceReleaseReply, ForceReleaseRequest, IfBusy, KeyStatus,
        ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreError, YieldReply, YieldRequest,
        remote::batching::{Outgoing, SendRequests, send_alone},
    },
};

/// Requests that share a script.
pub(super) struct Together<R> {
    pub(super) requests: Arc<[R]>,
    pub(super) called: BootInstant,
}

/// The renewals of one script, and whether their replies say which acquisitions newer ones replace.
pub(super) struct Renewals(pub(super) Arc<[RenewRequest]>, pub(super) bool);

/// A yield, and the instant of its call.
pub(super) struct Yield(pub(super) YieldRequest, pub(super) BootInstant);

pub(super) struct Inspect(pub(super) LockKey);

pub(super) struct DeleteRecord(pub(super) LockKey);

/// The replies to the requests of one script.
pub(super) type Each<T> = Vec<Result<T, CallError>>;

// === acquire ===

impl Call for Together<AcquireRequest> {
    const PURPOSE: Purpose = Purpose::Acquire;
    type Reply = Each<AcquireReply>;

    fn key(&self) -> &LockKey {
        &self.requests[0].key
    }

    fn managers(&self) -> Vec<&str> {
        let waiting = self.requests.iter().filter(|request| request.if_busy == IfBusy::Enqueue);
        waiting.map(|request| request.id.manager()).collect()
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName> {
        let expires_at = at.outbox.expires_at(self.called, valid_for(&self.requests));
        if at.messages.inbox.is_disconnected() {
            // A waiter would not be offered the key. A free key can still be acquired.
            let mut requests = self.requests.to_vec();
            requests.iter_mut().for_each(|request| request.if_busy = IfBusy::Fail);
            return at.server.keyspace.acquire(&requests, expires_at);
        }
        at.server.keyspace.acquire(&self.requests, expires_at)
    }

    fn reply(&self, at: &Shared, reply: &Value, replicated: Replicated) -> Result<Option<Self::Reply>, CallError> {
        let parsed = wire::parse_acquire(reply, self.requests.len())?;
        let Some(replies) = at.in_time(parsed, self.called, valid_for(&self.requests))? else { return Ok(None) };
        let check = |(request, reply): (&AcquireRequest, Result<AcquireReply, KeyError>)| {
            let reply = reply?;
            if request.key.is_raw() {
                at.messages.used_raw(&request.key, matches!(reply, AcquireReply::Queued { .. }));
            }
            at.warn_if_no_ttl(&reply);
            match reply {
                AcquireReply::Busy { .. } if request.if_busy == IfBusy::Enqueue => {
                    return Err(CallError::NotSubscribed);
                }
                // In doubt: it is released, unless a repeated call finds it replicated.
                AcquireReply::Granted { .. } => replicated?,
                _ => {}
            }
            Ok(reply)
        };
        Ok(Some(self.requests.iter().zip(replies).map(check).collect()))
    }
}

/// The shortest validity counts for all.
fn valid_for(requests: &[AcquireRequest]) -> Duration {
    requests.iter().map(|request| request.valid_for).min().unwrap_or_default()
}

// === release ===

impl Call for Together<ReleaseRequest> {
    const PURPOSE: Purpose = Purpose::Release;
    type Reply = Each<ReleaseReply>;

    fn key(&self) -> &LockKey {
        &self.requests[0].key
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName> {
        at.server.keyspace.release(&self.requests)
    }

    fn reply(&self, _: &Shared, reply: &Value, _: Replicated) -> Result<Option<Self::Reply>, CallError> {
        let replies = wire::parse_release(reply, self.requests.len())?;
        Ok(Some(replies.into_iter().map(|reply| Ok(reply?)).collect()))
    }
}

impl<R: Outgoing> SendRequests<R> for Shared
where
    Together<R>: Call<Reply = Each<R::Reply>>,
{
    /// The wait for replicas blocks the connection: a call beside another one would wait, too.
    fn shares_waits(&self) -> bool {
        Together::<R>::PURPOSE == Purpose::Acquire && self.server.min_replicas.is_some()
    }

    /// In one script, on a Cluster in one for each slot.
    async fn send(self: &Arc<Self>, requests: Vec<R>, called: BootInstant) -> Vec<Result<R::Reply, StoreError>> {
        let nodes = self.nodes();
        let slot_of = |request: &R| nodes.as_ref().map_or(0, |nodes| nodes.slot(request.key()));
        let mut slots: Vec<(u16, Vec<R>)> = Vec::new();
        let mut positions = Vec::with_capacity(requests.len());
        for request in requests {
            let slot = slot_of(&request);
            let position = slots.iter().position(|(known, _)| *known == slot).unwrap_or(slots.len());
            match slots.get_mut(position) {
                Some((_, requests)) => requests.push(request),
                None => slots.push((slot, vec![request])),
            }
            positions.push(position);
        }
        let calls: Vec<_> =
            slots.into_iter().map(|(_, requests)| Together { requests: requests.into(), called }).collect();
        let outcomes = send(self, &calls).await;
        let mut replies = Vec::new();
        for (Together { requests, .. }, (at, outcome)) in calls.into_iter().zip(outcomes) {
            let store_error = |error| at.server.store_error(R::OPERATION, error);
            let each: Vec<_> = match outcome {
                Ok(each) => each.into_iter().map(|reply| reply.map_err(store_error)).collect(),
                Err(error) if requests.len() > 1 && error.may_be_of_one_key() => {
                    send_alone(self, requests.to_vec(), called).await
                }
                Err(error) => {
                    let error = store_error(error);
                    requests.iter().map(|_| Err(error.clone())).collect()
                }
            };
            replies.push(each.into_iter());
        }
        positions.into_iter().filter_map(|position| replies[position].next()).collect()
    }
}

// === renew ===

/// Extends the leases: in one script for all keys of a server, on a Cluster in one for each key,
/// because a key whose slot moves is renewed where it is. A master that is down delays no renewal
/// at the others.
pub(super) async fn renew(
    servers: &Servers<Shared>,
    requests: Vec<RenewRequest>,
) -> Result<Vec<RenewReply>, StoreError> {
    let mut replies = vec![RenewReply::Unknown; requests.len()];
    let requests = requests.into_iter().enumerate();
    let (groups, keys_per_script) = match servers {
        Servers::One(only) => (vec![(Arc::clone(only), requests.collect())], usize::MAX),
        Servers::Cluster(nodes) => {
            nodes.load("renew").await?;
            (nodes.groups(requests, |(_, request)| &request.key).0, 1)
        }
    };
    let renewed = groups.into_iter().map(|(shared, requests): (Arc<Shared>, Vec<_>)| async move {
        let (indexes, requests): (Vec<usize>, Vec<RenewRequest>) = requests.into_iter().unzip();
        let renewals = |requests: &[RenewRequest]| Renewals(requests.into(), true);
        let calls: Vec<_> = requests.chunks(keys_per_script).map(renewals).collect();
        let outcomes = if keys_per_script == 1 && !shared.server.renew_conn.link.is_connected() {
            // Not waited for: the renewals at the other masters are in the same call.
            calls.iter().map(|_| (Arc::clone(&shared), Err(CallError::ConnectTimeout))).collect()
        } else {
            send_renewals(&shared, &calls).await
        };
        let indexes: Vec<_> = indexes.chunks(keys_per_script).map(<[usize]>::to_vec).collect();
        indexes.into_iter().zip(outcomes)
    });
    let (mut failure, mut any_replied) = (None, false);
    for (indexes, (at, outcome)) in join_all(renewed).await.into_iter().flatten() {
        match outcome {
            Ok(renewed) => {
                any_replied = true;
                indexes.into_iter().zip(renewed).for_each(|(index, reply)| replies[index] = reply);
            }
            Err(error) => failure = Some(at.server.store_error("renew", error)),
        }
    }
    failure.filter(|_| !any_replied).map_or(Ok(replies), Err)
}

/// While a slot moves, a script with a lock and its queue is refused, and one with the lock is not.
async fn send_renewals(
    shared: &Arc<Shared>,
    calls: &[Renewals],
) -> Vec<(Arc<Shared>, Result<Vec<RenewReply>, CallError>)> {
    let mut outcomes = send(shared, calls).await;
    let of_replaceable = |call: &Renewals| call.0.iter().any(|request| request.id.is_replaceable());
    for (call, outcome) in calls.iter().zip(&mut outcomes) {
        if of_replaceable(call) && matches!(outcome.1, Err(CallError::ClusterChanges(_))) {
            let alone = Renewals(Arc::clone(&call.0), false);
            if let Some(again) = send(shared, &[alone]).await.pop() {
                *outcome = again;
            }
        }
    }
    outcomes
}

impl Call for Renewals {
    const PURPOSE: Purpose = Purpose::Renew;
    type Reply = Vec<RenewReply>;

    fn key(&self) -> &LockKey {
        &self.0[0].key
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName> {
        Ok(at.server.keyspace.renew(&self.0, self.1))
    }

    fn reply(&self, at: &Shared, reply: &Value, replicated: Replicated) -> Result<Option<Self::Reply>, CallError> {
        let is_sent = |request: &&RenewRequest| at.server.keyspace.lock(&request.key).is_ok();
        let sent = self.0.iter().filter(is_sent).count();
        let mut renewed = wire::parse_renew(reply, sent)?.into_iter();
        let renewal = |request| match is_sent(&request).then(|| renewed.next()).flatten() {
            // The deadline stays: a server that is promoted now may not know the new lease.
            Some(RenewReply::Extended | RenewReply::Superseded) if replicated.is_err() => RenewReply::Unknown,
            renewed => renewed.unwrap_or(RenewReply::NotHolder),
        };
        Ok(Some(self.0.iter().map(renewal).collect()))
    }
}

// === operations of one key ===

impl Call for Yield {
    const PURPOSE: Purpose = Purpose::Acquire;
    type Reply = YieldReply;

    fn key(&self) -> &LockKey {
        &self.0.key
    }

    fn managers(&self) -> Vec<&str> {
        vec![self.0.next_id.manager()]
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName> {
        at.server.keyspace.yield_to_queue(&self.0, at.outbox.expires_at(self.1, self.0.valid_for))
    }

    fn reply(&self, at: &Shared, reply: &Value, replicated: Replicated) -> Result<Option<Self::Reply>, CallError> {
        let reply = at.in_time(wire::parse_yield(reply)?, self.1, self.0.valid_for)?;
        match reply {
            Some(YieldReply::Extended { .. } | YieldReply::NotHolder(AcquireReply::Granted { .. })) => replicated?,
            Some(YieldReply::NotHolder(AcquireReply::Queued { .. })) if self.0.key.is_raw() => {
                at.messages.used_raw(&self.0.key, true);
            }
            _ => {}
        }
        Ok(reply)
    }
}

impl Call for DeleteRecord {
    /// A copy would delete a later record.
    const PURPOSE: Purpose = Purpose::Once;
    type Reply = DeleteRecordReply;

    fn key(&self) -> &LockKey {
        &self.0
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName> {
        at.server.keyspace.delete_record(&self.0)
    }

    fn reply(&self, _: &Shared, reply: &Value, _: Replicated) -> Result<Option<Self::Reply>, CallError> {
        Ok(Some(wire::parse_delete_record(reply)?))
    }
}

impl Call for Inspect {
    const PURPOSE: Purpose = Purpose::Release;
    type Reply = KeyStatus;

    fn key(&self) -> &LockKey {
        &self.0
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName> {
        at.server.keyspace.inspect(&self.0)
    }

    fn reply(&self, _: &Shared, reply: &Value, _: Replicated) -> Result<Option<Self::Reply>, CallError> {
        Ok(Some(wire::parse_inspect(reply)?))
    }
}

impl Call for ForceReleaseRequest {
    /// A copy would revoke the key from its next holder.
    const PURPOSE: Purpose = Purpose::Once;
    type Reply = ForceReleaseReply;

    fn key(&self) -> &LockKey {
        &self.key
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName> {
        at.server.keyspace.force(self)
    }

    fn reply(&self, _: &Shared, reply: &Value, _: Replicated) -> Result<Option<Self::Reply>, CallError> {
        Ok(Some(wire::parse_force(reply)?))
    }
}

impl From<KeyError> for CallError {
    fn from(KeyError(text): KeyError) -> Self {
        let (code, detail) = text.split_once(' ').unwrap_or((&text, ""));
        Self::Redis(make_extension_error(code.to_owned(), Some(detail.to_owned())))
    }
}
