//! A streaming body that its reader and its monitor share.

use std::{mem, pin::Pin, task::Waker};

use tokio::time::Instant;
use tower::BoxError;

use super::request_locks::Duty;
use crate::{
    body::pace::{Pace, TooSlow},
    error::LockLost,
    sync::Mutex,
};

/// Whoever polls the body and its keeper meet here.
pub(super) struct Shared<B>(Mutex<Meeting<B>>);

pub(super) struct Meeting<B> {
    pub(super) flow: Whereabouts<B>,
    pub(super) pace: Pace,
    /// Bytes that were handed out, and that the reader has to make room for.
    handed_out: u64,
    /// Of who polls the body.
    waker: Option<Waker>,
}

pub(super) enum Whereabouts<B> {
    /// Nobody polls it.
    Here(Box<Flow<B>>),
    /// It is polled: not under the mutex, it is code of others.
    Away,
    /// The keeper has cut it.
    Cut(Cut),
    /// It has ended.
    Over,
}

/// In drop order: what the body owns (a transaction, a file) is gone before the next section begins.
pub(super) struct Flow<B> {
    pub(super) inner: Pin<Box<B>>,
    pub(super) duty: Duty,
}

/// Why a stream ends before its end.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cut {
    Lost(LockLost),
    TooSlow(TooSlow),
}

impl<B> Shared<B> {
    pub(super) fn new(flow: Flow<B>, pace: Pace) -> Self {
        Self(Mutex::new(Meeting { flow: Whereabouts::Here(Box::new(flow)), pace, handed_out: 1, waker: None }))
    }

    /// To be polled.
    pub(super) fn take(&self, waker: &Waker) -> Result<Box<Flow<B>>, Cut> {
        let mut meeting = self.0.lock();
        match mem::replace(&mut meeting.flow, Whereabouts::Away) {
            Whereabouts::Here(flow) => {
                let bytes = mem::take(&mut meeting.handed_out);
                meeting.pace.moved(Instant::now(), bytes);
                meeting.waker.get_or_insert_with(|| waker.clone()).clone_from(waker);
                Ok(flow)
            }
            Whereabouts::Cut(cut) => Err(cut),
            // A poll has panicked: what it polled is gone.
            Whereabouts::Away | Whereabouts::Over => Err(Cut::Lost(LockLost::Released)),
        }
    }

    /// Polled. `handed_out`: so many bytes, and it is the reader's turn.
    pub(super) fn put(&self, flow: Box<Flow<B>>, handed_out: Option<u64>) {
        let mut meeting = self.0.lock();
        meeting.flow = Whereabouts::Here(flow);
        if let Some(bytes) = handed_out {
            // A frame without bytes was taken, too: it is no sign of life that is missing.
            meeting.handed_out = bytes.max(1);
            meeting.pace.waits(Instant::now());
        }
    }

    pub(super) fn over(&self) {
        self.0.lock().flow = Whereabouts::Over;
    }

    /// Ends it where it stands. False: it is polled at this moment, and whoever does so will see for himself.
    pub(super) fn cut(&self, cut: Cut) -> bool {
        let mut meeting = self.0.lock();
        let (flow, waker) = match mem::replace(&mut meeting.flow, Whereabouts::Cut(cut)) {
            Whereabouts::Here(flow) => (flow, meeting.waker.take()),
            Whereabouts::Away => {
                meeting.flow = Whereabouts::Away;
                return false;
            }
            over @ (Whereabouts::Cut(_) | Whereabouts::Over) => {
                meeting.flow = over;
                return true;
            }
        };
        drop(meeting);
        // Not under the mutex: code of others. First whoever polls, who finds it cut whatever the drop of the body does.
        if let Some(waker) = waker {
            waker.wake();
        }
        let Flow { inner, duty } = *flow;
        drop(inner);
        match cut {
            Cut::Lost(why) => duty.lost(why),
            Cut::TooSlow(why) => duty.stalled(why),
        }
        true
    }

    /// Whether its reader was too slow by now; else when to look again, if it is the reader's turn.
    pub(super) fn too_slow(&self, now: Instant) -> Result<Option<Instant>, TooSlow> {
        let mut meeting = self.0.lock();
        match meeting.pace.verdict(now) {
            Some(why) => Err(why),
            None => Ok(meeting.pace.look_at()),
        }
    }
}

impl From<Cut> for BoxError {
    fn from(cut: Cut) -> Self {
        match cut {
            Cut::Lost(why) => why.into(),
            Cut::TooSlow(why) => why.into(),
        }
    }
}
