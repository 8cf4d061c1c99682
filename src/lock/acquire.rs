//! From a key to a guard: a turn in this process, then the word of the store.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep, timeout},
};

use super::{
    LockError, LockGuard,
    locks::Core,
    table::{Ahead, Entered},
    turn::{Place, Turn},
    way_back::WayBack,
};
use crate::{
    defaults::{CHECK_IN, LEASE, RENEWALS_PER_LEASE, STORE_TIMEOUT},
    key::LockKey,
    lease::FencingToken,
    store::{AcquireAsk, Acquired, StoreError, StoreErrorKind},
};

/// Takes the key, within `wait`; zero asks once.
///
/// # Cancel safety
///
/// Dropped at any moment it leaves the line, and gives back what the store may have granted.
pub(crate) async fn acquire(core: &Arc<Core>, key: LockKey, wait: Duration) -> Result<LockGuard, LockError> {
    let began = Instant::now();
    let turn = turn(core, key, wait).await?;
    ask(turn, began, wait).await
}

/// Our turn in this process.
async fn turn(core: &Arc<Core>, key: LockKey, wait: Duration) -> Result<Turn, LockError> {
    let now = Instant::now();
    let entered = core.table().enter(&key, now, !wait.is_zero());
    let place = |place, call| Place::new(Arc::clone(core), key.clone(), place, call);
    match entered {
        Entered::YourTurn => Ok(Turn::first(Arc::clone(core), key)),
        Entered::InLine { place: number, call } => place(number, call).turn(wait).await.map_err(|ahead| {
            let waited = now.elapsed();
            LockError::TimedOut { waited, lease_left: ahead.lease_left(now + waited), ahead: ahead.places }
        }),
        Entered::InLineForGiveBack { place: number, call } => place(number, call)
            .turn(STORE_TIMEOUT)
            .await
            .map_err(|_| StoreError::new("lock", "release", StoreErrorKind::Timeout).into()),
        Entered::Taken(ahead) => Err(LockError::Held { lease_left: ahead.lease_left(now), ahead: ahead.places }),
        Entered::LineFull(Ahead { places, .. }) => Err(LockError::LineFull { ahead: places }),
    }
}

/// The store's word. Whoever holds the key elsewhere is waited for by asking again.
async fn ask(turn: Turn, began: Instant, wait: Duration) -> Result<LockGuard, LockError> {
    let core = Arc::clone(&turn.core);
    let mut way_back = WayBack::new(turn, Handle::current());
    loop {
        way_back.asking();
        let asked = Instant::now(); // I3
        let ask = AcquireAsk::new(way_back.key(), way_back.owner(), LEASE);
        // Whatever goes wrong from here on, `way_back` is dropped and gives back what may have been granted (I8).
        let answer = timeout(STORE_TIMEOUT, core.store.acquire(ask))
            .await
            .unwrap_or_else(|_| Err(StoreError::new("lock", "acquire", StoreErrorKind::Timeout)))?;
        match answer {
            Acquired::Granted { fence } => {
                let Some(token) = FencingToken::of_grant(fence) else {
                    return Err(StoreError::new("lock", "acquire", StoreErrorKind::Protocol).into());
                };
                let hold = way_back.granted(token, asked);
                return Ok(LockGuard::new(way_back, hold));
            }
            Acquired::Held { lease_left } => {
                way_back.nothing_granted();
                let waited = began.elapsed();
                if wait.is_zero() {
                    return Err(LockError::Held { lease_left, ahead: 1 });
                }
                if waited >= wait {
                    return Err(LockError::TimedOut { waited, lease_left, ahead: 1 });
                }
                // Rounded up: asked within the last millisecond of the lease it would be held once more.
                let until_free = lease_left.saturating_add(Duration::from_millis(2));
                sleep(until_free.min(CHECK_IN).min(wait - waited)).await;
            }
        }
    }
}

impl Ahead {
    /// Since the last renewal, if none has failed: at most, then.
    fn lease_left(self, now: Instant) -> Duration {
        let held = now.saturating_duration_since(self.since).as_secs_f64();
        let renewal = (LEASE / RENEWALS_PER_LEASE).as_secs_f64();
        LEASE.saturating_sub(Duration::from_secs_f64(held % renewal))
    }
}
