//! What the calls of a store share: the server, its clock, its messages, and the next call.

use std::{sync::Arc, time::Duration};

use tokio_postgres::{Row, types::Type};

use super::{
    connection::{Parameter, query},
    error::CallError,
    messages::Messages,
    replies::column,
    schema::name,
    server::Server,
};
use crate::{
    clock::BootInstant,
    lock_key::LockKey,
    store::{
        StoreError,
        remote::batching::{Outbox, Sender},
    },
};

/// What the calls of a store share.
pub(super) struct Shared {
    pub(super) outbox: Outbox,
    pub(super) server: Arc<Server>,
    pub(super) messages: Arc<Messages>,
}

impl Shared {
    /// Tries of a call that expired only because the estimate of the server's clock was too low. An
    /// expired call does nothing, and its reply has the server's time.
    const MAX_TRIES: usize = 3;

    /// Calls a function that does nothing later than `valid_for` after the call was made, by either
    /// clock. Its first parameter is that time.
    pub(super) async fn call_before_expiry(
        &self,
        called: BootInstant,
        valid_for: Duration,
        function: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, CallError> {
        let statement = self.server.schema.call(function, 1 + parameters.len());
        let deadline = self.server.timeouts.call_deadline();
        for _ in 0..Self::MAX_TRIES {
            let expires_us = self.outbox.expires_at(called, valid_for);
            let expires: Parameter<'_> = (&expires_us, Type::INT8);
            let parameters: Vec<_> = [&expires].into_iter().chain(parameters).cloned().collect();
            // Not repeated: the caller releases what a call without a reply may have acquired (I8).
            let rows = query(&self.server.synced_conns.take(), &statement, &parameters, deadline).await?;
            let first = rows.first().ok_or(CallError::UnexpectedReply)?;
            self.outbox.observe(column(first, 1)?);
            // Of a call that has expired, the only row replies to no request.
            if column::<i64>(first, 0)? > 0 {
                return Ok(rows);
            }
            if self.now().saturating_duration_since(called) >= valid_for {
                break;
            }
        }
        Err(CallError::Expired)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.messages.stop();
    }
}

impl Sender for Shared {
    const STORE: &'static str = "postgres";

    fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    fn check(&self, operation: &'static str, key: &LockKey, _: bool) -> Result<(), StoreError> {
        name(key).map(drop).ok_or_else(|| self.server.store_error(operation, CallError::InvalidKey))
    }
}

/// A duration for the server: rounded up to milliseconds, and at most 100 years.
pub(super) fn millis(duration: Duration) -> i64 {
    const MAX: i64 = 100 * 366 * 86_400_000;
    i64::try_from(duration.as_micros().div_ceil(1000)).unwrap_or(MAX).min(MAX)
}
