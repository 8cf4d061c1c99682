//! The sections of one request: its locks, and what is noted when they end.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
};

use smallvec::SmallVec;
use tokio::{runtime::Handle, time::timeout};

use super::{
    abort::{Stops, first},
    context::Slot,
    owner_lifetime::Tenure,
    request_lock::Section,
};
use crate::{
    body::pace::TooSlow, error::LockLost, limits::RELEASE_WAIT, lock::ReleaseOutcome, telemetry::span::LockSpan,
};

/// The duty to end all sections of one request at one layer, each exactly once.
///
/// It lives in the future of the request, then in the body of its response.
pub(super) struct Duty {
    slot: Slot,
    tenure: Option<Arc<Tenure>>,
    /// In the order in which they were taken; those that were taken by the handler are in the slot until it has answered.
    sections: SmallVec<[Section; 1]>,
    /// What was answered is no success: nothing keeps the keys for their least time.
    has_failed: bool,
}

impl Duty {
    pub(super) fn new(slot: Slot, tenure: Option<Arc<Tenure>>) -> Self {
        Self { slot, tenure, sections: SmallVec::new(), has_failed: false }
    }

    pub(super) fn slot(&self) -> &Slot {
        &self.slot
    }

    /// The lock of the layer itself.
    pub(super) fn begin(&mut self, section: Section) {
        self.slot.holds_one();
        self.sections.push(section);
    }

    pub(super) fn span(&self) -> Option<&LockSpan> {
        self.sections.first().map(|section| &section.note.span)
    }

    /// Runs the handler as the owner of the request, as long as all its locks are ours, and not one poll longer (I6). The handler says itself
    /// when it [begins](Slot::runs).
    pub(super) async fn run<F: Future>(&self, handler: F) -> Result<F::Output, LockLost> {
        let mut handler = pin!(self.slot.in_request().scope(handler));
        let mut stops = Stops::new();
        let must_stop = || self.must_stop().or_else(|| self.slot.must_stop());
        let done = poll_fn(|cx| {
            if let Some(why) = must_stop() {
                return Poll::Ready(Err(why));
            }
            if let Poll::Ready(done) = handler.as_mut().poll(cx) {
                // What took too long was not done under the lock.
                return Poll::Ready(must_stop().map_or(Ok(done), Err));
            }
            // Only now: what is done at once needs no timer. What the handler has taken by now is looked at, too.
            if stops.is_empty() {
                stops = self.stops();
            }
            self.slot.add_stops(&mut stops, self.sections.len());
            first(&mut stops, cx).map(Err)
        })
        .await;
        self.slot.runs(false);
        done
    }

    /// The handler has answered: what it took meanwhile is to be given back with the rest, and it takes nothing more.
    pub(super) fn close(&mut self) {
        self.sections.extend(self.slot.close());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sections.is_empty()
    }

    /// Does this as the owner of the request, which so has its locks once more where it asks.
    pub(super) fn as_owner<T>(&self, f: impl FnOnce() -> T) -> T {
        self.slot.in_request().scope_sync(f)
    }

    /// Whether the answer is to be broken off now, and why.
    pub(super) fn must_stop(&self) -> Option<LockLost> {
        self.sections.iter().find_map(Section::must_stop)
    }

    /// Ready when it is.
    pub(super) fn stops(&self) -> Stops {
        self.sections.iter().map(Section::stop).collect()
    }

    pub(super) fn has_failed(&mut self) {
        self.has_failed = true;
    }

    /// A lock was lost while the handler ran or its body streamed. All are given back after their lock-delay.
    pub(super) fn lost(self, why: LockLost) {
        for section in &self.sections {
            if section.must_stop().is_some() {
                section.note.span.lost(why);
            }
        }
    }

    /// The reader of the answer was too slow. All are given back after their lock-delay.
    pub(super) fn stalled(self, why: TooSlow) {
        if let Some(span) = self.span() {
            span.stalled(why);
        }
    }

    /// Gives all locks back, and waits for it a little: whoever sees the answer complete finds the keys free.
    ///
    /// Beyond the wait, or if the store fails, the answer goes out all the same, and a key is free at the end of its
    /// lease at the latest.
    pub(super) async fn end(mut self) {
        // First of all: nothing re-enters what is given back.
        self.tenure = None;
        self.close();
        self.slot.holds_none();
        let has_failed = self.has_failed;
        // The last one first. Each begins at once, whatever becomes of the others.
        let releases: SmallVec<[_; 1]> =
            self.sections.drain(..).rev().map(|section| section.release(has_failed)).collect();
        let all = async {
            for (release, note) in releases {
                let is_late = matches!(release.await, Ok(ReleaseOutcome::NotHeld));
                if is_late {
                    note.span.late();
                }
            }
        };
        // Where no runtime is (a body may be read anywhere), nobody can wait; each has begun all the same.
        if Handle::try_current().is_ok() {
            let _ = timeout(RELEASE_WAIT, all).await;
        }
    }
}

impl Drop for Duty {
    fn drop(&mut self) {
        self.tenure = None;
        // Before those of the layer itself, which were there before them.
        drop(self.slot.close());
        self.slot.holds_none();
        if !self.slot.has_begun() {
            // Nothing of it is on its way.
            for section in self.sections.drain(..) {
                drop(section.release(true));
            }
        }
    }
}
