//! What the calls to one server share: its connections, its messages, and the next call.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_redis::redis::{Value, make_extension_error};
use futures_util::future::join_all;
use tokio::time::Instant;
use tracing::warn;

use super::{
    error::{CallError, NotReplicated},
    messages::Messages,
    topology::{connection::Query, server::Server},
    wire::{self, FenceMark, InvalidName, KeyError, ScriptCall, Timed, UnexpectedReply},
};
use crate::{
    clock::{BootInstant, Clock},
    limits::{MAX_WAITING_REQUESTS, WARN_INTERVAL},
    store::{
        AcquireReply, AcquireRequest, IfBusy, ReleaseReply, ReleaseRequest, StoreError,
        remote::{
            batching::{SendRequests, Sender, SharedCalls, send_alone},
            server_clock::ServerClock,
        },
    },
    sync::{Mutex, MutexGuard},
};

/// What the calls to one server share.
pub(super) struct Shared {
    pub(super) clock: Clock,
    pub(super) server_clock: Mutex<ServerClock>,
    pub(super) server: Arc<Server>,
    pub(super) messages: Arc<Messages>,
    pub(super) acquires: SharedCalls<AcquireRequest, AcquireReply>,
    pub(super) releases: SharedCalls<ReleaseRequest, ReleaseReply>,
    pub(super) warned_of_missing_ttl: AtomicBool,
    pub(super) fence_warned_at: Mutex<Option<BootInstant>>,
}

impl Shared {
    /// Tries of a call that expired only because the estimate of the server's clock was too low. An
    /// expired call does nothing, and its reply has the server's time.
    const MAX_TRIES: usize = 3;
    /// See [`Sender::stale_after`].
    const STALE_AFTER_CALLS: u32 = 4;

    /// Executes a call that does nothing later than `valid_for` after it was made, by either clock.
    /// Also returns whether enough replicas have its writes.
    pub(super) async fn call_before_expiry<T>(
        &self,
        called: BootInstant,
        valid_for: Duration,
        deadline: Instant,
        call: impl Fn(i64) -> Result<ScriptCall, InvalidName>,
        parse: impl Fn(&Value) -> Result<(i64, Timed<T>), UnexpectedReply>,
    ) -> Result<(T, Result<(), NotReplicated>), CallError> {
        let Server { acquire_conn, min_replicas, .. } = &*self.server;
        for _ in 0..Self::MAX_TRIES {
            // Without an estimate, a call that has expired already fetches the server's time.
            let expires_at = self.server_clock().expires_at(called, valid_for).unwrap_or(0);
            // Not repeated: the caller releases what a call without a reply may have acquired (I8).
            let (reply, replicated) = acquire_conn.call_replicated(&call(expires_at)?, *min_replicas, deadline).await?;
            let now = self.clock.now();
            self.check_fence(&reply);
            let (server_us, outcome) = acquire_conn.parsed(parse(&reply))?;
            self.server_clock().observe(server_us, now);
            match outcome {
                Timed::Done(reply) => return Ok((reply, replicated)),
                Timed::Expired if now.saturating_duration_since(called) >= valid_for => break,
                Timed::Expired => {}
            }
        }
        Err(CallError::Expired)
    }

    pub(super) fn server_clock(&self) -> MutexGuard<'_, ServerClock> {
        self.server_clock.lock()
    }

    pub(super) fn check_fence(&self, reply: &Value) {
        let Some(mark) = wire::fence_mark(reply) else { return };
        // Before the reply: the section that it starts may be the last local one.
        self.messages.doubt();
        if mark == FenceMark::Replaced {
            self.warn_fence_replaced();
        }
    }

    /// At most one warning in ten seconds: another program may write there repeatedly.
    fn warn_fence_replaced(&self) {
        let now = self.clock.now();
        let mut warned_at = self.fence_warned_at.lock();
        if warned_at.is_none_or(|at| now.saturating_duration_since(at) >= WARN_INTERVAL) {
            *warned_at = Some(now);
            drop(warned_at);
            self.server.warn_fence_replaced("another value");
        }
    }

    /// Warns once about a lock without a TTL, which another program wrote. It must be deleted by
    /// hand.
    pub(super) fn warn_if_no_ttl(&self, reply: &AcquireReply) {
        let (AcquireReply::Queued { lease_left, .. }
        | AcquireReply::Busy { lease_left }
        | AcquireReply::QueueFull { lease_left, .. }) = reply
        else {
            return;
        };
        if *lease_left == Duration::MAX && !self.warned_of_missing_ttl.swap(true, Ordering::Relaxed) {
            self.server.background.log(|| {
                warn!(target: "tower_lock", "a key in Redis has no TTL and stays locked: tower-lock did not write it");
            });
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.messages.stop();
    }
}

impl Sender for Shared {
    fn now(&self) -> BootInstant {
        self.clock.now()
    }

    fn stale_after(&self) -> Duration {
        Self::STALE_AFTER_CALLS * self.server.timeouts.call
    }
}

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
        let count = requests.len();
        let waiting = requests.iter().filter(|request| request.if_busy == IfBusy::Enqueue);
        let managers: HashSet<_> = waiting.map(|request| request.id.manager()).collect();
        if !self.messages.are_disconnected() {
            // Together: one that gets no reply delays the others once.
            join_all(managers.iter().map(|manager| self.messages.wait_subscribed(manager))).await;
        }
        let store_error = |error: CallError| self.server.store_error("acquire", error);
        let waiting: Vec<_> = requests.iter().map(|request| request.if_busy == IfBusy::Enqueue).collect();
        let is_disconnected = !managers.is_empty() && self.messages.are_disconnected();
        if is_disconnected {
            // A free key can still be acquired.
            requests.iter_mut().for_each(|request| request.if_busy = IfBusy::Fail);
        }
        let deadline = self.server.timeouts.call_deadline();
        let valid_for = requests.iter().map(|request| request.valid_for).min().unwrap_or_default();
        let call = |expires_at| self.server.keyspace.acquire(&requests, expires_at);
        let parse = |reply: &_| wire::parse_acquire(reply, count);
        match self.call_before_expiry(called, valid_for, deadline, call, parse).await {
            Ok((replies, replicated)) => {
                for (request, reply) in requests.iter().zip(&replies).filter(|(request, _)| request.key.is_raw()) {
                    self.messages.used_raw(&request.key, matches!(reply, Ok(AcquireReply::Queued { .. })));
                }
                let reply = |(reply, waits): (_, bool)| match (reply, replicated) {
                    // In doubt: it is released, unless a repeated call finds it replicated.
                    (Ok(AcquireReply::Granted { .. }), Err(error)) => Err(store_error(error.into())),
                    (Ok(AcquireReply::Busy { .. }), _) if is_disconnected && waits => {
                        Err(store_error(CallError::NotSubscribed))
                    }
                    (Ok(reply), _) => {
                        self.warn_if_no_ttl(&reply);
                        Ok(reply)
                    }
                    (Err(error), _) => Err(store_error(CallError::from(error))),
                };
                replies.into_iter().zip(waiting).map(reply).collect()
            }
            Err(error) if count > 1 && error.may_be_of_one_key() => send_alone(self, requests, called).await,
            Err(error) => vec![Err(store_error(error)); count],
        }
    }
}

impl SendRequests<ReleaseRequest> for Shared {
    type Reply = ReleaseReply;

    const STORE: &'static str = "redis";
    const OPERATION: &'static str = "release";

    /// A release is not refused: each was reserved before its acquire.
    const MAX_WAITING: usize = usize::MAX;

    fn calls(&self) -> &SharedCalls<ReleaseRequest, ReleaseReply> {
        &self.releases
    }

    fn shares_waits(&self) -> bool {
        false
    }

    fn may_wait(_: &ReleaseRequest) -> Option<Duration> {
        None
    }

    async fn send(
        self: &Arc<Self>,
        requests: Vec<ReleaseRequest>,
        called: BootInstant,
    ) -> Vec<Result<ReleaseReply, StoreError>> {
        let server = &*self.server;
        let send = async {
            let deadline = server.timeouts.call_deadline();
            let call = server.keyspace.release(&requests)?;
            let reply = server.release_conn.query_retry(Query::EvalSha(&call), deadline).await?;
            self.check_fence(&reply);
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
}

impl From<KeyError> for CallError {
    fn from(KeyError(text): KeyError) -> Self {
        let (code, detail) = text.split_once(' ').unwrap_or((&text, ""));
        Self::Redis(make_extension_error(code.to_owned(), Some(detail.to_owned())))
    }
}
