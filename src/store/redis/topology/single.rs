//! One server at an address, which may be a name.

use std::sync::{Arc, OnceLock};

use deadpool_redis::redis::aio::PubSub;
use futures_util::future::BoxFuture;

use super::{
    servers::Topology,
    socket::{Connected, Endpoint},
};
use crate::store::redis::error::CallError;

/// The server at this address.
#[derive(Debug)]
pub(crate) struct Single(pub(crate) Endpoint);

impl Topology for Single {
    fn connect<'a>(&'a self, _named: &'a OnceLock<Arc<str>>) -> BoxFuture<'a, Result<Connected, CallError>> {
        Box::pin(async {
            let connected = self.0.connect().await?;
            connected.check().await?;
            Ok(connected)
        })
    }

    fn connect_pubsub(&self) -> BoxFuture<'_, Result<PubSub, CallError>> {
        Box::pin(async { Ok(self.0.connect_pubsub().await?) })
    }
}
