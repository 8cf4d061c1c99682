//! What gives a key back, made before it is asked for.

use std::sync::Arc;

use tokio::{
    runtime::Handle,
    time::{Instant, timeout},
};

use super::{hold::Hold, turn::Turn, watchdog::Watchdog};
use crate::{
    defaults::STORE_TIMEOUT,
    key::LockKey,
    lease::{FencingToken, OwnerId},
    store::{ReleaseAsk, Released, StoreError, StoreErrorKind},
};

/// I2, I9: holds the turn at a key and the id under which the store was asked for it.
///
/// Dropped after the store was asked, it gives the key back, in a task unless the store answers at once, and then the turn to
/// the next in line.
#[derive(Debug)]
pub(super) struct WayBack {
    /// `None` once it has been walked.
    turn: Option<Turn>,
    owner: OwnerId,
    /// The store was asked, and did not say that it granted nothing.
    asked: bool,
    /// What was granted: renewed until the way back begins.
    hold: Option<Arc<Hold>>,
    /// Where `Drop` can put what it must not wait for.
    runtime: Handle,
}

impl WayBack {
    pub(super) fn new(turn: Turn, runtime: Handle) -> Self {
        let owner = turn.core.owner_ids.next();
        Self { turn: Some(turn), owner, asked: false, hold: None, runtime }
    }

    pub(super) fn turn(&self) -> &Turn {
        self.turn.as_ref().expect("a turn until it is given back")
    }

    pub(super) fn key(&self) -> &LockKey {
        &self.turn().key
    }

    pub(super) fn owner(&self) -> &OwnerId {
        &self.owner
    }

    /// From here on the store may have granted it.
    pub(super) fn asking(&mut self) {
        self.asked = true;
    }

    /// The store said that it granted nothing.
    pub(super) fn nothing_granted(&mut self) {
        self.asked = false;
    }

    /// The store has granted it: from here on it is renewed.
    pub(super) fn granted(&mut self, token: FencingToken, asked: Instant) -> Arc<Hold> {
        let hold = Arc::new(Hold::new(self.key().clone(), self.owner.clone(), token, asked));
        Watchdog::watch(&self.turn().core, &hold, &self.runtime);
        self.hold = Some(Arc::clone(&hold));
        hold
    }

    /// The section has ended. A renewal that is still under way comes too late.
    fn begin(&mut self) {
        if let (Some(turn), Some(hold)) = (&self.turn, self.hold.take()) {
            turn.core.watchdog.forget(&self.owner);
            hold.end();
        }
    }

    /// Gives the key back, then the turn on.
    pub(super) async fn walk(mut self) -> Result<Released, StoreError> {
        self.begin();
        self.turn().core.table().giving_back(self.key());
        // Dropped in here, `Drop` walks again: a release may be repeated.
        let released = release(self.turn(), &self.owner).await;
        self.asked = false;
        released
    }
}

impl Drop for WayBack {
    fn drop(&mut self) {
        self.begin();
        let Some(turn) = self.turn.take() else { return };
        if !self.asked {
            return drop(turn);
        }
        // A store in memory has done it with the call. So its keys do not hang on a runtime that may have ended.
        if turn.core.store.release(ReleaseAsk::new(&turn.key, &self.owner)).is_ready() {
            return drop(turn);
        }
        turn.core.table().giving_back(&turn.key);
        let owner = self.owner.clone();
        // Nobody is left to hear of an error: the key is then free at the end of its lease (I8).
        self.runtime.spawn(async move { release(&turn, &owner).await });
    }
}

/// I1: names the acquisition it frees.
async fn release(turn: &Turn, owner: &OwnerId) -> Result<Released, StoreError> {
    let store = &turn.core.store;
    timeout(STORE_TIMEOUT, store.release(ReleaseAsk::new(&turn.key, owner)))
        .await
        .unwrap_or_else(|_| Err(StoreError::new("lock", "release", StoreErrorKind::Timeout)))
}
