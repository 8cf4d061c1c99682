//! The requests that wait for a connection, and the tasks that send them.
//!
//! A request is sent at once if no call is under way. Requests that arrive meanwhile share the next
//! call. So nothing waits for company, and under load a server executes one call for up to 64 keys.
//! One task sends one call after the other: a request needs no task and no timer of its own.

use std::{collections::VecDeque, fmt, marker::PhantomData, sync::Arc, time::Duration};

use futures_util::future::{BoxFuture, join_all};
use tokio::runtime::Handle;

use super::{
    batch::{MAX_REQUESTS_PER_CALL, Needs, Shareable, next_call},
    inline::poll_and_spawn,
    server_clock::ServerClock,
};
use crate::{
    clock::{BootInstant, Clock},
    lock_key::LockKey,
    runtime,
    store::{AcquireRequest, Many, ReleaseRequest, ReplySender, StoreError, StoreErrorKind, StoreFuture},
    sync::Mutex,
};

/// A call that takes longer does not delay the requests behind it: the server is far away, or waits
/// for a disk.
const LONG_CALL: Duration = Duration::from_millis(2);

/// The most calls under way. More than one is under way if a full call waits, or a request that
/// has a call of its own, or if a call takes long.
const MAX_CALLS: usize = 8;

/// The requests of one kind, and the calls under way.
pub(crate) struct SharedCalls<R: Shareable> {
    state: Mutex<State<R>>,
}

struct State<R: Shareable> {
    waiting: VecDeque<Waiting<R>>,
    /// The calls under way, one for each task.
    calls: Vec<InFlight<R::Reply>>,
    next_task: u64,
    /// The error of the last call, if it has failed and may be repeated.
    failed: Option<StoreError>,
}

struct Waiting<R: Shareable> {
    request: R,
    called: BootInstant,
    reply: ReplySender<R::Reply>,
}

/// A call under way.
struct InFlight<T> {
    task: u64,
    since: BootInstant,
    replies: Vec<ReplySender<T>>,
}

/// The requests of a store, by their kind, and the clocks of their validity.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) clock: Clock,
    server_clock: Mutex<ServerClock>,
    acquires: SharedCalls<AcquireRequest>,
    releases: SharedCalls<ReleaseRequest>,
}

/// A kind of request that an [`Outbox`] has.
pub(crate) trait Outgoing: Shareable {
    fn calls(outbox: &Outbox) -> &SharedCalls<Self>;
}

/// The state of a store.
pub(crate) trait Sender: Send + Sync + 'static {
    /// The name of the store, for errors.
    const STORE: &'static str;

    fn outbox(&self) -> &Outbox;

    fn now(&self) -> BootInstant {
        self.outbox().clock.now()
    }

    /// Why the store refuses a request about this key without a call.
    fn check(&self, operation: &'static str, key: &LockKey, needs: Needs) -> Result<(), StoreError>;
}

/// Sends the requests of one kind.
pub(crate) trait SendRequests<R: Outgoing>: Sender {
    /// Whether requests wait also for the end of a call that takes long, to share the next one.
    fn shares_waits(&self) -> bool {
        false
    }

    /// The error of a request that was not sent. `failed`: the error of the call before it.
    fn not_sent(failed: Option<&StoreError>) -> StoreError {
        let overloaded = || StoreError::new(Self::STORE, R::OPERATION, StoreErrorKind::Overloaded);
        match failed {
            Some(error) => overloaded().with_source(error.clone()),
            None => overloaded().with_source("more requests wait for the server than it replies to in time"),
        }
    }

    /// Sends one call. The replies are in the order of the requests. `called` is the instant of the
    /// first one.
    fn send(
        self: &Arc<Self>,
        requests: Vec<R>,
        called: BootInstant,
    ) -> impl Future<Output = Vec<Result<R::Reply, StoreError>>> + Send;
}

/// Sends one call after the other while requests wait.
struct Task<R: Outgoing, S: SendRequests<R>> {
    sender: Arc<S>,
    number: u64,
    request: PhantomData<fn(R)>,
}

/// Sends each request in a call of its own, and returns the replies in their order.
pub(crate) fn send_alone<R: Outgoing, S: SendRequests<R>>(
    sender: &Arc<S>,
    requests: Vec<R>,
    called: BootInstant,
) -> BoxFuture<'static, Vec<Result<R::Reply, StoreError>>> {
    let sender = Arc::clone(sender);
    Box::pin(async move {
        let calls = requests.into_iter().map(|request| sender.send(vec![request], called));
        join_all(calls).await.into_iter().flatten().collect()
    })
}

impl Outbox {
    /// The time of the server's clock at which a call expires. Without an estimate, a call that has
    /// expired already fetches the server's time.
    pub(crate) fn expires_at(&self, called: BootInstant, valid_for: Duration) -> i64 {
        self.server_clock.lock().expires_at(called, valid_for).unwrap_or(0)
    }

    /// Records the server's time in a reply that has just arrived.
    pub(crate) fn observe(&self, server_us: i64) {
        self.server_clock.lock().observe(server_us, self.clock.now());
    }
}

impl Outgoing for AcquireRequest {
    fn calls(outbox: &Outbox) -> &SharedCalls<Self> {
        &outbox.acquires
    }
}

impl Outgoing for ReleaseRequest {
    fn calls(outbox: &Outbox) -> &SharedCalls<Self> {
        &outbox.releases
    }
}

impl<R: Shareable> Default for SharedCalls<R> {
    fn default() -> Self {
        Self { state: Mutex::new(State { waiting: VecDeque::new(), calls: Vec::new(), next_task: 0, failed: None }) }
    }
}

impl<R: Outgoing> SharedCalls<R> {
    /// Sends these requests with the next call, but for those that the store refuses: their replies
    /// are ready. The validity of the requests counts from `called`, however late their futures are
    /// polled.
    pub(crate) fn push<S: SendRequests<R>>(
        sender: &Arc<S>,
        requests: Many<R>,
        called: BootInstant,
    ) -> Many<StoreFuture<R::Reply>> {
        let Some(runtime) = runtime::current() else {
            // The caller polls the futures in a runtime.
            let push_later = |request: R| {
                let sender = Arc::clone(sender);
                StoreFuture::new(async move { Self::push(&sender, request.into(), called).into_single().await })
            };
            return requests.map(push_later);
        };
        let mut state = R::calls(sender.outbox()).state.lock();
        let push = |request: R| {
            if let Err(error) = sender.check(R::OPERATION, request.key(), request.needs()) {
                return StoreFuture::ready(R::refused(error));
            }
            if state.waiting.len() >= R::MAX_WAITING {
                return StoreFuture::ready(Err(S::not_sent(state.failed.as_ref())));
            }
            let (reply, future) = StoreFuture::channel(S::STORE, R::OPERATION);
            state.waiting.push_back(Waiting { request, called, reply });
            future
        };
        let futures = requests.map(push);
        let task = state.next_task(&**sender);
        drop(state);
        if let Some(number) = task {
            Task::start(sender, number, &runtime);
        }
        futures
    }
}

impl<R: Outgoing> State<R> {
    /// Whether the next call may be sent beside those of the tasks other than this one.
    fn may_call<S: SendRequests<R>>(&self, sender: &S, task: Option<u64>, now: BootInstant) -> bool {
        let others = || self.calls.iter().filter(|call| Some(call.task) != task);
        let is_long = |call: &InFlight<_>| now.saturating_duration_since(call.since) > LONG_CALL;
        let is_full = self.waiting.len() >= MAX_REQUESTS_PER_CALL;
        let is_alone = self.waiting.front().is_some_and(|waiting| waiting.request.is_alone());
        let may_overtake = |call: &InFlight<_>| is_long(call) && !sender.shares_waits();
        others().count() < MAX_CALLS && (is_full || is_alone || others().all(may_overtake))
    }

    /// The number of a task to start, if requests wait for one.
    fn next_task<S: SendRequests<R>>(&mut self, sender: &S) -> Option<u64> {
        let now = sender.now();
        if self.waiting.is_empty() || !self.may_call(sender, None, now) {
            return None;
        }
        self.next_task += 1;
        self.calls.push(InFlight { task: self.next_task, since: now, replies: Vec::new() });
        Some(self.next_task)
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

impl<R: Outgoing, S: SendRequests<R>> Task<R, S> {
    fn start(sender: &Arc<S>, number: u64, runtime: &Handle) {
        let task = Self { sender: Arc::clone(sender), number, request: PhantomData };
        poll_and_spawn(task.run(), runtime);
    }

    async fn run(self) {
        while let Some((requests, called)) = self.next_call() {
            let replies = self.sender.send(requests, called).await;
            let failed = replies.iter().find_map(|reply| reply.as_ref().err().filter(|error| error.is_transient()));
            let senders = self.take_senders(failed.cloned());
            for (sender, reply) in senders.into_iter().zip(replies) {
                sender.send(reply);
            }
        }
    }

    /// The requests of the next call, and the instant of the first one. `None`: no request waits,
    /// or the call of another task takes those that wait.
    fn next_call(&self) -> Option<(Vec<R>, BootInstant)> {
        let now = self.sender.now();
        let mut state = R::calls(self.sender.outbox()).state.lock();
        let late = state.take_late(now);
        let may_call = state.may_call(&*self.sender, Some(self.number), now);
        let count = next_call(state.waiting.iter().map(|waiting| &waiting.request));
        let State { waiting, calls, .. } = &mut *state;
        let at = calls.iter().position(|call| call.task == self.number);
        // The earliest of them: two threads may have taken the mutex in another order.
        let called = waiting.iter().take(count).map(|waiting| waiting.called).min().filter(|_| may_call);
        let next = match (called, at) {
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
        let failed = state.failed.clone().filter(|_| !late.is_empty());
        drop(state);
        for Waiting { reply, .. } in late {
            reply.send(Err(S::not_sent(failed.as_ref())));
        }
        next
    }

    fn take_senders(&self, failed: Option<StoreError>) -> Vec<ReplySender<R::Reply>> {
        let mut state = R::calls(self.sender.outbox()).state.lock();
        state.failed = failed;
        let call = state.calls.iter_mut().find(|call| call.task == self.number);
        call.map(|call| std::mem::take(&mut call.replies)).unwrap_or_default()
    }
}

impl<R: Outgoing, S: SendRequests<R>> Drop for Task<R, S> {
    fn drop(&mut self) {
        let mut state = R::calls(self.sender.outbox()).state.lock();
        let Some(at) = state.calls.iter().position(|call| call.task == self.number) else { return };
        // Dropped with its runtime. The senders reply with an error, and the callers repeat their
        // requests from their own runtimes.
        let call = state.calls.swap_remove(at);
        let waiting = if state.calls.is_empty() { std::mem::take(&mut state.waiting) } else { VecDeque::new() };
        drop(state);
        runtime::at_end(move || drop((call, waiting)));
    }
}

impl<R: Shareable> fmt::Debug for SharedCalls<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("SharedCalls").field("waiting", &state.waiting.len()).field("calls", &state.calls.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    use futures_util::FutureExt;
    use tokio::{
        runtime::{Builder, Runtime},
        task::yield_now,
        time::{sleep, timeout},
    };

    use super::*;
    use crate::{
        acquisition::AcquisitionIds,
        lock_key::LockKey,
        proto::QUEUE,
        store::{Record, ReleaseReply, ReleaseRequest},
    };

    #[derive(Default)]
    struct Server {
        outbox: Outbox,
        hangs: AtomicBool,
    }

    impl Sender for Server {
        const STORE: &'static str = "test";

        fn outbox(&self) -> &Outbox {
            &self.outbox
        }

        fn check(&self, _: &'static str, _: &LockKey, _: Needs) -> Result<(), StoreError> {
            Ok(())
        }
    }

    impl SendRequests<ReleaseRequest> for Server {
        async fn send(
            self: &Arc<Self>,
            requests: Vec<ReleaseRequest>,
            _: BootInstant,
        ) -> Vec<Result<ReleaseReply, StoreError>> {
            if self.hangs.load(SeqCst) {
                // Not `pending`, which would keep no waker: the task would be dropped.
                sleep(Duration::from_secs(3600)).await;
            }
            requests.iter().map(|_| Ok(ReleaseReply::Freed)).collect()
        }
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_time().build().expect("a runtime")
    }

    fn release() -> ReleaseRequest {
        let id = AcquisitionIds::new("test", 1).next();
        ReleaseRequest::new(LockKey::from(("key",)), id, Duration::ZERO, QUEUE)
    }

    fn push(server: &Arc<Server>) -> StoreFuture<ReleaseReply> {
        SharedCalls::push(server, release().into(), server.now()).into_single()
    }

    #[test]
    fn request_with_a_call_of_its_own_waits_for_no_other_call() {
        let server = Arc::new(Server::default());
        server.hangs.store(true, SeqCst);
        runtime().block_on(async {
            let run_tasks = async || {
                for _ in 0..10 {
                    yield_now().await;
                }
            };
            let hangs = push(&server);
            run_tasks().await;
            server.hangs.store(false, SeqCst);
            let alone = release().record(Record::new("head", None), Duration::from_secs(60));
            let alone = SharedCalls::push(&server, alone.into(), server.now()).into_single();
            let reply = timeout(Duration::from_secs(5), alone).await;
            assert_eq!(reply.expect("in time").expect("a reply"), ReleaseReply::Freed);
            let shared = push(&server);
            run_tasks().await;
            assert!(shared.now_or_never().is_none(), "it shares the next call");
            assert!(hangs.now_or_never().is_none());
        });
    }
}
