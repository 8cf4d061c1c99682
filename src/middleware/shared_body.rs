//! A streaming body that its reader and its monitor share.

use std::{mem, pin::Pin, task::Waker};

use tokio::time::Instant;
use tower::BoxError;

use super::request_locks::RequestLocks;
use crate::{
    body::pace::{Pace, TooSlow},
    error::LockLost,
    sync::Mutex,
};

/// Whoever polls the body and its keeper meet here.
pub(super) struct SharedBody<B>(Mutex<SharedState<B>>);

pub(super) struct SharedState<B> {
    pub(super) state: BodyState<B>,
    pub(super) pace: Pace,
    /// Bytes that were handed out, and that the reader has to make room for.
    handed_out: u64,
    /// Of who polls the body.
    waker: Option<Waker>,
}

pub(super) enum BodyState<B> {
    /// Nobody polls it.
    Idle(Box<LockedBody<B>>),
    /// It is polled: not under the mutex, it is code of others.
    Polling,
    /// The keeper has cut it.
    Aborted(AbortReason),
    /// It has ended.
    Done,
}

/// In drop order: what the body owns (a transaction, a file) is gone before the next section begins.
pub(super) struct LockedBody<B> {
    pub(super) inner: Pin<Box<B>>,
    pub(super) locks: RequestLocks,
}

/// Why a stream ends before its end.
#[derive(Clone, Copy, Debug)]
pub(super) enum AbortReason {
    Lost(LockLost),
    TooSlow(TooSlow),
}

impl<B> SharedBody<B> {
    pub(super) fn new(flow: LockedBody<B>, pace: Pace) -> Self {
        Self(Mutex::new(SharedState { state: BodyState::Idle(Box::new(flow)), pace, handed_out: 1, waker: None }))
    }

    /// To be polled.
    pub(super) fn start_poll(&self, waker: &Waker) -> Result<Box<LockedBody<B>>, AbortReason> {
        let mut meeting = self.0.lock();
        match mem::replace(&mut meeting.state, BodyState::Polling) {
            BodyState::Idle(flow) => {
                let bytes = mem::take(&mut meeting.handed_out);
                meeting.pace.record(Instant::now(), bytes);
                meeting.waker.get_or_insert_with(|| waker.clone()).clone_from(waker);
                Ok(flow)
            }
            BodyState::Aborted(cut) => Err(cut),
            // A poll has panicked: what it polled is gone.
            BodyState::Polling | BodyState::Done => Err(AbortReason::Lost(LockLost::Released)),
        }
    }

    /// Polled. `handed_out`: so many bytes, and it is the reader's turn.
    pub(super) fn finish_poll(&self, flow: Box<LockedBody<B>>, handed_out: Option<u64>) {
        let mut meeting = self.0.lock();
        meeting.state = BodyState::Idle(flow);
        if let Some(bytes) = handed_out {
            // A frame without bytes was taken, too: it is no sign of life that is missing.
            meeting.handed_out = bytes.max(1);
            meeting.pace.start_waiting(Instant::now());
        }
    }

    pub(super) fn finish(&self) {
        self.0.lock().state = BodyState::Done;
    }

    /// Ends it where it stands. False: it is polled at this moment, and whoever does so will see for himself.
    pub(super) fn abort(&self, cut: AbortReason) -> bool {
        let mut meeting = self.0.lock();
        let (flow, waker) = match mem::replace(&mut meeting.state, BodyState::Aborted(cut)) {
            BodyState::Idle(flow) => (flow, meeting.waker.take()),
            BodyState::Polling => {
                meeting.state = BodyState::Polling;
                return false;
            }
            over @ (BodyState::Aborted(_) | BodyState::Done) => {
                meeting.state = over;
                return true;
            }
        };
        drop(meeting);
        // Not under the mutex: code of others. First whoever polls, who finds it cut whatever the drop of the body does.
        if let Some(waker) = waker {
            waker.wake();
        }
        let LockedBody { inner, locks: duty } = *flow;
        drop(inner);
        match cut {
            AbortReason::Lost(why) => duty.lost(why),
            AbortReason::TooSlow(why) => duty.stalled(why),
        }
        true
    }

    /// Whether its reader was too slow by now; else when to look again, if it is the reader's turn.
    pub(super) fn check_pace(&self, now: Instant) -> Result<Option<Instant>, TooSlow> {
        let mut meeting = self.0.lock();
        match meeting.pace.check(now) {
            Some(why) => Err(why),
            None => Ok(meeting.pace.next_check()),
        }
    }
}

impl From<AbortReason> for BoxError {
    fn from(cut: AbortReason) -> Self {
        match cut {
            AbortReason::Lost(why) => why.into(),
            AbortReason::TooSlow(why) => why.into(),
        }
    }
}
