//! The locks of one request at one layer, released once and together.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{HeaderMap, HeaderValue, Method, request::Parts};
use smallvec::SmallVec;
use tokio::{runtime::Handle, time::timeout};

use super::{
    config::LayerParams,
    context::RequestContext,
    record::{Ending, Recorder},
    request_lock::{AbortSignals, LOCK_TICKET, RequestLock},
};
use crate::{
    body::pace::TooSlow,
    error::LockLost,
    limits::{RECORD_WAIT, RELEASE_WAIT, RETRY_AFTER_MIN},
    lock::{Driver, ReleaseFuture, ReleaseOutcome, poll_any, while_held},
    proto::GuardEnd,
    rejection::Rejection,
    store::NewRecord,
    telemetry::span::LockSpan,
};

/// Releases all locks of one request at one layer, each exactly once.
///
/// Owned by the response future first, then by the response body.
pub(crate) struct RequestLocks {
    context: RequestContext,
    /// The method, as far as its response depends on it.
    pub(super) is_head: bool,
    pub(super) is_connect: bool,
    /// The owner of the request is open until this layer has ended its part.
    keeps_owner_open: bool,
    /// In order of acquisition. The locks that the handler acquires are in the context until it
    /// returns.
    locks: SmallVec<[RequestLock; 1]>,
    /// The response is a failure: `min_hold` does not block the keys.
    has_failed: bool,
    /// Decides on the record of the lock of the layer. Only a layer that keeps answers has it.
    recorder: Option<Box<dyn Recorder>>,
    /// The record that the lock of the layer leaves.
    record: Option<Arc<NewRecord>>,
    /// A response that leaves a record is sent only with it.
    requires_record: bool,
}

/// Releases that have started, in order.
struct Releases {
    pending: SmallVec<[(ReleaseFuture, RequestLock); 1]>,
    /// The last one leaves a record.
    leaves_record: bool,
    is_recorded: bool,
}

impl RequestLocks {
    /// No lock yet, for the request with this head.
    pub(crate) fn new(driver: &Arc<Driver>, params: Arc<LayerParams>, head: &Parts) -> Self {
        let (context, keeps_owner_open) = RequestContext::new(driver, params, head);
        Self {
            context,
            is_head: head.method == Method::HEAD,
            is_connect: head.method == Method::CONNECT,
            keeps_owner_open,
            locks: SmallVec::new(),
            has_failed: false,
            recorder: None,
            record: None,
            requires_record: false,
        }
    }

    pub(crate) fn context(&self) -> &RequestContext {
        &self.context
    }

    /// Adds the lock of the layer.
    pub(crate) fn add(&mut self, lock: RequestLock) {
        self.context.count_lock();
        self.locks.push(lock);
    }

    pub(crate) fn span(&self) -> Option<&LockSpan> {
        self.locks.first().map(|lock| &lock.span)
    }

    /// Runs the handler while all locks are held (I6). It is in the
    /// [scope](RequestContext::request_scope) of its request, and marks its own
    /// [start](RequestContext::set_running).
    pub(crate) async fn run<F: Future>(&self, handler: Pin<&mut F>) -> Result<F::Output, LockLost> {
        let mut signals = AbortSignals::new();
        let abort_reason = || self.abort_reason().or_else(|| self.context.abort_reason(self.locks.len()));
        let poll_abort = |cx: &mut Context<'_>| {
            // After the first poll only. This also adds the locks that the handler has acquired by
            // now.
            if signals.is_empty() {
                signals = self.abort_signals();
            }
            self.context.add_abort_signals(&mut signals, self.locks.len());
            poll_any(&mut signals, cx)
        };
        let done = while_held(handler, abort_reason, poll_abort).await;
        self.context.set_running(false);
        done
    }

    /// The handler has returned: takes the locks that it acquired, and closes the context.
    pub(super) fn close(&mut self) {
        self.locks.extend(self.context.close());
    }

    fn close_owner(&mut self) {
        if std::mem::take(&mut self.keeps_owner_open) {
            self.context.close_owner();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.locks.is_empty()
    }

    /// Runs a function as the owner of the request, which re-enters its locks.
    pub(super) fn as_owner<T>(&self, f: impl FnOnce() -> T) -> T {
        self.context.request_scope().scope_sync(f)
    }

    /// The reason to abort the response, if there is one now.
    pub(super) fn abort_reason(&self) -> Option<LockLost> {
        self.locks.iter().find_map(RequestLock::abort_reason)
    }

    /// Resolve when there is one.
    pub(super) fn abort_signals(&self) -> AbortSignals {
        self.locks.iter().map(RequestLock::abort_signal).collect()
    }

    pub(crate) fn set_failed(&mut self) {
        self.has_failed = true;
    }

    /// How the locks are released that leave no record.
    fn guard_end(&self) -> GuardEnd {
        if self.has_failed { GuardEnd::ReleasedAfterFailure } else { GuardEnd::Released }
    }

    /// Adds the ticket that the key is left to after this response.
    pub(super) fn add_ticket(&self, headers: &mut HeaderMap) {
        let end = self.guard_end();
        if let Some(ticket) = self.locks.iter().find_map(|lock| lock.ticket_after(&end))
            && let Ok(mut value) = HeaderValue::try_from(ticket.to_string())
        {
            value.set_sensitive(true);
            headers.insert(LOCK_TICKET, value);
        }
    }

    pub(crate) fn set_recorder(&mut self, recorder: impl Recorder + 'static, is_required: bool) {
        self.recorder = Some(Box::new(recorder));
        self.requires_record = is_required;
    }

    pub(super) fn recorder(&mut self) -> Option<&mut (dyn Recorder + 'static)> {
        self.recorder.as_deref_mut()
    }

    /// The response has ended well: its recorder decides which record is left.
    pub(super) fn set_ending(&mut self, ending: Ending<'_>) {
        self.record = self.recorder.take().and_then(|recorder| recorder.record(ending)).map(Arc::new);
    }

    /// Sets the record that is left, without a recorder.
    pub(crate) fn set_record(&mut self, record: NewRecord) {
        (self.recorder, self.requires_record) = (None, false);
        self.record = Some(Arc::new(record));
    }

    /// A lock was lost while the handler ran or its response streamed. The drop releases all locks
    /// after their lock-delay, except for that of a request that was replaced: it is held, and the
    /// newer one starts at once.
    pub(super) fn lost(mut self, why: LockLost) {
        for lock in &self.locks {
            if lock.abort_reason().is_some() {
                lock.span.lost(why);
            }
        }
        if why == LockLost::Superseded {
            self.release_replaceable();
        }
    }

    /// Releases the locks that newer requests wait for, without a lock-delay. Others, as those of
    /// extractors, may have a statement in flight.
    fn release_replaceable(&mut self) {
        self.close_all();
        let (replaceable, others): (Vec<_>, Vec<_>) = self.locks.drain(..).partition(RequestLock::is_replaceable);
        drop(others);
        replaceable.into_iter().for_each(RequestLock::release_unused);
    }

    /// The reader of the response was too slow.
    pub(super) fn stalled(self, why: TooSlow) {
        if let Some(span) = self.span() {
            span.stalled(why);
        }
        self.abandon();
    }

    /// The response has no reader any more, and its rest was dropped. All locks are released after
    /// their lock-delay, except for that of a layer that keeps answers: its record says that the
    /// handler has returned, so that a retry does not run.
    pub(super) fn abandon(mut self) {
        self.set_ending(Ending::Streamed);
        if self.record.is_some() {
            self.close_all();
            while self.locks.len() > 1 {
                self.locks.pop();
            }
            drop(self.start_releases());
        } else if self.locks.iter().any(RequestLock::is_replaceable) {
            // The client that stops a stream sends its next request.
            self.release_replaceable();
        }
    }

    /// Releases all locks and waits briefly, so that a client with a complete response finds its
    /// keys free.
    ///
    /// After that wait, or if the store fails, the response is sent all the same, unless it
    /// requires its record. A key is then free at the end of its lease at the latest.
    pub(crate) async fn release_all(&mut self) -> Result<(), Rejection> {
        let mut releases = self.start_releases();
        let requires_record = self.requires_record && releases.leaves_record;
        // A store that replies at once needs no timer. A body may be polled without a runtime: then
        // there is no timer, and the releases have started.
        let has_ended = poll_fn(|cx| Poll::Ready(releases.poll(cx).is_ready())).await;
        if !has_ended && Handle::try_current().is_ok() {
            let wait = if requires_record { RECORD_WAIT } else { RELEASE_WAIT };
            let _ = timeout(wait, poll_fn(|cx| releases.poll(cx))).await;
        }
        if requires_record && !releases.is_recorded {
            return Err(Rejection::AnswerUnconfirmed { retry_after: RETRY_AFTER_MIN });
        }
        Ok(())
    }

    /// Starts the releases, in reverse order. The lock of the layer is the last one, and leaves the
    /// record.
    fn start_releases(&mut self) -> Releases {
        self.close_all();
        let mut releases = Releases { pending: SmallVec::new(), leaves_record: false, is_recorded: false };
        while let Some(lock) = self.locks.pop() {
            releases.pending.push(match self.record.take_if(|_| self.locks.is_empty()) {
                Some(record) => {
                    releases.leaves_record = true;
                    lock.release(GuardEnd::Recorded(record))
                }
                None => lock.release(self.guard_end()),
            });
        }
        releases
    }

    fn close_all(&mut self) {
        // First, so that nothing re-enters a lock that is released.
        self.close_owner();
        self.close();
        self.context.clear_lock_count();
    }
}

impl Releases {
    /// Completes when all of them have. Logs a lock that had been lost before.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some((release, lock)) = self.pending.first_mut() {
            let outcome = ready!(Pin::new(release).poll(cx));
            if matches!(outcome, Ok(ReleaseOutcome::NotHeld)) {
                lock.span.released_late();
            }
            let (_, lock) = self.pending.remove(0);
            if self.leaves_record && self.pending.is_empty() {
                self.is_recorded = matches!(outcome, Ok(ReleaseOutcome::Released | ReleaseOutcome::HandedOff));
                if matches!(outcome, Ok(ReleaseOutcome::NotHeld)) {
                    lock.span.replay("unrecorded");
                }
            }
        }
        Poll::Ready(())
    }
}

impl Drop for RequestLocks {
    fn drop(&mut self) {
        self.close_owner();
        // Before the locks of the layer, which were acquired earlier.
        drop(self.context.close());
        self.context.clear_lock_count();
        if !self.context.handler_started() {
            // The handler was not started, so nothing needs the lock-delay.
            self.locks.drain(..).for_each(RequestLock::release_unused);
        }
    }
}
