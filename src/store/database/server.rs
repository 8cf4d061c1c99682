//! The server of a store, and the connections for calls to it.

use std::sync::Arc;

use tokio::{sync::Notify, time::Instant};

use super::{
    connections::Connections,
    driver::{Argument, Database},
    error::CallError,
};
use crate::{
    background::Background,
    store::{
        StoreError,
        remote::{link::Link, settings::Timeouts},
    },
};

/// The server, and the connections for calls to it.
pub(crate) struct Server<D: Database> {
    /// Host and port, without user and password.
    pub(crate) address: String,
    pub(crate) schema: D::Schema,
    pub(crate) timeouts: Timeouts,
    pub(crate) background: Background,
    /// Of calls whose commits wait for the disk.
    pub(crate) synced_conns: Connections<D>,
    /// Of renewals, which therefore never wait for those, and of the rest.
    pub(crate) main_conn: Link<D>,
    /// Notified when an outage may have ended.
    #[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "no database has messages"))]
    pub(crate) recovered: Arc<Notify>,
}

impl<D: Database> Server<D> {
    pub(crate) fn new(
        database: &Arc<D>,
        address: String,
        schema: D::Schema,
        timeouts: Timeouts,
        synced_conns: usize,
    ) -> Self {
        let recovered = Arc::<Notify>::default();
        let connection = || Link::new(Arc::clone(database), timeouts.connect, Arc::clone(&recovered));
        let (synced_conns, main_conn) = (Connections::new((0..synced_conns).map(|_| connection())), connection());
        Self { address, schema, timeouts, background: Background::default(), synced_conns, main_conn, recovered }
    }

    /// Calls a function of the schema, once.
    pub(super) async fn call(
        &self,
        connection: &Link<D>,
        function: &str,
        arguments: &[Argument<'_>],
    ) -> Result<Vec<D::Row>, D::Error> {
        D::call(connection, &self.schema, function, arguments, self.timeouts.call_deadline()).await
    }

    /// As [`call`](Self::call), but calls again on a new connection if the first one breaks. Only
    /// for calls that may be repeated at any later time.
    pub(super) async fn call_retry(
        &self,
        connection: &Link<D>,
        function: &str,
        arguments: &[Argument<'_>],
    ) -> Result<Vec<D::Row>, D::Error> {
        let deadline = self.timeouts.call_deadline();
        match D::call(connection, &self.schema, function, arguments, deadline).await {
            Err(error) if error.breaks_connection() => {
                D::call(connection, &self.schema, function, arguments, deadline).await
            }
            reply => reply,
        }
    }

    pub(super) fn store_error(&self, operation: &'static str, error: D::Error) -> StoreError {
        error.into_store_error(D::STORE, operation, &self.address)
    }
}

/// Sends a statement once, and waits for its rows until the deadline. If the connection breaks, the
/// outcome is unknown; a connection that had broken before is replaced.
pub(crate) async fn send<D: Database, T, F>(
    connection: &Link<D>,
    deadline: Instant,
    send: impl Fn(D::Connection) -> F,
) -> Result<T, D::Error>
where
    F: Future<Output = Result<T, D::Error>> + Send,
{
    let breaks = |reply: &Result<T, CallError<_>>| reply.as_ref().is_err_and(CallError::breaks_connection);
    match connection.call(deadline, &send, breaks).await? {
        Err(CallError::Closed) => connection.call(deadline, &send, breaks).await?,
        reply => reply,
    }
}
