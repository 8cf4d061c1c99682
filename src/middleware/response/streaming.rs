//! A response body that holds the locks until its last frame.

use std::{
    collections::VecDeque,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::{
    runtime::Handle,
    task::AbortHandle,
    time::{Instant, Sleep, sleep},
};
use tower::BoxError;

use super::{
    eager::{Frames, data_len},
    shared::{AbortReason, LockedBody, SharedBody, monitor},
};
use crate::{
    body::pace::Pace,
    limits::RELEASE_WAIT,
    middleware::{record::Ending, request_locks::RequestLocks},
    rejection::Rejection,
};

/// Passes frames through, and holds the last one until the locks are released: a client with a
/// complete response finds its keys free.
///
/// The server polls the body, but not while its client does not read. A *monitor* task therefore
/// aborts the stream when a lock is lost or the reader is too slow.
pub(super) struct StreamingBody<B> {
    shared: Arc<SharedBody<B>>,
    /// Frames that were read before the head was sent.
    read_ahead: <Frames as IntoIterator>::IntoIter,
    /// The size hint of the inner body before its first poll, less the bytes that were returned. A
    /// later hint of the inner body covers only its own tail.
    hint: SizeHint,
    /// How many of the bytes that the head announces have not been read from the inner body.
    unseen: Option<u64>,
    phase: Phase,
    monitor: Option<AbortHandle>,
}

enum Phase {
    /// Passes frames through.
    Streaming,
    /// All announced bytes were read. The last frame is held until the inner body ends. It gets a
    /// short time for that, because hyper does not poll for the end over HTTP/1.1.
    HoldingLastFrame(Frame<Bytes>, Pin<Box<Sleep>>),
    /// The inner body has ended. The rest is returned when the locks are released.
    Releasing(Pin<Box<dyn Future<Output = Result<(), Rejection>> + Send>>, Tail),
    /// Only the rest is left.
    Done(Tail),
}

/// The last frames, or an error.
type Tail = VecDeque<Result<Frame<Bytes>, BoxError>>;

impl<B> StreamingBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    /// `hint` is that of the whole body. `length` is the length that the head announces, in bytes.
    pub(super) fn new(
        inner: Pin<Box<B>>,
        read_ahead: <Frames as IntoIterator>::IntoIter,
        hint: SizeHint,
        length: Option<u64>,
        locks: RequestLocks,
    ) -> Self
    where
        B: Send + 'static,
    {
        let signals = locks.abort_signals();
        let idle = locks.context().policy().idle_timeout();
        let mut pace = Pace::from_policy(locks.context().policy());
        // The head is sent now, and the reader is next.
        pace.start_waiting(Instant::now());
        let context = locks.context().clone();
        let body = Arc::new(SharedBody::new(LockedBody { inner, locks }, pace));
        let monitor = context.spawn(monitor(Arc::downgrade(&body), signals, idle));
        Self { shared: body, read_ahead, hint, unseen: length, phase: Phase::Streaming, monitor }
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let next = ready!(self.poll_next(cx));
        if let Some(Ok(frame)) = &next {
            self.hint = reduced(self.hint, data_len([frame]));
        }
        Poll::Ready(next)
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            match &mut self.phase {
                Phase::Streaming | Phase::HoldingLastFrame(..) => {
                    let mut body = match self.shared.start_poll(cx.waker()) {
                        Ok(body) => body,
                        Err(reason) => return Poll::Ready(Some(Err(self.end(reason)))),
                    };
                    // I6
                    if let Some(why) = body.locks.abort_reason() {
                        return Poll::Ready(Some(Err(self.abort(*body, AbortReason::Lost(why)))));
                    }
                    let next = match self.read_ahead.next() {
                        Some(frame) => Poll::Ready(Some(Ok(frame))),
                        None => body.locks.as_owner(|| body.inner.as_mut().poll_frame(cx)),
                    };
                    // The result of a poll that outlasted the lock is not the result of work under
                    // it.
                    if let Some(why) = body.locks.abort_reason() {
                        return Poll::Ready(Some(Err(self.abort(*body, AbortReason::Lost(why)))));
                    }
                    let Poll::Ready(next) = next else {
                        if self.hold_elapsed(cx) {
                            self.emit(None, body);
                            continue;
                        }
                        self.shared.finish_poll(body, None);
                        return Poll::Pending;
                    };
                    if let Some(frame) = self.emit(next, body) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                Phase::Releasing(end, tail) => {
                    let tail = match ready!(end.as_mut().poll(cx)) {
                        Ok(()) => mem::take(tail),
                        // Without its last frame the response does not look complete.
                        Err(why) => VecDeque::from([Err(why.into())]),
                    };
                    self.phase = Phase::Done(tail);
                }
                Phase::Done(tail) => return Poll::Ready(tail.pop_front()),
            }
        }
    }

    /// The frame to return now. `None` if a frame is held, or the body ends.
    fn emit(&mut self, next: Option<Result<Frame<Bytes>, B::Error>>, body: Box<LockedBody<B>>) -> Option<Frame<Bytes>> {
        let held = match mem::replace(&mut self.phase, Phase::Streaming) {
            Phase::HoldingLastFrame(frame, _) => Some(Ok(frame)),
            _ => None,
        };
        let frame = match next {
            Some(Ok(frame)) => frame,
            None => {
                self.finish(*body, held.into_iter().collect());
                return None;
            }
            // All bytes were read, but the end (a commit, perhaps) has failed: the client must not
            // see a complete response.
            Some(Err(error)) => {
                self.finish(*body, VecDeque::from([Err(error.into())]));
                return None;
            }
        };
        if let (Some(left), Some(data)) = (&mut self.unseen, frame.data_ref()) {
            *left = left.saturating_sub(data.len() as u64);
        }
        let is_end = frame.is_trailers() || (self.read_ahead.as_slice().is_empty() && body.inner.is_end_stream());
        // Without a runtime there is no timer.
        let is_complete = self.unseen == Some(0) && frame.is_data() && Handle::try_current().is_ok();
        if is_end {
            self.finish(*body, held.into_iter().chain([Ok(frame)]).collect());
            None
        } else if held.is_some() {
            // More bytes than announced: the server will not poll for them.
            self.finish(*body, held.into_iter().collect());
            None
        } else if is_complete {
            self.phase = Phase::HoldingLastFrame(frame, Box::pin(sleep(RELEASE_WAIT)));
            self.shared.finish_poll(body, None);
            None
        } else {
            self.shared.finish_poll(body, Some(data_len([&frame])));
            Some(frame)
        }
    }

    /// Whether the last frame was held for long enough.
    fn hold_elapsed(&mut self, cx: &mut Context<'_>) -> bool {
        match &mut self.phase {
            Phase::HoldingLastFrame(_, timer) => timer.as_mut().poll(cx).is_ready(),
            _ => false,
        }
    }

    /// The inner body has ended: drops its resources, then releases the locks, then returns the
    /// tail.
    fn finish(&mut self, body: LockedBody<B>, tail: Tail) {
        let LockedBody { inner, mut locks } = body;
        drop(inner);
        self.stop();
        if tail.iter().any(Result::is_err) {
            locks.set_failed();
        } else {
            locks.set_ending(Ending::Streamed);
        }
        self.phase = Phase::Releasing(Box::pin(async move { locks.release_all().await }), tail);
    }

    fn abort(&mut self, body: LockedBody<B>, reason: AbortReason) -> BoxError {
        body.abort(reason);
        self.end(reason)
    }

    fn end(&mut self, reason: AbortReason) -> BoxError {
        self.stop();
        self.phase = Phase::Done(VecDeque::new());
        reason.into()
    }

    fn stop(&mut self) {
        self.monitor.take().inspect(AbortHandle::abort);
        self.shared.finish();
        self.read_ahead = Frames::new().into_iter();
    }

    pub(super) fn is_end_stream(&self) -> bool {
        matches!(&self.phase, Phase::Done(tail) if tail.is_empty())
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.hint
    }
}

impl<B> Drop for StreamingBody<B> {
    fn drop(&mut self) {
        // The client has disconnected, or the server has ended the connection.
        self.monitor.take().inspect(AbortHandle::abort);
        if let Some(body) = self.shared.finish() {
            let LockedBody { inner, locks } = *body;
            drop(inner);
            locks.abandon();
        }
    }
}

fn reduced(hint: SizeHint, bytes: u64) -> SizeHint {
    let mut reduced = SizeHint::new();
    if let Some(upper) = hint.upper() {
        reduced.set_upper(upper.saturating_sub(bytes));
    }
    reduced.set_lower(hint.lower().saturating_sub(bytes));
    reduced
}
