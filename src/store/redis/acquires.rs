//! Calls for acquires: many requests share one.

use std::{collections::HashSet, sync::Arc, time::Duration};

use deadpool_redis::redis::Value;
use futures_util::future::join_all;
use tokio::time::Instant;

use super::{
    error::CallError,
    moving::{Incomplete, complete},
    routing::{InTime, Route},
    shared::Shared,
    topology::{Nodes, connection::Replicated, server::Server},
    wire::{self, FreeGrants, KeyError, Keyspace, UnexpectedReply},
};
use crate::{
    clock::BootInstant,
    limits::MAX_WAITING_REQUESTS,
    store::{
        AcquireReply, AcquireRequest, IfBusy, StoreError,
        remote::batching::{SendRequests, SharedCalls, send_alone},
    },
};

impl SendRequests<AcquireRequest> for Shared {
    type Reply = AcquireReply;

    const STORE: &'static str = "redis";
    const OPERATION: &'static str = "acquire";

    const MAX_WAITING: usize = MAX_WAITING_REQUESTS;

    fn calls(&self) -> &SharedCalls<AcquireRequest, AcquireReply> {
        &self.acquires
    }

    /// The wait for replicas blocks the connection: a call beside another one would wait, too.
    fn shares_waits(&self) -> bool {
        self.server.min_replicas.is_some()
    }

    /// The rest of its validity is left for the call.
    fn may_wait(request: &AcquireRequest) -> Option<Duration> {
        Some(request.valid_for / 2)
    }

    async fn send(
        self: &Arc<Self>,
        mut requests: Vec<AcquireRequest>,
        called: BootInstant,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        let waiting = requests.iter().filter(|request| request.if_busy == IfBusy::Enqueue);
        let managers: HashSet<_> = waiting.map(|request| request.id.manager()).collect();
        if !self.messages.are_disconnected() {
            // Together: one that gets no reply delays the others once.
            join_all(managers.iter().map(|manager| self.messages.wait_subscribed(manager))).await;
        }
        let waits: Vec<_> = requests.iter().map(|request| request.if_busy == IfBusy::Enqueue).collect();
        let is_disconnected = !managers.is_empty() && self.messages.are_disconnected();
        if is_disconnected {
            // A free key can still be acquired.
            requests.iter_mut().for_each(|request| request.if_busy = IfBusy::Fail);
        }
        let replies = match self.nodes() {
            None => self.acquire_together(requests, called).await,
            Some(nodes) => self.acquire_at_node(&nodes, &requests, called).await,
        };
        let reply = |(reply, waits): (_, bool)| match reply {
            Ok(AcquireReply::Busy { .. }) if is_disconnected && waits => {
                Err(self.server.store_error("acquire", CallError::NotSubscribed))
            }
            reply => reply,
        };
        replies.into_iter().zip(waits).map(reply).collect()
    }
}

impl Shared {
    /// One script for all requests.
    async fn acquire_together(
        self: &Arc<Self>,
        requests: Vec<AcquireRequest>,
        called: BootInstant,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        let count = requests.len();
        let [first, ..] = requests.as_slice() else { return Vec::new() };
        let store_error = |error: CallError| self.server.store_error("acquire", error);
        let deadline = self.server.timeouts.call_deadline();
        let valid_for = requests.iter().map(|request| request.valid_for).min().unwrap_or_default();
        let call = |names: &Keyspace, expires_at| names.acquire(&requests, expires_at);
        let parse = |reply: &_| wire::parse_acquire(reply, count);
        let mut route = Route::new(self, &first.key);
        match route.execute_before_expiry(called, valid_for, deadline, call, parse, None).await {
            Ok(InTime { reply, replicated, .. }) => {
                let check = |(request, reply): (&AcquireRequest, Result<_, KeyError>)| {
                    reply.map_err(CallError::from).and_then(|reply| self.checked(request, reply, replicated))
                };
                requests.iter().zip(reply).map(|each| check(each).map_err(store_error)).collect()
            }
            Err(error) if count > 1 && error.may_be_of_one_key() => send_alone(self, requests, called).await,
            Err(error) => vec![Err(store_error(error)); count],
        }
    }

    /// One script grants the keys that are free. A key that is not, or whose slot moves, has a
    /// script of its own.
    async fn acquire_at_node(
        self: &Arc<Self>,
        nodes: &Nodes<Self>,
        requests: &[AcquireRequest],
        called: BootInstant,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        let deadline = self.server.timeouts.call_deadline();
        let granted = match self.acquire_free(nodes, requests, called, deadline).await {
            Ok(granted) => granted,
            // A service may refuse a script without declared keys.
            Err(error) if error.is_refusal() => vec![None; requests.len()],
            Err(error) => return vec![Err(self.server.store_error("acquire", error)); requests.len()],
        };
        let others: Vec<_> =
            requests.iter().zip(&granted).filter(|(_, granted)| granted.is_none()).map(|(other, _)| other).collect();
        if others.is_empty() {
            return granted.into_iter().flatten().collect();
        }
        let mut others = self.acquire_each(&others, called, deadline).await.into_iter();
        granted.into_iter().filter_map(|granted| granted.or_else(|| others.next())).collect()
    }

    /// The grants of the keys that are free. `None`: nothing was done for this one.
    async fn acquire_free(
        &self,
        nodes: &Nodes<Self>,
        requests: &[AcquireRequest],
        called: BootInstant,
        deadline: Instant,
    ) -> Result<Vec<Option<Result<AcquireReply, StoreError>>>, CallError> {
        let Server { keyspace, acquire_conn, min_replicas, .. } = &*self.server;
        // For one key, its own script costs as much.
        if requests.len() == 1 {
            return Ok(vec![None]);
        }
        let valid_for = requests.iter().map(|request| request.valid_for).min().unwrap_or_default();
        let call = keyspace.acquire_free(requests, self.expires_at(called, valid_for))?;
        let (reply, replicated) = acquire_conn.call_replicated(&call, *min_replicas, deadline).await?;
        let now = self.clock.now();
        let parsed = acquire_conn.parsed(wire::parse_acquire_free(&reply, requests.len()));
        let (server_us, FreeGrants { fence, is_granted }) = parsed?;
        self.server_clock().observe(server_us, now);
        let granted = requests.iter().zip(&is_granted).filter(|(_, is_granted)| **is_granted);
        self.fences.lock().extend(granted.map(|(request, _)| nodes.slot(&request.key)));
        let reply = match replicated {
            Ok(()) => Ok(AcquireReply::Granted { fence }),
            // In doubt, as in `checked`.
            Err(error) => Err(self.server.store_error("acquire", error.into())),
        };
        Ok(is_granted.into_iter().map(|is_granted| is_granted.then(|| reply.clone())).collect())
    }

    /// A script for each request, all sent together.
    async fn acquire_each(
        self: &Arc<Self>,
        requests: &[&AcquireRequest],
        called: BootInstant,
        deadline: Instant,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        let Server { keyspace, acquire_conn, min_replicas, .. } = &*self.server;
        let call = |request: &&AcquireRequest| {
            keyspace.acquire(std::slice::from_ref(*request), self.expires_at(called, request.valid_for))
        };
        let calls = requests.iter().map(call).collect::<Result<Vec<_>, _>>();
        let sent = match calls {
            Ok(calls) => acquire_conn.call_each(&calls, *min_replicas, deadline).await,
            Err(error) => Err(error.into()),
        };
        let (replies, replicated) = match sent {
            Ok(sent) => sent,
            Err(error) => {
                let error = self.server.store_error("acquire", error);
                return vec![Err(error); requests.len()];
            }
        };
        let finish = requests.iter().zip(replies).map(|(&request, reply)| async move {
            let mut route = Route::new(self, &request.key);
            let first = reply.map(|reply| (reply, replicated));
            let reply = acquire(&mut route, request, called, deadline, first).await;
            reply.map_err(|error| route.owner().server.store_error("acquire", error))
        });
        join_all(finish).await
    }

    /// The reply to a request, once its writes count.
    fn checked(
        &self,
        request: &AcquireRequest,
        reply: AcquireReply,
        replicated: Replicated,
    ) -> Result<AcquireReply, CallError> {
        if request.key.is_raw() {
            self.messages.used_raw(&request.key, matches!(reply, AcquireReply::Queued { .. }));
        }
        if matches!(reply, AcquireReply::Granted { .. }) {
            // In doubt: it is released, unless a repeated call finds it replicated.
            replicated?;
        }
        self.warn_if_no_ttl(&reply);
        Ok(reply)
    }
}

/// The reply to one request on a Cluster. `first`: the result of the pipeline for it.
async fn acquire(
    route: &mut Route,
    request: &AcquireRequest,
    called: BootInstant,
    deadline: Instant,
    first: Result<(Value, Replicated), CallError>,
) -> Result<AcquireReply, CallError> {
    let first = match first {
        Err(error) => {
            let asked = Arc::clone(route.owner());
            route.follow(error).await?;
            if request.if_busy == IfBusy::Enqueue && !Arc::ptr_eq(&asked, route.owner()) {
                // A waiter counts as dead without it.
                route.owner().messages.wait_subscribed(request.id.manager()).await;
            }
            None
        }
        Ok(first) => Some(first),
    };
    let call = |names: &Keyspace, expires_at| names.acquire(std::slice::from_ref(request), expires_at);
    let parse = |reply: &_| wire::parse_acquire(reply, 1);
    let in_time = route.execute_before_expiry(called, request.valid_for, deadline, call, parse, first).await?;
    let InTime { mut reply, replicated, incomplete } = in_time;
    let reply = reply.pop().ok_or(UnexpectedReply)??;
    let reply = match incomplete {
        None => reply,
        Some(fence) => {
            let AcquireRequest { key, id, queue, demand, .. } = request;
            let grant = Incomplete { key, id, fence, queue: *queue, takes_record: demand.takes_record() };
            complete(route, grant, deadline).await?.into()
        }
    };
    route.owner().checked(request, reply, replicated)
}
