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
    topology::{
        Nodes,
        connection::{Query, Replicated},
        server::Server,
    },
    wire::{self, FreeReplies, KeyError, Keyspace, UnexpectedReply},
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

    /// One script grants the keys that are free. A key that has waiters, or whose slot moves, has a
    /// script of its own.
    async fn acquire_at_node(
        self: &Arc<Self>,
        nodes: &Nodes<Self>,
        requests: &[AcquireRequest],
        called: BootInstant,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        let deadline = self.server.timeouts.call_deadline();
        let of = |places: &[usize]| places.iter().map(|at| &requests[*at]).collect::<Vec<_>>();
        // A poll mostly finds its key busy. A wait for replicas would be in each of the two steps,
        // and one alone may take half of the call timeout.
        let is_simple = |at: &usize| !requests[*at].is_repeated && self.server.min_replicas.is_none();
        let (mut shared, mut alone): (Vec<_>, Vec<_>) = (0..requests.len()).partition(is_simple);
        // For one key, its own script costs as much.
        if shared.len() < 2 {
            alone.append(&mut shared);
        }
        let (shared_requests, alone_requests) = (of(&shared), of(&alone));
        let (free, own) = tokio::join!(
            self.acquire_free(nodes, &shared_requests, called, deadline),
            self.acquire_each(&alone_requests, called, deadline)
        );
        let mut replies: Vec<_> = alone.into_iter().zip(own).collect();
        let mut others = Vec::new();
        for (at, reply) in shared.into_iter().zip(free) {
            match reply {
                Some(reply) => replies.push((at, reply)),
                None => others.push(at),
            }
        }
        let own = self.acquire_each(&of(&others), called, deadline).await;
        replies.extend(others.into_iter().zip(own));
        replies.sort_unstable_by_key(|(at, _)| *at);
        replies.into_iter().map(|(_, reply)| reply).collect()
    }

    /// The grants of the keys that are free, and the replies to requests that do not wait. `None`:
    /// nothing was done for this one.
    async fn acquire_free(
        &self,
        nodes: &Nodes<Self>,
        requests: &[&AcquireRequest],
        called: BootInstant,
        deadline: Instant,
    ) -> Vec<Option<Result<AcquireReply, StoreError>>> {
        let store_error = |error: CallError| self.server.store_error("acquire", error);
        let reply = |(request, reply): (&&AcquireRequest, Option<AcquireReply>)| {
            Some(self.checked(request, reply?, Ok(())).map_err(store_error))
        };
        match self.call_free(nodes, requests, called, deadline).await {
            Ok(replies) => requests.iter().zip(replies).map(reply).collect(),
            // A service may refuse a script without declared keys.
            Err(error) if error.is_refusal() => vec![None; requests.len()],
            Err(error) => vec![Some(Err(store_error(error))); requests.len()],
        }
    }

    async fn call_free(
        &self,
        nodes: &Nodes<Self>,
        requests: &[&AcquireRequest],
        called: BootInstant,
        deadline: Instant,
    ) -> Result<FreeReplies, CallError> {
        let Server { keyspace, acquire_conn, .. } = &*self.server;
        let Some(valid_for) = requests.iter().map(|request| request.valid_for).min() else { return Ok(Vec::new()) };
        let call = keyspace.acquire_free(requests.iter().copied(), self.expires_at(called, valid_for))?;
        let reply = acquire_conn.query(Query::EvalSha(&call), deadline).await?;
        let now = self.clock.now();
        let (server_us, replies) = acquire_conn.parsed(wire::parse_acquire_free(&reply, requests.len()))?;
        self.server_clock().observe(server_us, now);
        // Their slots have a fence.
        let is_granted = |reply: &&Option<AcquireReply>| matches!(reply, Some(AcquireReply::Granted { .. }));
        let granted = requests.iter().zip(&replies).filter(|(_, reply)| is_granted(reply));
        self.fences.lock().extend(granted.map(|(request, _)| nodes.slot(&request.key)));
        Ok(replies)
    }

    /// A script for each request, all sent together.
    async fn acquire_each(
        self: &Arc<Self>,
        requests: &[&AcquireRequest],
        called: BootInstant,
        deadline: Instant,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        if requests.is_empty() {
            return Vec::new();
        }
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
