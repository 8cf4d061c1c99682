//! One server at an address, which may be a name.

use std::sync::{Arc, OnceLock};

use futures_util::future::BoxFuture;

use super::{
    endpoint::{Connected, Endpoint, Subscriptions},
    locate::Topology,
    socket::OnMessage,
};
use crate::store::redis::error::CallError;

/// The server at this address.
#[derive(Debug)]
pub(crate) struct Single(pub(crate) Endpoint);

impl Topology for Single {
    fn connect<'a>(&'a self, _named: &'a OnceLock<Arc<str>>) -> BoxFuture<'a, Result<Connected, CallError>> {
        Box::pin(async {
            let mut connected = self.0.connect().await?;
            connected.check().await?;
            Ok(connected)
        })
    }

    fn subscribe(&self, on_message: OnMessage) -> BoxFuture<'_, Result<Subscriptions, CallError>> {
        Box::pin(async { Ok(self.0.subscribe(on_message).await?) })
    }
}
