//! What the calls of a store share: the server, its clock, its messages, and the next call.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_postgres::{Row, types::Type};

use super::{
    connection::{Parameter, query, query_retry},
    error::CallError,
    messages::Messages,
    replies::{self, TimedReply},
    server::Server,
};
use crate::{
    clock::{BootInstant, Clock},
    store::{
        AcquireReply, AcquireRequest, ReleaseReply, ReleaseRequest,
        remote::{
            batching::{Sender, SharedCalls},
            server_clock::ServerClock,
        },
    },
    sync::Mutex,
};

/// What the calls of a store share.
pub(super) struct Shared {
    pub(super) clock: Clock,
    pub(super) server_clock: Mutex<ServerClock>,
    pub(super) server: Arc<Server>,
    pub(super) messages: Arc<Messages>,
    pub(super) acquires: SharedCalls<AcquireRequest, AcquireReply>,
    pub(super) releases: SharedCalls<ReleaseRequest, ReleaseReply>,
}

impl Shared {
    /// See [`Sender::stale_after`].
    const STALE_AFTER_CALLS: u32 = 4;
    /// Tries of a call that expired only because the estimate of the server's clock was too low. An
    /// expired call does nothing, and its reply has the server's time.
    const MAX_TRIES: usize = 3;

    /// Executes a statement that does nothing later than `valid_for` after the call was made, by
    /// either clock. Its first parameter is that time. Returns the reply to each request with its
    /// position.
    pub(super) async fn execute_before_expiry(
        &self,
        called: BootInstant,
        valid_for: Duration,
        deadline: Instant,
        statement: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<(usize, TimedReply)>, CallError> {
        for _ in 0..Self::MAX_TRIES {
            // Without an estimate, a call that has expired already fetches the server's time.
            let expires_us = self.server_clock.lock().expires_at(called, valid_for).unwrap_or(0);
            let expires: Parameter<'_> = (&expires_us, Type::INT8);
            let parameters: Vec<_> = [&expires].into_iter().chain(parameters).cloned().collect();
            // Not repeated: the caller releases what a call without a reply may have acquired (I8).
            let rows = query(&self.server.synced_conns.take(), statement, &parameters, deadline).await?;
            let now = self.clock.now();
            let timed = replies::timed(&rows)?;
            self.server_clock.lock().observe(timed.now_us, now);
            match timed.replies {
                Some(replies) => return Ok(replies),
                None if now.saturating_duration_since(called) >= valid_for => break,
                None => {}
            }
        }
        Err(CallError::Expired)
    }

    /// The replies in the order of the requests.
    pub(super) fn in_order<T>(count: usize, replies: Vec<(usize, T)>) -> Result<Vec<T>, CallError> {
        let mut ordered: Vec<_> = (0..count).map(|_| None).collect();
        for (position, reply) in replies {
            *ordered.get_mut(position).ok_or(CallError::UnexpectedReply)? = Some(reply);
        }
        ordered.into_iter().collect::<Option<_>>().ok_or(CallError::UnexpectedReply)
    }

    /// Executes a statement that may be repeated at any later time.
    pub(super) async fn execute(
        &self,
        statement: &str,
        parameters: &[Parameter<'_>],
        deadline: Instant,
    ) -> Result<Vec<Row>, CallError> {
        query_retry(&self.server.release_conn, statement, parameters, deadline).await
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.messages.stop();
    }
}

impl Sender for Shared {
    fn now(&self) -> BootInstant {
        self.clock.now()
    }

    fn stale_after(&self) -> Duration {
        Self::STALE_AFTER_CALLS * self.server.timeouts.call
    }
}

/// A duration for the server: rounded up to milliseconds, and at most 100 years.
pub(super) fn millis(duration: Duration) -> i64 {
    const MAX: i64 = 100 * 366 * 86_400_000;
    i64::try_from(duration.as_micros().div_ceil(1000)).unwrap_or(MAX).min(MAX)
}
