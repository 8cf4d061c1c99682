//! One of the servers: the scripts of votes, and its outages.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_redis::redis::Value;
use tracing::{info, warn};

use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    limits::WARN_INTERVAL,
    lock_key::LockKey,
    store::{
        AcquireRequest, StoreErrorKind,
        redis::{
            calls::{Call, Purpose, send_one},
            error::CallError,
            operations::Each,
            shared::Shared,
            topology::connection::Replicated,
            wire::{self, InvalidName, KeyReplies, RaiseRequest, Raised, ScriptCall, Timed, Vote},
        },
    },
    sync::Mutex,
};

/// One of the servers of a store.
pub(super) struct Node {
    pub(super) shared: Arc<Shared>,
    is_slow: AtomicBool,
    outage: Mutex<Outage>,
}

/// A server that does not reply is logged: the others hide it from every caller.
#[derive(Default)]
struct Outage {
    is_logged: bool,
    logged_at: Option<BootInstant>,
}

/// When a call must be executed, by the clock of the server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Validity {
    pub(super) called: BootInstant,
    pub(super) valid_for: Duration,
}

/// The votes on these acquisitions. A grant that is not raised ends with the validity.
pub(super) struct Votes(pub(super) Arc<[AcquireRequest]>, pub(super) Validity);

/// Completes these grants.
pub(super) struct Raises(pub(super) Arc<[RaiseRequest]>, pub(super) Validity);

/// Ends the incomplete grants of these acquisitions.
pub(super) struct Withdrawal(pub(super) Vec<(LockKey, AcquisitionId)>);

impl Call for Votes {
    /// A copy finds the grant.
    const PURPOSE: Purpose = Purpose::Release;
    type Reply = Each<Vote>;

    fn key(&self) -> &LockKey {
        &self.0[0].key
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName> {
        let Self(requests, Validity { called, valid_for }) = self;
        let acquisitions = requests.iter().map(|request| (&request.key, &request.id));
        at.server.keyspace.vote(acquisitions, *valid_for, at.outbox.expires_at(*called, *valid_for))
    }

    fn reply(&self, at: &Shared, reply: &Value, _: Replicated) -> Result<Option<Self::Reply>, CallError> {
        each(at, wire::parse_vote(reply, self.0.len())?, self.1)
    }
}

impl Call for Raises {
    /// A copy finds the fence.
    const PURPOSE: Purpose = Purpose::Release;
    type Reply = Each<Raised>;

    fn key(&self) -> &LockKey {
        &self.0[0].key
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName> {
        at.server.keyspace.raise(&self.0, at.outbox.expires_at(self.1.called, self.1.valid_for))
    }

    fn reply(&self, at: &Shared, reply: &Value, _: Replicated) -> Result<Option<Self::Reply>, CallError> {
        each(at, wire::parse_raise(reply, self.0.len())?, self.1)
    }
}

impl Call for Withdrawal {
    /// The grants end by themselves when the call that made them has expired.
    const PURPOSE: Purpose = Purpose::Once;
    type Reply = ();

    fn key(&self) -> &LockKey {
        &self.0[0].0
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName> {
        at.server.keyspace.withdraw(self.0.iter().map(|(key, id)| (key, id)))
    }

    fn reply(&self, _: &Shared, reply: &Value, _: Replicated) -> Result<Option<()>, CallError> {
        wire::parse_withdraw(reply)?;
        Ok(Some(()))
    }
}

fn each<T>(
    at: &Shared,
    parsed: (i64, Timed<KeyReplies<T>>),
    Validity { called, valid_for }: Validity,
) -> Result<Option<Each<T>>, CallError> {
    let replies = at.in_time(parsed, called, valid_for)?;
    Ok(replies.map(|replies| replies.into_iter().map(|reply| Ok(reply?)).collect()))
}

impl Node {
    pub(super) fn new(shared: Arc<Shared>) -> Arc<Self> {
        Arc::new(Self { shared, is_slow: AtomicBool::new(false), outage: Mutex::default() })
    }

    pub(super) async fn call<C: Call>(&self, call: C) -> Result<C::Reply, CallError> {
        send_one(&self.shared, call).await.1
    }

    /// Whether its last call had no reply in time. Nothing that the others decide waits for it
    /// then: each split vote would.
    pub(super) fn is_slow(&self) -> bool {
        self.is_slow.load(Ordering::Relaxed)
    }

    /// A call was answered, in time or not. Logs the end of an outage.
    pub(super) fn replied(&self, is_in_time: bool) {
        self.is_slow.store(!is_in_time, Ordering::Relaxed);
        let mut outage = self.outage.lock();
        if outage.is_logged {
            outage.is_logged = false;
            let address = self.shared.server.address.clone();
            let background = &self.shared.server.background;
            background.log(move || info!(target: "tower_lock", "Redis at {address} replies again"));
        }
    }

    /// A call failed. Logs the begin of an outage, at most one in ten seconds.
    pub(super) fn failed(&self, kind: StoreErrorKind, error: &str) {
        if kind == StoreErrorKind::Timeout {
            self.is_slow.store(true, Ordering::Relaxed);
        }
        let now = self.shared.outbox.clock.now();
        let mut outage = self.outage.lock();
        let is_recent = outage.logged_at.is_some_and(|at| now.saturating_duration_since(at) < WARN_INTERVAL);
        if outage.is_logged || is_recent {
            return;
        }
        *outage = Outage { is_logged: true, logged_at: Some(now) };
        let error = error.to_owned();
        self.shared.server.background.log(move || {
            warn!(target: "tower_lock", "locks need a majority of the other servers, because one does not count: {error}");
        });
    }
}
