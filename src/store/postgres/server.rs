//! The server of a store, and the connections for calls to it.

use std::sync::Arc;

use tokio::sync::Notify;
use tokio_postgres::Row;

use super::{
    connection::{Calls, Connector, Parameter, query},
    connections::Connections,
    error::CallError,
    schema::Schema,
};
use crate::{
    background::Background,
    store::{StoreError, remote::settings::Timeouts},
};

/// The server, and the connections for calls to it.
#[derive(Debug)]
pub(super) struct Server {
    /// Host and port, without user and password.
    pub(super) address: String,
    pub(super) schema: Schema,
    pub(super) timeouts: Timeouts,
    pub(super) background: Background,
    /// Of acquires and yields, and of releases with a record or a block: their commits wait for the
    /// disk.
    pub(super) synced_conns: Connections,
    /// Of the other releases and of renewals, which therefore never wait for acquires.
    pub(super) release_conn: Calls,
    /// Notified when an outage may have ended.
    pub(super) recovered: Arc<Notify>,
}

impl Server {
    pub(super) fn new(connector: &Arc<Connector>, schema: Schema, timeouts: Timeouts, connections: usize) -> Self {
        let (address, recovered) = (connector.address.clone(), Arc::<Notify>::default());
        let connection = || Calls::new(Arc::clone(connector), timeouts.connect, Arc::clone(&recovered));
        // The other two are for releases and for messages.
        let synced_conns = Connections::new((2..connections).map(|_| connection()));
        let release_conn = connection();
        let background = Background::default();
        Self { address, schema, timeouts, background, synced_conns, release_conn, recovered }
    }

    /// Calls a function of the schema, once.
    pub(super) async fn call(
        &self,
        connection: &Calls,
        function: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, CallError> {
        let statement = self.schema.call(function, parameters.len());
        query(connection, &statement, parameters, self.timeouts.call_deadline()).await
    }

    /// As [`call`](Self::call), but calls again on a new connection if the first one breaks. Only
    /// for calls that may be repeated at any later time.
    pub(super) async fn call_retry(
        &self,
        connection: &Calls,
        function: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, CallError> {
        let (statement, deadline) = (self.schema.call(function, parameters.len()), self.timeouts.call_deadline());
        match query(connection, &statement, parameters, deadline).await {
            Err(CallError::Server(error)) if error.code().is_none() => {
                query(connection, &statement, parameters, deadline).await
            }
            reply => reply,
        }
    }

    pub(super) fn store_error(&self, operation: &'static str, error: CallError) -> StoreError {
        error.into_store_error(operation, &self.address)
    }
}
