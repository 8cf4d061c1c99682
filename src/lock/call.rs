use std::{
    future::{Future, IntoFuture, poll_fn},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use tokio::time::timeout;

use super::{
    LockError, LockGuard, Policy,
    conversation::{Ahead, Ending, Request},
    core::{Core, Waiter},
    metrics,
    owner::Owner,
    policy::policy_setters,
    section::Section,
    terms::Terms,
    told::Told,
};
use crate::{
    defaults::{LOCK_WAIT, STORE_TIMEOUT},
    key::LockKey,
};

/// A lock to be taken; nothing happens before it is awaited.
///
/// # Errors
///
/// [`LockError`] says why there is no guard: held, waited in vain, no place in the line, shutting down, or the store failed.
///
/// # Cancel safety
///
/// Dropped while it waits, it leaves the line and loses its place. What the store granted in the meantime is given back.
#[derive(Debug)]
#[must_use = "nothing is locked before the call is awaited"]
pub struct LockCall {
    core: Arc<Core>,
    key: LockKey,
    policy: Policy,
    owner: Option<Owner>,
}

/// What is asked of the table.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) key: LockKey,
    /// Zero: refused while somebody else has the key.
    pub(crate) wait: Duration,
    pub(crate) terms: Terms,
    pub(crate) owner: Option<Owner>,
    /// What it is counted under.
    pub(crate) route: Option<Arc<str>>,
}

/// A place in the line. Dropped, it is given up; a turn that was on its way to it goes to the next.
struct Place<'a> {
    core: &'a Arc<Core>,
    key: &'a LockKey,
    number: u64,
    waiter: Waiter,
    is_told: bool,
}

impl LockCall {
    pub(super) fn new(core: Arc<Core>, key: LockKey, policy: Policy) -> Self {
        Self { core, key, policy, owner: None }
    }

    policy_setters!();

    /// Sets what this policy sets.
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy: policy.or(self.policy), ..self }
    }

    /// Who asks: for a key that it holds already, it has it once more. Default: the one whose [scope](Owner::scope) this is awaited in,
    /// else somebody new.
    pub fn owner(self, owner: &Owner) -> Self {
        Self { owner: Some(owner.clone()), ..self }
    }
}

impl IntoFuture for LockCall {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { core, key, policy, owner } = self;
        Box::pin(async move {
            let ask = Ask {
                key,
                wait: policy.call_wait().unwrap_or(LOCK_WAIT),
                terms: policy.call_terms(),
                owner: owner.or_else(Owner::current),
                route: None,
            };
            acquire(&core, ask).await
        })
    }
}

/// Takes the key.
///
/// # Cancel safety
///
/// Dropped at any moment it leaves the line, and gives back what the store may have granted.
pub(crate) async fn acquire(core: &Arc<Core>, ask: Ask) -> Result<LockGuard, LockError> {
    let Ask { key, wait, terms, owner, route } = ask;
    let mut waiting = metrics::Waiting::begins(route.as_ref());
    let began = core.clock.now();
    let waits = !wait.is_zero();
    let waiter: Waiter = Arc::new(Told::new());
    let number = core.request(&key, Request { waiter: Arc::clone(&waiter), waits, owner, terms });
    let place = Place { core, key: &key, number, waiter, is_told: false };
    // Who does not wait is told by the table, in time; this is in case it is not.
    let told = place.told(if waits { wait } else { 2 * STORE_TIMEOUT }).await;
    let waited = core.clock.now().since(began);
    let told = match told {
        Ok(told) => told,
        Err(Ahead { silent: Some(error), .. }) => Err(error.into()),
        Err(Ahead { lease_left, places, silent: None }) => {
            Err(LockError::TimedOut { waited, lease_left, ahead: places })
        }
    };
    match told {
        Ok(section) => {
            waiting.granted(waited);
            Ok(LockGuard::new(Arc::clone(core), section))
        }
        Err(error) => {
            waiting.refused(&error);
            Err(error)
        }
    }
}

impl Place<'_> {
    /// What becomes of it, within this time; else who is before it still.
    async fn told(mut self, limit: Duration) -> Result<Result<Arc<Section>, LockError>, Ahead> {
        if let Some(told) = self.waiter.take() {
            self.is_told = true;
            return Ok(told);
        }
        let told = match timeout(limit, poll_fn(|cx| self.waiter.poll(cx))).await {
            Ok(told) => told,
            Err(_) => match self.core.leave(self.key, self.number) {
                Some(ahead) => {
                    self.is_told = true;
                    return Err(ahead);
                }
                // Out of the line without our doing: we were told in this very moment, or are about to be.
                None => poll_fn(|cx| self.waiter.poll(cx)).await,
            },
        };
        self.is_told = true;
        Ok(told)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.is_told {
            return;
        }
        match self.waiter.close() {
            // Chosen, and never came: it passes its turn on, as if its section had been empty.
            Some(Ok(section)) => drop(self.core.guard_ended(&section, Ending::Failed)),
            Some(Err(_)) => {}
            None => drop(self.core.leave(self.key, self.number)),
        }
    }
}
