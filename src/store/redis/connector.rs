//! The server of a store: the one at an address, or the master that sentinels name.

use std::sync::{Arc, OnceLock};

use deadpool_redis::redis::{RedisResult, Value, aio::PubSub, cmd, make_extension_error};

use super::{
    sentinel::Sentinels,
    socket::{Connected, Endpoint},
};

/// Connects to the server of a store.
#[derive(Clone, Debug)]
pub(super) enum Connector {
    /// The one at this address, which may be a name.
    Server(Endpoint),
    /// The one that the sentinels name.
    Master(Arc<Sentinels>),
}

impl Connector {
    pub(super) fn sentinels(&self) -> Option<&Arc<Sentinels>> {
        match self {
            Self::Server(_) => None,
            Self::Master(sentinels) => Some(sentinels),
        }
    }

    /// Connects for calls. `named` gets the address of the master before the connect, which may
    /// take long if that server has stopped.
    pub(super) async fn connect(&self, named: &OnceLock<Arc<str>>) -> RedisResult<Connected> {
        let sentinels = match self {
            Self::Server(endpoint) => {
                let connected = endpoint.connect().await?;
                connected.check().await?;
                return Ok(connected);
            }
            Self::Master(sentinels) => sentinels,
        };
        let master = sentinels.master().await?;
        let _ = named.set(master.to_string().into());
        let connected = master.connect().await?;
        connected.check().await?;
        match cmd("ROLE").query_async(&mut connected.connection.clone()).await {
            // In the middle of a failover.
            Ok(role) if is_replica(&role) => {
                let detail = "the server that the sentinels name is a replica".to_owned();
                Err(make_extension_error("READONLY".to_owned(), Some(detail)))
            }
            Err(error) if error.code() != Some("NOPERM") => Err(error),
            Ok(_) | Err(_) => Ok(connected),
        }
    }

    /// Connects for messages.
    pub(super) async fn connect_pubsub(&self) -> RedisResult<PubSub> {
        match self {
            Self::Server(endpoint) => endpoint.connect_pubsub().await,
            Self::Master(sentinels) => sentinels.master().await?.connect_pubsub().await,
        }
    }
}

/// Whether this reply to `ROLE` is that of a replica, which accepts no writes.
pub(super) fn is_replica(role: &Value) -> bool {
    let Value::Array(role) = role else { return false };
    matches!(role.first(), Some(Value::BulkString(name)) if name != b"master")
}
