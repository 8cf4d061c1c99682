//! The requests that wait for a connection, and the tasks that send them.
//!
//! A request is sent at once if no call is under way. Requests that arrive meanwhile share the next
//! call. So nothing waits for company, and under load Redis executes one script for up to 64 keys.
//! One task sends one call after the other: a request needs no task and no timer of its own.

use std::{collections::VecDeque, fmt, marker::PhantomData, sync::Arc, time::Duration};

use tokio::runtime::Handle;

use super::proto::{MAX_REQUESTS_PER_CALL, Shareable, next_call};
use crate::{
    clock::BootInstant,
    process::Process,
    store::{StoreError, StoreFuture, future::ReplySender},
    sync::Mutex,
};

/// The requests of one kind, and the calls under way.
pub(super) struct SharedCalls<R, T> {
    state: Mutex<State<R, T>>,
}

struct State<R, T> {
    /// The tasks of the parent process do not run in a child of `fork()`.
    process_id: u32,
    waiting: VecDeque<Waiting<R, T>>,
    /// The calls under way, one for each task.
    calls: Vec<InFlight<T>>,
    next_task: u64,
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

/// Sends the requests of one kind: the state of a store.
pub(super) trait SendRequests<R: Shareable>: Send + Sync + 'static {
    type Reply: Send + Unpin + 'static;

    /// The most requests that wait. Further ones fail.
    const MAX_WAITING: usize;

    fn calls(&self) -> &SharedCalls<R, Self::Reply>;

    fn now(&self) -> BootInstant;

    /// The time of a call after which its task counts as stopped: nothing drives its runtime.
    fn stale_after(&self) -> Duration;

    /// How long a request may wait before it is sent. Otherwise it fails.
    fn may_wait(request: &R) -> Option<Duration>;

    /// The error of a request that was not sent.
    fn overloaded() -> StoreError;

    /// The error of a request whose task was dropped with its runtime.
    fn dropped() -> StoreError;

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

impl<R, T> Default for SharedCalls<R, T> {
    fn default() -> Self {
        let process_id = Process::default().id();
        Self { state: Mutex::new(State { process_id, waiting: VecDeque::new(), calls: Vec::new(), next_task: 0 }) }
    }
}

/// The most calls under way. More than one is under way if a full call waits, or if the server is
/// far away.
const MAX_CALLS: usize = 8;
/// A call that takes longer does not delay the requests behind it.
const LONG_CALL: Duration = Duration::from_millis(2);

impl<R, T> SharedCalls<R, T>
where
    R: Shareable + Send + 'static,
    T: Send + Unpin + 'static,
{
    /// Sends the request with the next call.
    pub(super) fn push<S: SendRequests<R, Reply = T>>(sender: &Arc<S>, request: R) -> StoreFuture<T> {
        let called = sender.now();
        let Ok(runtime) = Handle::try_current() else {
            // The caller polls this future in a runtime.
            let sender = Arc::clone(sender);
            return StoreFuture::new(async move { Self::push(&sender, request).await });
        };
        let (reply, future) = StoreFuture::sent_later(S::dropped);
        let mut state = sender.calls().state.lock();
        if state.waiting.len() >= S::MAX_WAITING {
            drop(state);
            return StoreFuture::ready(Err(S::overloaded()));
        }
        state.waiting.push_back(Waiting { request, called, reply });
        let is_stale = |call: &InFlight<T>| called.saturating_duration_since(call.since) > sender.stale_after();
        let stale: Vec<_> = state.calls.extract_if(.., |call| is_stale(call)).collect();
        let task = state.may_start(called).then(|| state.start(called));
        drop(state);
        // Their requests fail now.
        drop(stale);
        if let Some(number) = task {
            let task = Task { sender: Arc::clone(sender), number, request: PhantomData };
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

impl<R, T> State<R, T> {
    fn may_start(&self, now: BootInstant) -> bool {
        let is_long = |call: &InFlight<T>| now.saturating_duration_since(call.since) > LONG_CALL;
        let is_full = self.waiting.len() >= MAX_REQUESTS_PER_CALL;
        self.calls.is_empty() || self.calls.len() < MAX_CALLS && (is_full || self.calls.iter().all(is_long))
    }

    fn start(&mut self, now: BootInstant) -> u64 {
        self.next_task += 1;
        self.calls.push(InFlight { task: self.next_task, since: now, replies: Vec::new() });
        self.next_task
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
    async fn run(self) {
        while let Some((requests, called)) = self.next_call() {
            let replies = self.sender.send(requests, called).await;
            let senders = self.take_senders();
            // A task that counted as stopped has none.
            for (sender, reply) in senders.into_iter().zip(replies) {
                sender.send(reply);
            }
        }
    }

    /// The requests of the next call, and the instant of the first one. `None`: no request waits.
    fn next_call(&self) -> Option<(Vec<R>, BootInstant)> {
        let now = self.sender.now();
        let mut state = self.sender.calls().state.lock();
        let late = state.take_late(now, S::may_wait);
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
            reply.send(Err(S::overloaded()));
        }
        next
    }

    fn take_senders(&self) -> Vec<ReplySender<S::Reply>> {
        let mut state = self.sender.calls().state.lock();
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
