//! The requests that wait for a connection, and the tasks that send them.
//!
//! A request is sent at once if no call is under way. Requests that arrive meanwhile share the next
//! call. So nothing waits for company, and under load a server executes one call for up to 64 keys.
//! One task sends one call after the other: a request needs no task and no timer of its own.

use std::{collections::VecDeque, fmt, marker::PhantomData, sync::Arc, time::Duration};

use futures_util::future::{BoxFuture, join_all};
use tokio::runtime::Handle;

use super::{
    batch::{MAX_REQUESTS_PER_CALL, Shareable, next_call},
    inline::poll_and_spawn,
};
use crate::{
    clock::BootInstant,
    store::{Many, ReplySender, StoreError, StoreErrorKind, StoreFuture},
    sync::Mutex,
};

/// A call that takes longer does not delay the requests behind it: the server is far away, or waits
/// for a disk.
const LONG_CALL: Duration = Duration::from_millis(2);

/// The most calls under way. More than one is under way if a full call waits, or a request that
/// has a call of its own, or if a call takes long.
const MAX_CALLS: usize = 8;

/// The requests of one kind, and the calls under way.
pub(crate) struct SharedCalls<R, T> {
    state: Mutex<State<R, T>>,
}

struct State<R, T> {
    waiting: VecDeque<Waiting<R, T>>,
    /// The calls under way, one for each task.
    calls: Vec<InFlight<T>>,
    next_task: u64,
    /// The error of the last call, if it has failed and may be repeated.
    failed: Option<StoreError>,
}

struct Waiting<R, T> {
    request: R,
    called: BootInstant,
    reply: ReplySender<T>,
}

/// A call under way. Its senders are here and not in the task, because the runtime of the task may
/// stop.
struct InFlight<T> {
    task: u64,
    since: BootInstant,
    replies: Vec<ReplySender<T>>,
}

/// The state of a store.
pub(crate) trait Sender: Send + Sync + 'static {
    fn now(&self) -> BootInstant;

    /// The time of a call after which its task counts as stopped: nothing drives its runtime.
    fn stale_after(&self) -> Duration;
}

/// Sends the requests of one kind.
pub(crate) trait SendRequests<R: Shareable>: Sender {
    type Reply: Send + Unpin + 'static;

    /// The name of the store, for errors.
    const STORE: &'static str;
    /// The name of the operation, for errors.
    const OPERATION: &'static str;

    /// The most requests that wait. Further ones fail.
    const MAX_WAITING: usize;

    fn calls(&self) -> &SharedCalls<R, Self::Reply>;

    /// Whether requests wait also for the end of a call that takes long, to share the next one.
    fn shares_waits(&self) -> bool {
        false
    }

    /// How long a request may wait before it is sent. Otherwise it fails.
    fn may_wait(request: &R) -> Option<Duration>;

    /// The error of a request that was not sent. `failed`: the error of the call before it.
    fn not_sent(failed: Option<&StoreError>) -> StoreError {
        let overloaded = || StoreError::new(Self::STORE, Self::OPERATION, StoreErrorKind::Overloaded);
        match failed {
            // It has waited for a server that moves, and may go on waiting.
            Some(error) if error.is_failover() => error.clone(),
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
    ) -> impl Future<Output = Vec<Result<Self::Reply, StoreError>>> + Send;
}

/// Sends one call after the other while requests wait.
struct Task<R: Shareable, S: SendRequests<R>> {
    sender: Arc<S>,
    number: u64,
    request: PhantomData<fn(R)>,
}

/// Sends each request in a call of its own, and returns the replies in their order.
pub(crate) fn send_alone<R: Shareable + Send + 'static, S: SendRequests<R>>(
    sender: &Arc<S>,
    requests: Vec<R>,
    called: BootInstant,
) -> BoxFuture<'static, Vec<Result<S::Reply, StoreError>>> {
    let sender = Arc::clone(sender);
    Box::pin(async move {
        let calls = requests.into_iter().map(|request| sender.send(vec![request], called));
        join_all(calls).await.into_iter().flatten().collect()
    })
}

impl<R, T> Default for SharedCalls<R, T> {
    fn default() -> Self {
        Self { state: Mutex::new(State { waiting: VecDeque::new(), calls: Vec::new(), next_task: 0, failed: None }) }
    }
}

impl<R, T> SharedCalls<R, T>
where
    R: Shareable + Send + 'static,
    T: Send + Unpin + 'static,
{
    /// Sends these requests with the next call, but for those that are refused: their replies are
    /// ready.
    pub(crate) fn push_valid<S: SendRequests<R, Reply = T>>(
        sender: &Arc<S>,
        requests: Many<R>,
        refused: impl Fn(&R) -> Option<Result<T, StoreError>>,
    ) -> Many<StoreFuture<T>> {
        if requests.iter().all(|request| refused(request).is_none()) {
            return Self::push(sender, requests, sender.now());
        }
        let push = |request| match refused(&request) {
            Some(reply) => StoreFuture::ready(reply),
            None => Self::push(sender, request.into(), sender.now()).into_single(),
        };
        requests.map(push)
    }

    /// The validity of the requests counts from `called`, however late their futures are polled.
    fn push<S>(sender: &Arc<S>, requests: Many<R>, called: BootInstant) -> Many<StoreFuture<T>>
    where
        S: SendRequests<R, Reply = T>,
    {
        let Ok(runtime) = Handle::try_current() else {
            // The caller polls the futures in a runtime.
            let push_later = |request: R| {
                let sender = Arc::clone(sender);
                StoreFuture::new(async move { Self::push(&sender, request.into(), called).into_single().await })
            };
            return requests.map(push_later);
        };
        let mut state = sender.calls().state.lock();
        let push = |request| {
            if state.waiting.len() >= S::MAX_WAITING {
                return StoreFuture::ready(Err(S::not_sent(state.failed.as_ref())));
            }
            let (reply, future) = StoreFuture::channel(S::STORE, S::OPERATION);
            state.waiting.push_back(Waiting { request, called, reply });
            future
        };
        let futures = requests.map(push);
        let (stale, task) = state.restart(&**sender);
        drop(state);
        // Their requests fail now.
        drop(stale);
        if let Some(number) = task {
            Task::start(sender, number, &runtime);
        }
        futures
    }
}

impl<R: Shareable, T> State<R, T> {
    /// Whether the next call may be sent beside those of the tasks other than this one.
    fn may_call<S: SendRequests<R>>(&self, sender: &S, task: Option<u64>, now: BootInstant) -> bool {
        let others = || self.calls.iter().filter(|call| Some(call.task) != task);
        let is_long = |call: &InFlight<T>| now.saturating_duration_since(call.since) > LONG_CALL;
        let is_full = self.waiting.len() >= MAX_REQUESTS_PER_CALL;
        let is_alone = self.waiting.front().is_some_and(|waiting| waiting.request.is_alone());
        let may_overtake = |call: &InFlight<T>| is_long(call) && !sender.shares_waits();
        others().count() < MAX_CALLS && (is_full || is_alone || others().all(may_overtake))
    }

    /// Takes the calls whose tasks have stopped with their runtimes, and the number of a task to
    /// start if requests wait for one.
    fn restart<S: SendRequests<R>>(&mut self, sender: &S) -> (Vec<InFlight<T>>, Option<u64>) {
        let (now, stale_after) = (sender.now(), sender.stale_after());
        let is_stale = |call: &InFlight<T>| now.saturating_duration_since(call.since) > stale_after;
        let stale = self.calls.extract_if(.., |call| is_stale(call)).collect();
        let starts = !self.waiting.is_empty() && self.may_call(sender, None, now);
        if starts {
            self.next_task += 1;
            self.calls.push(InFlight { task: self.next_task, since: now, replies: Vec::new() });
        }
        (stale, starts.then_some(self.next_task))
    }

    /// The requests that have waited too long to be sent.
    fn take_late(&mut self, now: BootInstant, may_wait: fn(&R) -> Option<Duration>) -> Vec<Waiting<R, T>> {
        let is_late = |waiting: &Waiting<R, T>| {
            may_wait(&waiting.request).is_some_and(|limit| now.saturating_duration_since(waiting.called) > limit)
        };
        let late = self.waiting.iter().take_while(|waiting| is_late(waiting)).count();
        self.waiting.drain(..late).collect()
    }
}

impl<R: Shareable + Send + 'static, S: SendRequests<R>> Task<R, S> {
    fn start(sender: &Arc<S>, number: u64, runtime: &Handle) {
        let task = Self { sender: Arc::clone(sender), number, request: PhantomData };
        poll_and_spawn(task.run(), runtime);
    }

    async fn run(self) {
        while let Some((requests, called)) = self.next_call() {
            let replies = self.sender.send(requests, called).await;
            let failed = replies.iter().find_map(|reply| reply.as_ref().err().filter(|error| error.is_transient()));
            let senders = self.take_senders(failed.cloned());
            // A task that counted as stopped has none.
            for (sender, reply) in senders.into_iter().zip(replies) {
                sender.send(reply);
            }
        }
    }

    /// The requests of the next call, and the instant of the first one. `None`: no request waits,
    /// or the call of another task takes those that wait.
    fn next_call(&self) -> Option<(Vec<R>, BootInstant)> {
        let now = self.sender.now();
        let mut state = self.sender.calls().state.lock();
        let late = state.take_late(now, S::may_wait);
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

    fn take_senders(&self, failed: Option<StoreError>) -> Vec<ReplySender<S::Reply>> {
        let mut state = self.sender.calls().state.lock();
        state.failed = failed;
        let call = state.calls.iter_mut().find(|call| call.task == self.number);
        call.map(|call| std::mem::take(&mut call.replies)).unwrap_or_default()
    }
}

impl<R: Shareable, S: SendRequests<R>> Drop for Task<R, S> {
    fn drop(&mut self) {
        let mut state = self.sender.calls().state.lock();
        let Some(at) = state.calls.iter().position(|call| call.task == self.number) else { return };
        // Dropped with its runtime. The senders reply with an error, and the callers repeat their
        // requests from their own runtimes.
        let call = state.calls.swap_remove(at);
        let waiting = if state.calls.is_empty() { std::mem::take(&mut state.waiting) } else { VecDeque::new() };
        drop(state);
        drop((call, waiting));
    }
}

impl<R, T> fmt::Debug for SharedCalls<R, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("SharedCalls").field("waiting", &state.waiting.len()).field("calls", &state.calls.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

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

    const STALE_AFTER: Duration = Duration::from_secs(2);

    #[derive(Default)]
    struct Server {
        calls: SharedCalls<ReleaseRequest, ReleaseReply>,
        seconds: AtomicU64,
        hangs: AtomicBool,
    }

    impl Sender for Server {
        fn now(&self) -> BootInstant {
            BootInstant::from_nanos(self.seconds.load(SeqCst) * 1_000_000_000)
        }

        fn stale_after(&self) -> Duration {
            STALE_AFTER
        }
    }

    impl SendRequests<ReleaseRequest> for Server {
        type Reply = ReleaseReply;

        const STORE: &'static str = "test";
        const OPERATION: &'static str = "release";
        const MAX_WAITING: usize = 100;

        fn calls(&self) -> &SharedCalls<ReleaseRequest, ReleaseReply> {
            &self.calls
        }

        fn may_wait(_: &ReleaseRequest) -> Option<Duration> {
            None
        }

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
        SharedCalls::push_valid(server, release().into(), |_| None).into_single()
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
            let alone = SharedCalls::push_valid(&server, alone.into(), |_| None).into_single();
            let reply = timeout(Duration::from_secs(5), alone).await;
            assert_eq!(reply.expect("in time").expect("a reply"), ReleaseReply::Freed);
            let shared = push(&server);
            run_tasks().await;
            assert!(shared.now_or_never().is_none(), "it shares the next call");
            assert!(hangs.now_or_never().is_none());
        });
    }

    /// The runtimes exist, and nothing drives them any more.
    #[test]
    fn calls_of_stopped_runtimes_delay_no_later_call() {
        let server = Arc::new(Server::default());
        server.hangs.store(true, SeqCst);
        let stopped: Vec<_> = (0..=MAX_CALLS).map(|_| runtime()).collect();
        for runtime in &stopped {
            server.seconds.fetch_add(STALE_AFTER.as_secs() + 1, SeqCst);
            runtime.block_on(async {
                drop(push(&server));
                yield_now().await;
            });
        }
        server.hangs.store(false, SeqCst);
        server.seconds.fetch_add(STALE_AFTER.as_secs() + 1, SeqCst);
        let reply = runtime().block_on(async { timeout(Duration::from_secs(5), push(&server)).await });
        assert_eq!(reply.expect("in time").expect("a reply"), ReleaseReply::Freed);
    }
}
