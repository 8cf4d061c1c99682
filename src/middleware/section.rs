//! The section of one request: its lock, and what is noted when it ends.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};

use super::{retry_after::UsualHold, trace::LockSpan};
use crate::{
    defaults::RELEASE_WAIT,
    lock::{HeldLock, LockGuard},
};

/// The duty to end the section of one request, exactly once.
///
/// It lives in the future of the request, then in the body of its response. Dropped, the lock is given back as a dropped guard
/// gives it back.
#[derive(Debug)]
pub(super) struct Section {
    // Field order is drop order: what is noted, is noted before the next one has its turn.
    note: Note,
    guard: LockGuard,
}

#[derive(Debug)]
struct Note {
    span: LockSpan,
    usual_hold: Arc<UsualHold>,
    granted: Instant,
}

impl Section {
    pub(super) fn new(guard: LockGuard, span: LockSpan, usual_hold: Arc<UsualHold>) -> Self {
        Self { note: Note { span, usual_hold, granted: Instant::now() }, guard }
    }

    pub(super) fn view(&self) -> HeldLock {
        self.guard.view()
    }

    pub(super) fn span(&self) -> &LockSpan {
        &self.note.span
    }

    /// The lock was lost while the handler ran or its body streamed.
    pub(super) fn lost(self) {
        self.note.span.lost();
    }

    /// Gives the lock back, and waits for it a little: whoever sees the answer complete finds the key free.
    ///
    /// Beyond the wait, or if the store fails, the answer goes out all the same, and the key is free at the end of its
    /// lease at the latest.
    pub(super) async fn end(self) {
        let Self { note, guard } = self;
        let _ = timeout(RELEASE_WAIT, guard.release()).await;
        drop(note);
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        let hold: Duration = self.granted.elapsed();
        self.usual_hold.add(hold);
        self.span.ended(hold);
    }
}
