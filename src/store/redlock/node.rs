//! The calls to one of the servers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_redis::redis::{Value, cmd};
use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{Instant, sleep_until, timeout_at},
};
use tracing::{info, warn};

use super::{late::LateRaises, unconfirmed::Unconfirmed};
use crate::{
    acquisition::AcquisitionId,
    clock::{BootInstant, Clock},
    limits::WARN_INTERVAL,
    lock_key::LockKey,
    store::{
        AcquireRequest, ForceReleaseReply, ForceReleaseRequest, KeyStatus, ReleaseReply, ReleaseRequest, RenewReply,
        RenewRequest, StoreErrorKind,
        redis::{
            error::CallError,
            topology::{Signs, connection::Query, server::Server},
            wire::{
                self, FenceMark, InvalidName, KeyError, LockName, RaiseRequest, Raised, ScriptCall, Timed,
                UnexpectedReply, Vote,
            },
        },
        remote::server_clock::ServerClock,
    },
    sync::Mutex,
};

/// The replies of a server about several keys.
pub(super) type KeyReplies<T> = Vec<Result<T, KeyError>>;

/// One of the servers of a store.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) server: Arc<Server>,
    pub(super) signs: Arc<Signs>,
    clock: Clock,
    server_clock: Arc<Mutex<ServerClock>>,
    late: LateRaises,
    unconfirmed: Arc<Unconfirmed>,
    is_slow: AtomicBool,
    outage: Mutex<Outage>,
    fence_warned_at: Mutex<Option<BootInstant>>,
}

/// A server that does not reply is logged: the others hide it from every caller.
#[derive(Debug, Default)]
struct Outage {
    is_logged: bool,
    logged_at: Option<BootInstant>,
}

/// A raise under way.
struct Raising {
    node: Arc<Node>,
    requests: Arc<[RaiseRequest]>,
    lease: Duration,
    is_answered: bool,
}

/// A release under way.
struct Releasing {
    node: Arc<Node>,
    requests: Arc<[ReleaseRequest]>,
    lease: Duration,
    is_answered: bool,
}

/// When a call must be executed, by the clock of the server, and when its reply is not waited for
/// any more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Validity {
    pub(super) called: BootInstant,
    pub(super) valid_for: Duration,
    pub(super) deadline: Instant,
}

impl Node {
    /// Tries of a call that expired only because the estimate of the server's clock was too low. An
    /// expired call does nothing, and its reply has the server's time.
    const MAX_TRIES: usize = 3;

    pub(super) fn new(
        server: Arc<Server>,
        signs: Arc<Signs>,
        clock: Clock,
        server_clock: Arc<Mutex<ServerClock>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            server,
            signs,
            clock,
            server_clock,
            late: LateRaises::default(),
            unconfirmed: Arc::default(),
            is_slow: AtomicBool::new(false),
            outage: Mutex::default(),
            fence_warned_at: Mutex::default(),
        })
    }

    pub(super) async fn vote(
        &self,
        requests: &[AcquireRequest],
        validity: Validity,
    ) -> Result<KeyReplies<Vote>, CallError> {
        let acquisitions = requests.iter().map(|request| (&request.key, &request.id));
        let call = |expires_at| self.server.keyspace.vote(acquisitions.clone(), validity.valid_for, expires_at);
        self.call_before_expiry(validity, call, |reply| wire::parse_vote(reply, requests.len())).await
    }

    /// Completes grants, when the server has `voted`. `lease` is how long the server may keep a
    /// lock that nothing releases.
    pub(super) async fn raise(
        self: &Arc<Self>,
        requests: &Arc<[RaiseRequest]>,
        lease: Duration,
        validity: Validity,
        voted: Option<&Notify>,
    ) -> Result<KeyReplies<Raised>, CallError> {
        // From now on: a release that is sent before the raise may be executed before the vote.
        self.late.raise(requests.iter().map(|request| &request.id));
        let under_way = Raising { node: Arc::clone(self), requests: Arc::clone(requests), lease, is_answered: false };
        if let Some(voted) = voted {
            timeout_at(validity.deadline, voted.notified()).await.map_err(|_| CallError::NoReply)?;
        }
        let call = |expires_at| self.server.keyspace.raise(requests, expires_at);
        let reply = self.call_before_expiry(validity, call, |reply| wire::parse_raise(reply, requests.len())).await;
        match &reply {
            Ok(replies) => under_way.answered(replies),
            Err(_) => under_way.failed(validity.deadline + self.server.timeouts.call),
        }
        reply
    }

    /// On the connection of the votes: it is executed after those that were sent before.
    pub(super) async fn withdraw(
        &self,
        acquisitions: &[(LockKey, AcquisitionId)],
        deadline: Instant,
    ) -> Result<(), CallError> {
        let Server { keyspace, acquire_conn, .. } = &*self.server;
        let call = keyspace.withdraw(acquisitions.iter().map(|(key, id)| (key, id)))?;
        // Not repeated: the grants end by themselves when the call that made them has expired.
        let reply = acquire_conn.query(Query::EvalSha(&call), deadline).await?;
        acquire_conn.parsed(wire::parse_withdraw(&reply)).map(drop)
    }

    pub(super) async fn renew(
        &self,
        requests: &[RenewRequest],
        deadline: Instant,
    ) -> Result<KeyReplies<RenewReply>, CallError> {
        let Server { keyspace, release_conn, .. } = &*self.server;
        let (call, is_sent) = keyspace.renew(requests);
        let reply = release_conn.query_retry(Query::EvalSha(&call), deadline).await?;
        let replies = release_conn.parsed(wire::parse_renew(&reply, &is_sent))?;
        Ok(replies.into_iter().map(Ok).collect())
    }

    /// Releases. Without a confirmation the releases are repeated in the background, for at most
    /// this lease.
    pub(super) async fn release(
        self: &Arc<Self>,
        requests: &Arc<[ReleaseRequest]>,
        lease: Duration,
        deadline: Instant,
    ) -> Result<KeyReplies<ReleaseReply>, CallError> {
        let Server { keyspace, release_conn, .. } = &*self.server;
        self.late.release(requests);
        let under_way = Releasing { node: Arc::clone(self), requests: Arc::clone(requests), lease, is_answered: false };
        let call = keyspace.release(requests)?;
        let reply = release_conn.query_retry(Query::EvalSha(&call), deadline).await.and_then(|reply| {
            self.check_fence(&reply);
            release_conn.parsed(wire::parse_release(&reply, requests.len()))
        });
        match &reply {
            Ok(replies) => under_way.answered(replies),
            Err(_) => self.repeat_release(requests, lease),
        }
        reply
    }

    /// Repeats these releases in the background until the server has confirmed them, for at most
    /// this lease.
    fn repeat_release(&self, requests: &[ReleaseRequest], lease: Duration) {
        if !requests.is_empty() {
            self.unconfirmed.repeat(requests, lease, &self.server, &self.signs);
        }
    }

    pub(super) async fn force(
        &self,
        request: &ForceReleaseRequest,
        deadline: Instant,
    ) -> Result<ForceReleaseReply, CallError> {
        let Server { keyspace, release_conn, .. } = &*self.server;
        let call = keyspace.force(request)?;
        // Not repeated: the next holder may have the key by then.
        let reply = release_conn.query(Query::EvalSha(&call), deadline).await?;
        self.check_fence(&reply);
        release_conn.parsed(wire::parse_force(&reply))
    }

    pub(super) async fn inspect(&self, lock: LockName<'_>, deadline: Instant) -> Result<KeyStatus, CallError> {
        let Server { keyspace, release_conn, .. } = &*self.server;
        let call = keyspace.inspect_name(lock);
        let reply = release_conn.query_retry(Query::EvalSha(&call), deadline).await?;
        Ok(wire::parse_inspect(&reply)?)
    }

    /// One `SCAN`: the next position, and the names of locks.
    pub(super) async fn scan(
        &self,
        position: u64,
        count: usize,
        deadline: Instant,
    ) -> Result<(u64, Vec<String>), CallError> {
        let Server { keyspace, release_conn, .. } = &*self.server;
        let mut command = cmd("SCAN");
        command.arg(position).arg("MATCH").arg(keyspace.lock_pattern()).arg("COUNT").arg(count).arg("TYPE").arg("hash");
        Ok(wire::parse_scan(&release_conn.query_retry(Query::Command(&command), deadline).await?)?)
    }

    /// Checks whether the server accepts writes on each connection.
    pub(super) async fn check_writes(&self, deadline: Instant) -> Result<(), CallError> {
        let key = self.server.health_key();
        for connection in self.server.connections() {
            connection.check_writes(&key, deadline).await?;
        }
        Ok(())
    }

    /// Executes a script that does nothing later than its validity, by either clock.
    async fn call_before_expiry<T>(
        &self,
        validity: Validity,
        call: impl Fn(i64) -> Result<ScriptCall, InvalidName>,
        parse: impl Fn(&Value) -> Result<(i64, Timed<T>), UnexpectedReply>,
    ) -> Result<T, CallError> {
        let Validity { called, valid_for, deadline } = validity;
        let connection = &self.server.acquire_conn;
        for _ in 0..Self::MAX_TRIES {
            // The connection has read the server's time, or a call that has expired reads it.
            let expires_at = self.server_clock.lock().expires_at(called, valid_for).unwrap_or(0);
            // A copy of a vote finds the grant, and one of a raise the fence.
            let reply = connection.query_retry(Query::EvalSha(&call(expires_at)?), deadline).await?;
            let now = self.clock.now();
            self.check_fence(&reply);
            let (server_us, outcome) = connection.parsed(parse(&reply))?;
            self.server_clock.lock().observe(server_us, now);
            match outcome {
                Timed::Done(reply) => return Ok(reply),
                Timed::Expired if now.saturating_duration_since(called) >= valid_for => break,
                Timed::Expired => {}
            }
        }
        Err(CallError::Expired)
    }

    /// At most one warning in ten seconds: another program may write there repeatedly.
    fn check_fence(&self, reply: &Value) {
        if wire::fence_mark(reply) != Some(FenceMark::Replaced) {
            return;
        }
        let now = self.clock.now();
        let mut warned_at = self.fence_warned_at.lock();
        if warned_at.is_none_or(|at| now.saturating_duration_since(at) >= WARN_INTERVAL) {
            *warned_at = Some(now);
            drop(warned_at);
            self.server.warn_fence_replaced("another value");
        }
    }

    /// Whether its last call had no reply in time. Nothing that the others decide waits for it
    /// then: each split vote would.
    pub(super) fn is_slow(&self) -> bool {
        self.is_slow.load(Ordering::Relaxed)
    }

    /// A call was answered, in time or not. Logs the end of an outage.
    pub(super) fn replied(&self, is_in_time: bool) {
        self.is_slow.store(!is_in_time, Ordering::Relaxed);
        let mut outage = self.outage.lock();
        if outage.is_logged {
            outage.is_logged = false;
            let address = self.server.address.clone();
            let background = &self.server.background;
            background.log(move || info!(target: "tower_lock", "Redis at {address} replies again"));
        }
    }

    /// A call failed. Logs the begin of an outage, at most one in ten seconds.
    pub(super) fn failed(&self, kind: StoreErrorKind, error: &str) {
        if kind == StoreErrorKind::Timeout {
            self.is_slow.store(true, Ordering::Relaxed);
        }
        let now = self.clock.now();
        let mut outage = self.outage.lock();
        let is_recent = outage.logged_at.is_some_and(|at| now.saturating_duration_since(at) < WARN_INTERVAL);
        if outage.is_logged || is_recent {
            return;
        }
        *outage = Outage { is_logged: true, logged_at: Some(now) };
        let error = error.to_owned();
        self.server.background.log(move || {
            warn!(target: "tower_lock", "locks need a majority of the other servers, because one does not count: {error}");
        });
    }
}

impl Raising {
    fn answered(mut self, replies: &[Result<Raised, KeyError>]) {
        self.end(Some(replies));
    }

    /// It may be executed until this instant.
    fn failed(self, until: Instant) {
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                sleep_until(until).await;
                drop(self);
            });
        }
    }

    fn end(&mut self, replies: Option<&[Result<Raised, KeyError>]>) {
        self.is_answered = true;
        let ids = self.requests.iter().map(|request| &request.id);
        self.node.repeat_release(&self.node.late.raised(ids, replies), self.lease);
    }
}

impl Drop for Raising {
    fn drop(&mut self) {
        if !self.is_answered {
            self.end(None);
        }
    }
}

impl Releasing {
    fn answered(mut self, replies: &[Result<ReleaseReply, KeyError>]) {
        self.end(Some(replies));
    }

    fn end(&mut self, replies: Option<&[Result<ReleaseReply, KeyError>]>) {
        self.is_answered = true;
        self.node.repeat_release(&self.node.late.released(&self.requests, replies), self.lease);
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        if !self.is_answered {
            self.end(None);
        }
    }
}
