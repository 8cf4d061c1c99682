//! A turn at a key, and a place in its line: whatever becomes of them, the next one is called.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::oneshot,
    time::{Instant, timeout},
};

use super::{locks::Core, table::Ahead};
use crate::key::LockKey;

/// The right to converse with the store about a key. Only one in the process has it at a time.
///
/// Dropped, it goes to the first of the line.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) core: Arc<Core>,
    pub(super) key: LockKey,
    /// Nothing is passed on: the turn never reached anybody.
    void: bool,
}

/// A place in the line for a key.
///
/// Dropped, it is given up; a turn that was on its way to it goes to the next.
#[derive(Debug)]
pub(super) struct Place {
    core: Arc<Core>,
    key: LockKey,
    place: u64,
    call: oneshot::Receiver<Turn>,
}

impl Turn {
    /// For whom the table said that it is their turn.
    pub(super) fn first(core: Arc<Core>, key: LockKey) -> Self {
        Self { core, key, void: false }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.void {
            return;
        }
        loop {
            let next = self.core.table().next(&self.key, Instant::now());
            let Some(call) = next else { return };
            match call.send(Self::first(Arc::clone(&self.core), self.key.clone())) {
                Ok(()) => return,
                // The waiter left between the table's word and ours.
                Err(mut turn) => turn.void = true,
            }
        }
    }
}

impl Place {
    pub(super) fn new(core: Arc<Core>, key: LockKey, place: u64, call: oneshot::Receiver<Turn>) -> Self {
        Self { core, key, place, call }
    }

    /// Waits for our turn: first come, first served. When the time is over: who is still before us.
    pub(super) async fn turn(mut self, limit: Duration) -> Result<Turn, Ahead> {
        if let Ok(Ok(turn)) = timeout(limit, &mut self.call).await {
            return Ok(turn);
        }
        let left = self.core.table().leave(&self.key, self.place);
        match left {
            Some((ahead, _)) => Err(ahead),
            // Out of the line without our doing: we were called in this very moment, or are about to be.
            None => Ok((&mut self.call).await.expect("who is taken out of the line is called")),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.call.is_terminated() {
            let left = self.core.table().leave(&self.key, self.place);
            drop(left);
            // Called already, perhaps: then the turn goes to the next one from here.
            self.call.close();
            drop(self.call.try_recv());
        }
    }
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use super::*;
    use crate::lock::{Locks, table::Entered};

    fn in_line(core: &Arc<Core>, key: &LockKey) -> Place {
        let Entered::InLine { place, call } = core.table().enter(key, Instant::now(), true) else {
            panic!("not in line")
        };
        Place::new(Arc::clone(core), key.clone(), place, call)
    }

    fn first(core: &Arc<Core>, key: &LockKey) -> Turn {
        assert!(matches!(core.table().enter(key, Instant::now(), true), Entered::YourTurn));
        Turn::first(Arc::clone(core), key.clone())
    }

    /// Between the moment in which it is taken out of the line and the one in which it is called.
    #[tokio::test]
    async fn a_waiter_that_leaves_while_it_is_called_passes_its_turn_on() {
        let locks = Locks::in_memory();
        let (core, key) = (locks.core(), LockKey::from(("n", 1)));
        let turn = first(core, &key);
        let Entered::InLine { call, .. } = core.table().enter(&key, Instant::now(), true) else {
            panic!("not in line")
        };
        drop(call);
        let next = in_line(core, &key);
        drop(turn);
        let turn = next.turn(Duration::ZERO).await.expect("called already");
        drop(turn);
        assert_eq!(core.table().size(), (0, 0));
    }

    #[tokio::test]
    async fn a_waiter_that_was_called_and_never_came_passes_its_turn_on() {
        let locks = Locks::in_memory();
        let (core, key) = (locks.core(), LockKey::from(("n", 1)));
        let turn = first(core, &key);
        let (gone, next) = (in_line(core, &key), in_line(core, &key));
        drop(turn);
        drop(gone);
        drop(next.turn(Duration::ZERO).await.expect("called already"));
        assert_eq!(core.table().size(), (0, 0));
    }

    /// Its time is over in the moment in which it is called: it takes its turn rather than to lose it for everybody.
    #[tokio::test(start_paused = true)]
    async fn a_waiter_that_is_called_as_its_time_ends_has_its_turn() {
        let locks = Locks::in_memory();
        let (core, key) = (locks.core(), LockKey::from(("n", 1)));
        let turn = first(core, &key);
        let late = in_line(core, &key);
        let called = core.table().next(&key, Instant::now()).expect("it is in line");
        let mut waiting = Box::pin(late.turn(Duration::from_millis(10)));
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        tokio::time::advance(Duration::from_millis(20)).await;
        assert!(futures_util::poll!(waiting.as_mut()).is_pending(), "it waits for the call that was announced");
        assert!(called.send(turn).is_ok());
        drop(waiting.await.expect("its turn"));
        assert_eq!(core.table().size(), (0, 0));
    }
}
