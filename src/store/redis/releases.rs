//! Calls for releases: many requests share one.

use std::{sync::Arc, time::Duration};

use deadpool_redis::redis::{Value, make_extension_error};
use futures_util::future::join_all;
use tokio::time::Instant;

use super::{
    error::CallError,
    moving,
    routing::{Purpose, Route},
    shared::Shared,
    topology::{connection::Query, server::Server},
    wire::{self, KeyError},
};
use crate::{
    clock::BootInstant,
    store::{
        ReleaseReply, ReleaseRequest, StoreError,
        remote::batching::{SendRequests, SharedCalls, send_alone},
    },
};

impl SendRequests<ReleaseRequest> for Shared {
    type Reply = ReleaseReply;

    const STORE: &'static str = "redis";
    const OPERATION: &'static str = "release";

    /// A release is not refused: each was reserved before its acquire.
    const MAX_WAITING: usize = usize::MAX;

    fn calls(&self) -> &SharedCalls<ReleaseRequest, ReleaseReply> {
        &self.releases
    }

    fn may_wait(_: &ReleaseRequest) -> Option<Duration> {
        None
    }

    async fn send(
        self: &Arc<Self>,
        requests: Vec<ReleaseRequest>,
        called: BootInstant,
    ) -> Vec<Result<ReleaseReply, StoreError>> {
        match self.nodes() {
            None => self.release_together(requests, called).await,
            Some(_) => self.release_at_node(&requests).await,
        }
    }
}

impl Shared {
    /// One script for all requests.
    async fn release_together(
        self: &Arc<Self>,
        requests: Vec<ReleaseRequest>,
        called: BootInstant,
    ) -> Vec<Result<ReleaseReply, StoreError>> {
        let server = &*self.server;
        let send = async {
            let deadline = server.timeouts.call_deadline();
            let call = server.keyspace.release(&requests)?;
            let reply = server.release_conn.query_retry(Query::EvalSha(&call), deadline).await?;
            self.check_fence(&reply, None);
            server.release_conn.parsed(wire::parse_release(&reply, requests.len()))
        };
        match send.await {
            Ok(replies) => {
                let store_error = |error: KeyError| server.store_error("release", error.into());
                replies.into_iter().map(|reply| reply.map_err(store_error)).collect()
            }
            Err(error) if requests.len() > 1 && error.may_be_of_one_key() => send_alone(self, requests, called).await,
            Err(error) => {
                let error = server.store_error("release", error);
                vec![Err(error); requests.len()]
            }
        }
    }

    /// One script releases the keys without waiters. A key that has some, or whose slot moves, has
    /// a script of its own.
    async fn release_at_node(self: &Arc<Self>, requests: &[ReleaseRequest]) -> Vec<Result<ReleaseReply, StoreError>> {
        let deadline = self.server.timeouts.call_deadline();
        let is_released = match self.release_unqueued(requests, deadline).await {
            Ok(is_released) => is_released,
            Err(error) if error.is_refusal() => vec![false; requests.len()],
            Err(error) => return vec![Err(self.server.store_error("release", error)); requests.len()],
        };
        let others: Vec<_> =
            requests.iter().zip(&is_released).filter(|(_, is)| !**is).map(|(other, _)| other).collect();
        if others.is_empty() {
            return vec![Ok(ReleaseReply::Freed); requests.len()];
        }
        let mut others = self.release_each(&others, deadline).await.into_iter();
        let reply = |is_released| if is_released { Some(Ok(ReleaseReply::Freed)) } else { others.next() };
        is_released.into_iter().filter_map(reply).collect()
    }

    /// Whether each key was released. Otherwise nothing was done for it.
    async fn release_unqueued(&self, requests: &[ReleaseRequest], deadline: Instant) -> Result<Vec<bool>, CallError> {
        let Server { keyspace, release_conn, .. } = &*self.server;
        let is_simple = |request: &&ReleaseRequest| request.block_for.is_zero() && request.record.is_none();
        let count = requests.iter().filter(is_simple).count();
        // For one key, its own script costs as much.
        if count < 2 {
            return Ok(vec![false; requests.len()]);
        }
        let call = keyspace.release_unqueued(requests.iter().filter(is_simple))?;
        let reply = release_conn.query_retry(Query::EvalSha(&call), deadline).await?;
        let mut released = release_conn.parsed(wire::parse_release_unqueued(&reply, count))?.into_iter();
        Ok(requests.iter().map(|request| is_simple(&request) && released.next() == Some(true)).collect())
    }

    /// A script for each request, all sent together.
    async fn release_each(
        self: &Arc<Self>,
        requests: &[&ReleaseRequest],
        deadline: Instant,
    ) -> Vec<Result<ReleaseReply, StoreError>> {
        let Server { keyspace, release_conn, .. } = &*self.server;
        let calls = requests.iter().map(|&request| keyspace.release(std::slice::from_ref(request)));
        let sent = match calls.collect::<Result<Vec<_>, _>>() {
            Ok(calls) => release_conn.call_each_retry(&calls, None, deadline).await,
            Err(error) => Err(error.into()),
        };
        let replies = match sent {
            Ok((replies, _)) => replies,
            Err(error) => {
                let error = self.server.store_error("release", error);
                return vec![Err(error); requests.len()];
            }
        };
        let finish = requests.iter().zip(replies).map(|(&request, reply)| async move {
            let mut route = Route::new(self, &request.key);
            let reply = release(&mut route, request, reply, deadline).await;
            reply.map_err(|error| route.owner().server.store_error("release", error))
        });
        join_all(finish).await
    }
}

/// The reply to one request on a Cluster. `first`: the result of the pipeline for it.
async fn release(
    route: &mut Route,
    request: &ReleaseRequest,
    first: Result<Value, CallError>,
    deadline: Instant,
) -> Result<ReleaseReply, CallError> {
    let reply = match first {
        Ok(reply) => reply,
        Err(error) => {
            route.follow(error).await?;
            return moving::release(route, request, deadline).await;
        }
    };
    route.check_fence(&reply);
    let reply = route.parsed(Purpose::Release, wire::parse_cluster_release(&reply))?;
    moving::continue_release(route, request, reply, deadline).await
}

impl From<KeyError> for CallError {
    fn from(KeyError(text): KeyError) -> Self {
        let (code, detail) = text.split_once(' ').unwrap_or((&text, ""));
        Self::Redis(make_extension_error(code.to_owned(), Some(detail.to_owned())))
    }
}
