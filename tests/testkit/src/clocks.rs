//! The clock of a server is set, forward and back.

use std::{sync::Arc, time::Duration};

use tower_lock::{
    LockKey, LockManager,
    store::{AcquireReply, IfBusy, LockStore, ReleaseReply, RenewReply},
};

use crate::{
    caller::{Caller, LONG},
    locks::key,
};

/// The fences of a key rise over each step of the server's clock. `set` sets the clock this many
/// hours ahead.
pub async fn fences_rise_over_steps(instances: &[LockManager], set: impl AsyncFn(i64)) {
    let mut last = 0;
    for hours in [0, 24, -24, -720, 1, -1, 0] {
        set(hours).await;
        for locks in instances {
            let guard = locks.lock(key()).wait(LONG).await.expect("a grant");
            let token = guard.fencing_token().as_u64();
            assert!(token > last, "{token} after {last}, with the clock set by {hours} h");
            last = token;
            guard.release().await.expect("held");
        }
    }
}

/// A key without a holder is free, although its row was written at a later time of that clock.
pub async fn free_key_stays_free<S: LockStore>(store: &Arc<S>, set: impl AsyncFn(i64)) {
    let caller = Caller::new(store, "a");
    let (free, held) = (LockKey::from(("free",)), LockKey::from(("held",)));
    let (first, holder) = (caller.id(), caller.id());
    caller.granted(&free, &first, LONG).await;
    caller.granted(&held, &holder, LONG).await;
    assert_eq!(caller.release(&free, &first, Duration::ZERO).await, ReleaseReply::Freed);
    set(-24).await;
    caller.granted(&free, &caller.id(), LONG).await;
    let busy = caller.acquire(&held, &caller.id(), LONG, IfBusy::Fail).await.expect("a reply");
    assert!(matches!(busy, AcquireReply::Busy { .. }), "{busy:?}");
    assert_eq!(caller.renew(&held, &holder).await, RenewReply::Extended);
    assert_eq!(caller.release(&held, &holder, Duration::ZERO).await, ReleaseReply::Freed);
    caller.granted(&held, &caller.id(), LONG).await;
}
