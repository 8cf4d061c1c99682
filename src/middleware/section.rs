//! The section of one request: its lock, and what is noted when it ends.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};

use super::{retry_after::UsualHold, trace::LockSpan};
use crate::{
    defaults::RELEASE_WAIT,
    lock::{HeldLock, LockGuard, LockLost, Owner},
};

/// The duty to end the section of one request, exactly once.
///
/// It lives in the future of the request, then in the body of its response. Dropped, the lock is given back as a dropped guard
/// gives it back: after its lock-delay.
#[derive(Debug)]
pub(super) struct Section {
    // Field order is drop order: what is noted, is noted before the next one has its turn.
    note: Note,
    guard: LockGuard,
    /// What was answered is no success: nothing keeps the key for its least time.
    has_failed: bool,
}

#[derive(Debug)]
struct Note {
    span: LockSpan,
    usual_hold: Arc<UsualHold>,
    granted: Instant,
    /// For so long the key stays taken, however soon the work is done.
    at_least: Duration,
    owner: Owner,
    /// This layer was the first to say who it is; so the request is over with this section, and nothing re-enters after the response.
    retires: bool,
}

impl Section {
    pub(super) fn new(
        guard: LockGuard,
        span: LockSpan,
        usual_hold: Arc<UsualHold>,
        owner: Owner,
        retires: bool,
    ) -> Self {
        let note = Note { span, usual_hold, granted: Instant::now(), at_least: Duration::ZERO, owner, retires };
        Self { note, guard, has_failed: false }
    }

    pub(super) fn view(&self) -> HeldLock {
        self.guard.view()
    }

    pub(super) fn span(&self) -> &LockSpan {
        &self.note.span
    }

    /// Does this as the owner of the section, which so has its lock once more where it asks.
    pub(super) fn as_owner<T>(&self, f: impl FnOnce() -> T) -> T {
        self.note.owner.scope_sync(f)
    }

    /// Whether the lock is not ours any more, and why.
    pub(super) fn is_lost(&self) -> Option<LockLost> {
        self.guard.view().ensure(Duration::ZERO).err()
    }

    pub(super) fn has_failed(&mut self) {
        self.has_failed = true;
    }

    /// The lock was lost while the handler ran or its body streamed.
    pub(super) fn lost(self, why: LockLost) {
        self.note.span.lost(why);
    }

    /// Gives the lock back, and waits for it a little: whoever sees the answer complete finds the key free.
    ///
    /// Beyond the wait, or if the store fails, the answer goes out all the same, and the key is free at the end of its
    /// lease at the latest.
    pub(super) async fn end(self) {
        let Self { mut note, guard, has_failed } = self;
        note.retire();
        if !has_failed {
            note.at_least = guard.hold_at_least();
        }
        let release = if has_failed { guard.release_failed() } else { guard.release() };
        let _ = timeout(RELEASE_WAIT, release).await;
        drop(note);
    }
}

impl Note {
    fn retire(&self) {
        if self.retires {
            self.owner.retire();
        }
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        self.retire();
        let hold: Duration = self.granted.elapsed();
        self.usual_hold.add(hold.max(self.at_least));
        self.span.ended(hold);
    }
}
