//! The server that executes a call of one key.
//!
//! On a Cluster, a node that does not have the slot of the key says which one has it, and has
//! executed nothing. The call is then sent there, within its deadline and its validity.

use std::{borrow::Cow, sync::Arc, time::Duration};

use deadpool_redis::redis::{RedisError, Value};
use tokio::time::Instant;

use super::{
    error::CallError,
    shared::Shared,
    topology::{Nodes, connection::Replicated, server::Server, slot_map::Redirect},
    wire::{InvalidName, Keyspace, ScriptCall, Timed, UnexpectedReply, take_incomplete},
};
use crate::{clock::BootInstant, lock_key::LockKey};

/// The server of a key, and on a Cluster the node that executes its calls now.
pub(super) struct Route {
    owner: Arc<Shared>,
    cluster: Option<Slot>,
}

/// The slot of a key of a Cluster.
struct Slot {
    nodes: Arc<Nodes<Shared>>,
    number: u16,
    /// The slot moves to this node, and the key is there.
    target: Option<Arc<Shared>>,
    redirects_left: u8,
}

/// How a call is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Once, and its writes count when enough replicas have them.
    Acquire,
    /// The same on the connection of renewals, and again if the connection breaks.
    Renew,
    /// Again if the connection breaks: the call may be repeated at any later time.
    Release,
    /// On the connection of releases, and not again: a later call would change something else.
    Once,
}

/// The reply to a call that expires.
pub(super) struct InTime<T> {
    pub(super) reply: T,
    pub(super) replicated: Replicated,
    /// The fence of a grant that is not complete: the slot of its key moves.
    pub(super) incomplete: Option<u64>,
}

impl Route {
    /// A slot that moves back and forth leads to an error, and the call is repeated later.
    const MAX_REDIRECTS: u8 = 5;
    /// Tries of a call that expired only because the estimate of the server's clock was too low. An
    /// expired call does nothing, and its reply has the server's time.
    const MAX_TRIES: usize = 3;

    pub(super) fn new(owner: &Arc<Shared>, key: &LockKey) -> Self {
        let slot = |nodes: Arc<Nodes<Shared>>| Slot {
            number: nodes.slot(key),
            nodes,
            target: None,
            redirects_left: Self::MAX_REDIRECTS,
        };
        Self { owner: Arc::clone(owner), cluster: owner.nodes().map(slot) }
    }

    /// The route of a name beside the key, which may be on another node while the slot moves.
    pub(super) fn beside(&self) -> Self {
        let slot = |slot: &Slot| Slot {
            nodes: Arc::clone(&slot.nodes),
            number: slot.number,
            target: None,
            redirects_left: Self::MAX_REDIRECTS,
        };
        Self { owner: Arc::clone(&self.owner), cluster: self.cluster.as_ref().map(slot) }
    }

    /// The master of the slot, which has the waiters.
    pub(super) fn owner(&self) -> &Arc<Shared> {
        &self.owner
    }

    /// The server that executes the calls.
    fn at(&self) -> &Arc<Shared> {
        self.cluster.as_ref().and_then(|slot| slot.target.as_ref()).unwrap_or(&self.owner)
    }

    fn names(&self) -> Cow<'_, Keyspace> {
        let names = &self.owner.server.keyspace;
        match &self.cluster {
            Some(Slot { target: Some(_), .. }) => Cow::Owned(names.asking()),
            _ => Cow::Borrowed(names),
        }
    }

    /// Follows a redirection. An error of another kind is returned.
    pub(super) async fn follow(&mut self, error: CallError) -> Result<(), CallError> {
        let asked = Arc::clone(self.at());
        let (error, slot) = match (error, &mut self.cluster) {
            (CallError::Redis(error), Some(slot)) if CallError::is_of_cluster(&error) => (error, slot),
            (error, _) => return Err(error),
        };
        let Some(redirect) = Redirect::of(&error, &asked.server).filter(|_| slot.redirects_left > 0) else {
            return Err(CallError::ClusterChanges(error));
        };
        slot.redirects_left -= 1;
        if redirect.is_ask {
            slot.target = Some(slot.nodes.at(&redirect));
            return Ok(());
        }
        slot.target = None;
        slot.nodes.moved(&redirect).await?;
        self.owner = slot.nodes.owner(slot.number).ok_or(CallError::NoMaster)?;
        Ok(())
    }

    /// Executes a call. Returns its reply, and whether enough replicas have its writes.
    pub(super) async fn execute(
        &mut self,
        purpose: Purpose,
        call: impl Fn(&Keyspace, &Shared) -> Result<ScriptCall, InvalidName>,
        deadline: Instant,
    ) -> Result<(Value, Replicated), CallError> {
        loop {
            let call = call(&self.names(), self.at())?;
            match self.send(purpose, &call, deadline).await {
                Err(error) => self.follow(error).await?,
                sent => return sent,
            }
        }
    }

    async fn send(
        &self,
        purpose: Purpose,
        call: &ScriptCall,
        deadline: Instant,
    ) -> Result<(Value, Replicated), CallError> {
        let Server { acquire_conn, release_conn, renew_conn, min_replicas, .. } = &*self.at().server;
        let (connection, min_replicas) = match purpose {
            Purpose::Acquire => (acquire_conn, *min_replicas),
            Purpose::Renew => (renew_conn, *min_replicas),
            Purpose::Release | Purpose::Once => (release_conn, None),
        };
        let is_asking = !Arc::ptr_eq(self.at(), &self.owner);
        match purpose {
            // Not repeated if the connection breaks: the slot may have moved by then.
            _ if is_asking => connection.call_asking(call, min_replicas, deadline).await,
            Purpose::Acquire | Purpose::Once => connection.call_replicated(call, min_replicas, deadline).await,
            Purpose::Renew | Purpose::Release => connection.call_replicated_retry(call, min_replicas, deadline).await,
        }
    }

    /// Parses a reply of the server that executed the last call.
    pub(super) fn parsed<T>(&self, purpose: Purpose, parsed: Result<T, UnexpectedReply>) -> Result<T, CallError> {
        let Server { acquire_conn, release_conn, renew_conn, .. } = &*self.at().server;
        let connection = match purpose {
            Purpose::Acquire => acquire_conn,
            Purpose::Renew => renew_conn,
            Purpose::Release | Purpose::Once => release_conn,
        };
        connection.parsed(parsed)
    }

    /// Reports what a script has found in place of the fence.
    pub(super) fn check_fence(&self, reply: &Value) {
        self.at().check_fence(reply, self.cluster.as_ref().map(|slot| slot.number));
    }

    /// Executes a call that does nothing later than `valid_for` after it was made, by either clock.
    /// `first`: the reply of the first time, if it was sent together with others.
    pub(super) async fn execute_before_expiry<T>(
        &mut self,
        called: BootInstant,
        valid_for: Duration,
        deadline: Instant,
        call: impl Fn(&Keyspace, i64) -> Result<ScriptCall, InvalidName>,
        parse: impl Fn(&Value) -> Result<(i64, Timed<T>), UnexpectedReply>,
        mut first: Option<(Value, Replicated)>,
    ) -> Result<InTime<T>, CallError> {
        for _ in 0..Self::MAX_TRIES {
            // Not repeated: the caller releases what a call without a reply may have acquired (I8).
            let (mut reply, replicated) = match first.take() {
                Some(first) => first,
                None => {
                    let call = |names: &Keyspace, at: &Shared| call(names, at.expires_at(called, valid_for));
                    self.execute(Purpose::Acquire, call, deadline).await?
                }
            };
            let at = self.at();
            let now = at.clock.now();
            self.check_fence(&reply);
            let incomplete = self.cluster.as_ref().and_then(|_| take_incomplete(&mut reply));
            let (server_us, outcome) = at.server.acquire_conn.parsed(parse(&reply))?;
            at.server_clock().observe(server_us, now);
            match outcome {
                Timed::Done(reply) => return Ok(InTime { reply, replicated, incomplete }),
                Timed::Expired if now.saturating_duration_since(called) >= valid_for => break,
                Timed::Expired => {}
            }
        }
        Err(CallError::Expired)
    }
}

impl Redirect {
    /// The redirection that this error of a server is.
    fn of(error: &RedisError, asked: &Server) -> Option<Self> {
        let (address, _) = error.redirect_node()?;
        Self::parse(error.code() == Some("ASK"), &asked.topology.host(), address)
    }
}
