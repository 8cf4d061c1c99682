//! One of the independent servers, and the check that it is one.
//!
//! Each new connection is checked before it is used: a server that was down when the store was made
//! must not count before that, and an address may lead to another server later.

use std::sync::{Arc, OnceLock};

use deadpool_redis::redis::{RedisError, Value, cmd, from_redis_value};
use futures_util::future::BoxFuture;

use crate::{
    store::{
        error::escape_control,
        redis::{
            error::{CallError, RedisConnectError},
            self_test::{check_version, info_field, server_mode},
            topology::{Endpoint, Topology, endpoint::Connected},
            wire::Keyspace,
        },
    },
    sync::Mutex,
};

/// How one server is found.
pub(super) struct Member {
    pub(super) endpoint: Endpoint,
    /// Its index among the members.
    pub(super) index: usize,
    pub(super) keyspace: Keyspace,
    pub(super) members: Arc<Members>,
}

/// The servers of a store, as they have identified themselves.
pub(super) struct Members {
    addresses: Vec<String>,
    /// A server has another id after each restart.
    run_ids: Mutex<Vec<Option<String>>>,
}

impl Members {
    pub(super) fn new(addresses: Vec<String>) -> Arc<Self> {
        let run_ids = Mutex::new(vec![None; addresses.len()]);
        Arc::new(Self { addresses, run_ids })
    }

    /// Fails if two addresses are equal.
    pub(super) fn check_addresses(&self) -> Result<(), RedisConnectError> {
        let is_known = |index: usize| self.addresses[..index].contains(&self.addresses[index]);
        match (0..self.addresses.len()).find(|index| is_known(*index)) {
            Some(index) => Err(self.refused(index, "its address is named twice")),
            None => Ok(()),
        }
    }

    /// Notes that the server with this index has this id. One server with two indexes would have
    /// two votes.
    fn admit(&self, index: usize, run_id: &str) -> Result<(), RedisConnectError> {
        let mut run_ids = self.run_ids.lock();
        let other = run_ids.iter().position(|known| known.as_deref() == Some(run_id)).filter(|other| *other != index);
        // A server that is refused has no id: the addresses of two servers may have been exchanged.
        run_ids[index] = other.is_none().then(|| run_id.to_owned());
        match other {
            None => Ok(()),
            Some(other) => Err(self.refused(index, &format!("{} is the same server", self.addresses[other]))),
        }
    }

    fn refused(&self, index: usize, reason: &str) -> RedisConnectError {
        RedisConnectError::NotIndependent { address: self.addresses[index].clone(), reason: reason.to_owned() }
    }
}

impl Member {
    /// Connects, and checks the server. `Err(Ok(_))`: it can be no member.
    pub(super) async fn connect_checked(&self) -> Result<Connected, Result<RedisConnectError, CallError>> {
        let failed = |error: RedisError| Err(CallError::from(error));
        let socket = self.endpoint.connect().await.map_err(failed)?;
        let sections = ["server", "replication"].map(|section| cmd("INFO").arg(section).take());
        let info = socket.call(&sections).await.map_err(|error| {
            if error.code() != Some("NOPERM") {
                return failed(error);
            }
            Ok(RedisConnectError::PermissionDenied {
                address: self.address().to_owned(),
                user: self.endpoint.user(),
                refusals: vec![escape_control(&error.to_string())],
            })
        })?;
        self.check(&info).map_err(Ok)?;
        // Loads the scripts, so that calls are executed in the order in which they are sent: a call
        // of an unknown script is sent again, behind those after it. The calls themselves have the
        // error, if there is one.
        let _ = socket.call_each(&self.keyspace.redlock_scripts().map(|call| call.eval())).await;
        Ok(Connected::Socket(socket))
    }

    fn check(&self, info: &Value) -> Result<(), RedisConnectError> {
        let section = |index: usize| {
            let Value::Array(sections) = info else { return None };
            from_redis_value::<String>(sections.get(index)?.clone()).ok()
        };
        let (server, replication) = (section(0).unwrap_or_default(), section(1).unwrap_or_default());
        let refused = |reason| Err(self.members.refused(self.index, reason));
        match server_mode(&server) {
            Some("cluster") => return refused("it is a node of a Redis Cluster"),
            Some("sentinel") => return refused("it is a sentinel"),
            _ => {}
        }
        check_version(&server, self.address())?;
        if info_field(&replication, "role").is_some_and(|role| role != "master") {
            return refused("it is a replica");
        }
        match info_field(&server, "run_id") {
            Some(run_id) => self.members.admit(self.index, run_id),
            None => refused("`INFO server` has no `run_id`, which would show that no other address leads to it"),
        }
    }

    fn address(&self) -> &str {
        &self.members.addresses[self.index]
    }
}

impl Topology for Member {
    fn connect<'a>(&'a self, _named: &'a OnceLock<Arc<str>>) -> BoxFuture<'a, Result<Connected, CallError>> {
        Box::pin(async {
            let refused = |error| CallError::SelfTestFailed(Arc::new(error));
            self.connect_checked().await.map_err(|error| error.map_or_else(|error| error, refused))
        })
    }

    /// A vote precedes its raise, and both precede the release.
    fn needs_order(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_server_has_one_vote() {
        let members = Members::new(["a", "b", "c"].map(str::to_owned).to_vec());
        let admit = |index, run_id| members.admit(index, run_id).map_err(|error| error.to_string());
        assert_eq!(admit(0, "x"), Ok(()));
        assert_eq!(admit(0, "x"), Ok(()), "its second connection");
        let refused = "Redis at b is no independent server for a RedlockStore: a is the same server";
        assert_eq!(admit(1, "x"), Err(refused.to_owned()));
        assert_eq!((admit(1, "y"), admit(0, "z"), admit(2, "x")), (Ok(()), Ok(()), Ok(())), "restarted, and moved");
    }

    /// Each of them is refused once: no state is left that refuses them for good.
    #[test]
    fn servers_may_exchange_their_addresses() {
        let members = Members::new(["a", "b", "c"].map(str::to_owned).to_vec());
        assert!(members.admit(0, "x").is_ok() && members.admit(1, "y").is_ok());
        assert!(members.admit(0, "y").is_err());
        assert!(members.admit(1, "x").is_ok() && members.admit(0, "y").is_ok());
    }
}
