//! The server of a store, and the connections for calls to it.

use std::sync::Arc;

use tokio::sync::Notify;

use super::{
    connection::{Calls, Connector, Timeouts},
    error::CallError,
    schema::Schema,
};
use crate::{background::Background, store::StoreError};

/// The server, and the connections for calls to it.
#[derive(Debug)]
pub(super) struct Server {
    /// Host and port, without user and password.
    pub(super) address: String,
    pub(super) schema: Schema,
    pub(super) timeouts: Timeouts,
    pub(super) background: Background,
    pub(super) acquire_conn: Calls,
    /// Of releases and renewals, which therefore never wait for acquires.
    pub(super) release_conn: Calls,
    /// Notified when an outage may have ended.
    pub(super) recovered: Arc<Notify>,
}

impl Server {
    pub(super) fn new(
        connector: &Arc<Connector>,
        address: String,
        schema: Schema,
        timeouts: Timeouts,
        background: Background,
    ) -> Self {
        let recovered = Arc::<Notify>::default();
        let connection = || Calls::new(Arc::clone(connector), timeouts.connect, Arc::clone(&recovered));
        let (acquire_conn, release_conn) = (connection(), connection());
        Self { address, schema, timeouts, background, acquire_conn, release_conn, recovered }
    }

    pub(super) fn store_error(&self, operation: &'static str, error: CallError) -> StoreError {
        error.into_store_error(operation, &self.address)
    }
}
