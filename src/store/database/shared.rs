//! What the calls of a store share: the server, its clock, its messages, and the next call.

use std::{sync::Arc, time::Duration};

use super::{
    driver::{Argument, Database, Messages, Row, name},
    error::CallError,
    server::Server,
    sweep,
};
use crate::{
    clock::BootInstant,
    lock_key::LockKey,
    store::{
        StoreError,
        remote::{
            batch::Needs,
            batching::{Outbox, Sender},
            task::Task,
        },
    },
};

/// What the calls of a store share.
pub(super) struct Shared<D: Database> {
    outbox: Outbox,
    pub(super) server: Arc<Server<D>>,
    pub(super) messages: Arc<D::Messages>,
    task: Task,
}

/// Tries of a call that expired only because the estimate of the server's clock was too low.
const MAX_TRIES: usize = 3;

impl<D: Database> Shared<D> {
    pub(super) fn new(server: Arc<Server<D>>, messages: Arc<D::Messages>) -> Self {
        Self { outbox: Outbox::default(), server, messages, task: Task::default() }
    }

    /// Starts to receive messages and to sweep on this runtime, unless one does.
    pub(super) fn start(&self) {
        self.task.start(|| {
            let (server, receives) = (Arc::clone(&self.server), Arc::clone(&self.messages).receive());
            async move {
                tokio::join!(receives, sweep::run(&server));
            }
        });
    }

    /// Calls a function that does nothing later than `valid_for` after the call was made, by either
    /// clock. Its first argument is that time.
    ///
    /// A call that has expired does nothing, and its reply has the server's time: the estimate of
    /// the clock may have been too low. Otherwise the call is not repeated: the caller releases
    /// what a call without a reply may have acquired (I8).
    pub(super) async fn call_before_expiry(
        &self,
        called: BootInstant,
        valid_for: Duration,
        function: &str,
        arguments: &[Argument<'_>],
    ) -> Result<Vec<D::Row>, D::Error> {
        let (connection, deadline) = (self.server.synced_conns.take(), self.server.timeouts.call_deadline());
        for _ in 0..MAX_TRIES {
            let expires = Argument::Number(self.outbox.expires_at(called, valid_for));
            let arguments: Vec<_> = [expires].into_iter().chain(arguments.iter().copied()).collect();
            let rows = D::call(&connection, &self.server.schema, function, &arguments, deadline).await?;
            let first = rows.first().ok_or(CallError::UnexpectedReply)?;
            self.outbox.observe(first.number(1).ok_or(CallError::UnexpectedReply)?);
            // Of a call that has expired, the only row replies to no request.
            if first.number(0) != Some(0) {
                return Ok(rows);
            }
            if self.now().saturating_duration_since(called) >= valid_for {
                break;
            }
        }
        Err(CallError::Expired)
    }
}

impl<D: Database> Drop for Shared<D> {
    fn drop(&mut self) {
        self.task.stop();
    }
}

impl<D: Database> Sender for Shared<D> {
    const STORE: &'static str = D::STORE;

    fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    fn check(&self, operation: &'static str, key: &LockKey, _: Needs) -> Result<(), StoreError> {
        name::<D>(key).map(drop).ok_or_else(|| self.server.store_error(operation, CallError::InvalidKey))
    }
}
