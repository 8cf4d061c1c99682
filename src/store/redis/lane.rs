//! The requests that wait for a connection, and the tasks that send them.
//!
//! A request is sent at once while fewer than [`Lane::MAX_CALLS`] calls are under way. Requests that
//! arrive meanwhile share the next call. So nothing waits for company, and under load Redis
//! executes one script for up to 64 keys. One task sends one call after the other: a request needs
//! no task and no timer of its own.

use std::{collections::VecDeque, fmt, sync::Arc, time::Duration};

use deadpool_redis::redis::make_extension_error;
use tokio::runtime::Handle;

use super::{
    connection::Query,
    error::CallError,
    proto::{self, KeyError, Shareable, next_call},
    server::Server,
    store::Shared,
};
use crate::{
    clock::BootInstant,
    limits::MAX_WAITING_REQUESTS,
    process::Process,
    store::{
        AcquireReply, AcquireRequest, IfBusy, ReleaseReply, ReleaseRequest, StoreError, StoreErrorKind, StoreFuture,
        future::ReplySender,
    },
    sync::Mutex,
};

/// The requests of one kind.
pub(super) struct Lane<R: Request> {
    state: Mutex<State<R>>,
}

struct State<R: Request> {
    /// The tasks of the parent process do not run in a child of `fork()`.
    process_id: u32,
    waiting: VecDeque<Waiting<R>>,
    /// The calls under way, one for each task.
    calls: Vec<InFlight<R>>,
    next_task: u64,
}

struct Waiting<R: Request> {
    request: R,
    called: BootInstant,
    reply: ReplySender<R::Reply>,
}

/// A call under way. Its senders are here and not in the task, because the runtime of the task may
/// stop.
struct InFlight<R: Request> {
    task: u64,
    since: BootInstant,
    replies: Vec<ReplySender<R::Reply>>,
}

/// A request that shares calls.
pub(super) trait Request: Shareable + Send + Sized + 'static {
    type Reply: Send + Unpin + 'static;

    /// The most requests that wait. Further ones fail.
    const MAX_WAITING: usize;

    fn lane(shared: &Shared) -> &Lane<Self>;

    /// How long it may wait before it is sent. Otherwise it fails.
    fn may_wait(&self) -> Option<Duration>;

    fn overloaded() -> StoreError;

    /// The error of a request whose task was dropped with its runtime.
    fn dropped() -> StoreError;

    /// Sends one call. The replies are in the order of the requests. `called` is the instant of the
    /// first one.
    fn call(
        shared: &Arc<Shared>,
        requests: Vec<Self>,
        called: BootInstant,
    ) -> impl Future<Output = Vec<Result<Self::Reply, StoreError>>> + Send;
}

/// Sends one call after the other while requests wait.
struct Task<R: Request> {
    shared: Arc<Shared>,
    number: u64,
    request: std::marker::PhantomData<fn(R)>,
}

impl<R: Request> Default for Lane<R> {
    fn default() -> Self {
        let process_id = Process::default().id();
        Self { state: Mutex::new(State { process_id, waiting: VecDeque::new(), calls: Vec::new(), next_task: 0 }) }
    }
}

impl<R: Request> Lane<R> {
    /// Calls under way: while Redis executes one, the next one is on its way.
    const MAX_CALLS: usize = 2;
    /// The time of a call, in call timeouts, after which its task counts as stopped: nothing drives
    /// its runtime.
    const STALE_AFTER: u32 = 4;

    /// Sends the request with the next call.
    pub(super) fn push(shared: &Arc<Shared>, request: R) -> StoreFuture<R::Reply> {
        let called = shared.clock.now();
        let Ok(runtime) = Handle::try_current() else {
            // The caller polls this future in a runtime.
            let shared = Arc::clone(shared);
            return StoreFuture::new(async move { Self::push(&shared, request).await });
        };
        let (reply, future) = StoreFuture::sent_later(R::dropped);
        let stale_after = Self::STALE_AFTER * shared.server().timeouts.call;
        let mut state = R::lane(shared).state.lock();
        if state.waiting.len() >= R::MAX_WAITING {
            drop(state);
            return StoreFuture::ready(Err(R::overloaded()));
        }
        state.waiting.push_back(Waiting { request, called, reply });
        let is_stale = |call: &InFlight<R>| called.saturating_duration_since(call.since) > stale_after;
        let stale: Vec<_> = state.calls.extract_if(.., |call| is_stale(call)).collect();
        let task = (state.calls.len() < Self::MAX_CALLS).then(|| state.start(called));
        drop(state);
        drop(stale);
        if let Some(number) = task {
            let task = Task::<R> { shared: Arc::clone(shared), number, request: std::marker::PhantomData };
            runtime.spawn(task.run());
        }
        future
    }

    /// Forgets the requests of the parent process, in a child of `fork()`.
    pub(super) fn after_fork(&self) {
        let mut state = self.state.lock();
        let process_id = Process::default().id();
        if state.process_id != process_id {
            state.process_id = process_id;
            // Not dropped: they would reply to the requests of the parent.
            std::mem::forget((std::mem::take(&mut state.waiting), std::mem::take(&mut state.calls)));
        }
    }
}

impl<R: Request> State<R> {
    fn start(&mut self, now: BootInstant) -> u64 {
        self.next_task += 1;
        self.calls.push(InFlight { task: self.next_task, since: now, replies: Vec::new() });
        self.next_task
    }

    /// The requests that have waited too long to be sent.
    fn take_late(&mut self, now: BootInstant) -> Vec<Waiting<R>> {
        let is_late = |waiting: &Waiting<R>| {
            waiting.request.may_wait().is_some_and(|limit| now.saturating_duration_since(waiting.called) > limit)
        };
        let late = self.waiting.iter().take_while(|waiting| is_late(waiting)).count();
        self.waiting.drain(..late).collect()
    }
}

impl<R: Request> Task<R> {
    async fn run(self) {
        while let Some((requests, called)) = self.next_call() {
            let replies = R::call(&self.shared, requests, called).await;
            let senders = self.take_senders();
            // A task that counted as stopped has none.
            for (sender, reply) in senders.into_iter().zip(replies) {
                sender.send(reply);
            }
        }
    }

    /// The requests of the next call, and the instant of the first one. `None`: no request waits.
    fn next_call(&self) -> Option<(Vec<R>, BootInstant)> {
        let now = self.shared.clock.now();
        let mut state = R::lane(&self.shared).state.lock();
        let late = state.take_late(now);
        let count = next_call(state.waiting.iter().map(|waiting| &waiting.request));
        let State { waiting, calls, .. } = &mut *state;
        let at = calls.iter().position(|call| call.task == self.number);
        let next = match (waiting.front().map(|first| first.called), at) {
            (Some(called), Some(at)) => {
                let mut requests = Vec::with_capacity(count);
                calls[at].since = now;
                calls[at].replies.reserve(count);
                for Waiting { request, reply, .. } in waiting.drain(..count) {
                    requests.push(request);
                    calls[at].replies.push(reply);
                }
                Some((requests, called))
            }
            (None, Some(at)) => {
                calls.swap_remove(at);
                None
            }
            (_, None) => None,
        };
        drop(state);
        for Waiting { reply, .. } in late {
            reply.send(Err(R::overloaded()));
        }
        next
    }

    fn take_senders(&self) -> Vec<ReplySender<R::Reply>> {
        let mut state = R::lane(&self.shared).state.lock();
        let call = state.calls.iter_mut().find(|call| call.task == self.number);
        call.map(|call| std::mem::take(&mut call.replies)).unwrap_or_default()
    }
}

impl<R: Request> Drop for Task<R> {
    fn drop(&mut self) {
        let mut state = R::lane(&self.shared).state.lock();
        let Some(at) = state.calls.iter().position(|call| call.task == self.number) else { return };
        // Dropped with its runtime. The senders reply with an error, and the callers repeat their
        // requests from their own runtimes.
        let call = state.calls.swap_remove(at);
        let waiting = if state.calls.is_empty() { std::mem::take(&mut state.waiting) } else { VecDeque::new() };
        drop(state);
        drop((call, waiting));
    }
}

impl Request for AcquireRequest {
    type Reply = AcquireReply;

    const MAX_WAITING: usize = MAX_WAITING_REQUESTS;

    fn lane(shared: &Shared) -> &Lane<Self> {
        &shared.acquires
    }

    /// The rest of its validity is left for the call.
    fn may_wait(&self) -> Option<Duration> {
        Some(self.valid_for / 2)
    }

    fn overloaded() -> StoreError {
        StoreError::new("redis", "acquire", StoreErrorKind::Overloaded)
    }

    fn dropped() -> StoreError {
        StoreError::new("redis", "acquire", StoreErrorKind::Unavailable)
    }

    async fn call(
        shared: &Arc<Shared>,
        mut requests: Vec<Self>,
        called: BootInstant,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        let count = requests.len();
        let store_error = |error: CallError| {
            let Server { address, user, .. } = shared.server();
            error.into_store_error("acquire", address, user)
        };
        let waiting: Vec<_> = requests.iter().map(|request| request.if_busy == IfBusy::Enqueue).collect();
        let mut is_disconnected = false;
        if let Some(enqueues) = requests.iter().find(|request| request.if_busy == IfBusy::Enqueue) {
            shared.subscriber.wait_subscribed(enqueues.id.manager()).await;
            is_disconnected = shared.subscriber.is_disconnected();
            if is_disconnected {
                // A free key can still be acquired.
                requests.iter_mut().for_each(|request| request.if_busy = IfBusy::Fail);
            }
        }
        let deadline = shared.server().timeouts.call_deadline();
        let valid_for = requests.iter().map(|request| request.valid_for).min().unwrap_or_default();
        let call = |expires_at| shared.server().keyspace.acquire(&requests, expires_at);
        let parse = |reply: &_| proto::parse_acquire(reply, count);
        match shared.call_before_expiry(called, valid_for, deadline, call, parse).await {
            Ok(replies) => {
                let reply = |(reply, waits): (_, bool)| match reply {
                    Ok(AcquireReply::Busy { .. }) if is_disconnected && waits => {
                        Err(store_error(CallError::NotSubscribed))
                    }
                    Ok(reply) => {
                        shared.warn_if_no_ttl(&reply);
                        Ok(reply)
                    }
                    Err(error) => Err(store_error(CallError::from(error))),
                };
                replies.into_iter().zip(waiting).map(reply).collect()
            }
            Err(error) => vec![Err(store_error(error)); count],
        }
    }
}

impl Request for ReleaseRequest {
    type Reply = ReleaseReply;

    /// A release is not refused: each was reserved before its acquire.
    const MAX_WAITING: usize = usize::MAX;

    fn lane(shared: &Shared) -> &Lane<Self> {
        &shared.releases
    }

    fn may_wait(&self) -> Option<Duration> {
        None
    }

    fn overloaded() -> StoreError {
        StoreError::new("redis", "release", StoreErrorKind::Overloaded)
    }

    fn dropped() -> StoreError {
        StoreError::new("redis", "release", StoreErrorKind::Unavailable)
    }

    async fn call(
        shared: &Arc<Shared>,
        requests: Vec<Self>,
        _called: BootInstant,
    ) -> Vec<Result<ReleaseReply, StoreError>> {
        let server = shared.server();
        let send = async {
            let deadline = server.timeouts.call_deadline();
            let call = server.keyspace.release(&requests)?;
            let reply = server.release_conn.query_retry(Query::EvalSha(&call), deadline).await?;
            shared.check_fence(&reply);
            Ok(proto::parse_release(&reply, requests.len())?)
        };
        match send.await {
            Ok(replies) => replies.into_iter().map(Ok).collect(),
            Err(error) => {
                let error = CallError::into_store_error(error, "release", &server.address, &server.user);
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

impl<R: Request> fmt::Debug for Lane<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Lane").field("waiting", &state.waiting.len()).field("calls", &state.calls.len()).finish()
    }
}
