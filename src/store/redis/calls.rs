//! Sends scripts to the server of their keys, and reads the replies.
//!
//! Requests that share a call become one script, on a Cluster one for each slot. The scripts for
//! one server are sent together. A node of a Cluster that does not have a slot says which one has
//! it, and has executed nothing: that script is sent there, within its deadline and its validity.

use std::sync::Arc;

use deadpool_redis::redis::{RedisError, Value};
use futures_util::future::join_all;
use tokio::time::Instant;

use super::{
    error::CallError,
    shared::Shared,
    topology::{
        connection::{Replicated, SharedConnection, Terms},
        server::Server,
        slot_map::Redirect,
    },
    wire::{InvalidName, ScriptCall},
};
use crate::lock_key::LockKey;

/// One script: how it is made for a server, and what its reply means.
pub(super) trait Call: Send + Sync {
    const PURPOSE: Purpose;
    type Reply: Send;

    /// A key of the script, which decides its server. All its keys have one slot.
    fn key(&self) -> &LockKey;

    /// The managers whose waiters count as dead at a server without their subscriptions.
    fn managers(&self) -> Vec<&str> {
        Vec::new()
    }

    fn script(&self, at: &Shared) -> Result<ScriptCall, InvalidName>;

    /// `None`: the script has expired by the server's clock, and not by the local one.
    fn reply(&self, at: &Shared, reply: &Value, replicated: Replicated) -> Result<Option<Self::Reply>, CallError>;
}

/// How a script is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Once: the caller releases what a call without a reply may have acquired (I8). Its writes
    /// count when enough replicas have them.
    Acquire,
    /// On the connection of renewals, and again if that breaks. Its writes count when enough
    /// replicas have them.
    Renew,
    /// On the connection of releases, and again if that breaks: the script may be executed again at
    /// any later time.
    Release,
    /// On the connection of releases, and once: a later call would change something else.
    Once,
}

/// The reply to a script, and the server that has executed or refused it.
pub(super) type Outcome<T> = (Arc<Shared>, Result<T, CallError>);

/// The most times that a script is sent: to one node after another, if its slot moves back and
/// forth, or to one server, if the estimate of its clock is too low.
const MAX_TRIES: usize = 6;

/// Sends one script.
pub(super) async fn send_one<C: Call>(shared: &Arc<Shared>, call: C) -> Outcome<C::Reply> {
    let outcome = send(shared, std::slice::from_ref(&call)).await.pop();
    outcome.unwrap_or_else(|| unreachable!("one for each call"))
}

/// Sends scripts together. The outcomes are in their order.
pub(super) async fn send<C: Call>(shared: &Arc<Shared>, calls: &[C]) -> Vec<Outcome<C::Reply>> {
    shared.subscribe(calls).await;
    let deadline = shared.server.timeouts.call_deadline();
    let replies = send_scripts(shared, calls, false, deadline).await;
    let finish = |(call, reply)| finish(Arc::clone(shared), call, reply, deadline);
    join_all(calls.iter().zip(replies).map(finish)).await
}

/// Follows redirections, and sends a script again that has expired although its call has not.
async fn finish<C: Call>(
    mut at: Arc<Shared>,
    call: &C,
    mut reply: Result<(Value, Replicated), CallError>,
    deadline: Instant,
) -> Outcome<C::Reply> {
    for tries_left in (0..MAX_TRIES).rev() {
        let mut is_asking = false;
        match reply {
            Ok((value, replicated)) => {
                at.check_fence(&value, call.key());
                let reply = C::PURPOSE.connection(&at.server).checked(call.reply(&at, &value, replicated));
                if let Some(reply) = reply.transpose() {
                    return (at, reply);
                }
            }
            Err(error) => match at.next_node(call, error, tries_left).await {
                Ok((next, asks)) => (at, is_asking) = (next, asks),
                Err(error) => return (at, Err(error)),
            },
        }
        let mut replies = send_scripts(&at, std::slice::from_ref(call), is_asking, deadline).await;
        reply = replies.pop().unwrap_or_else(|| unreachable!("one for each call"));
    }
    (at, Err(CallError::Expired))
}

/// Sends the scripts of these calls together. An error of all of them is that of each.
async fn send_scripts<C: Call>(
    at: &Shared,
    calls: &[C],
    is_asking: bool,
    deadline: Instant,
) -> Vec<Result<(Value, Replicated), CallError>> {
    let terms = Terms {
        min_replicas: at.server.min_replicas.filter(|_| matches!(C::PURPOSE, Purpose::Acquire | Purpose::Renew)),
        may_repeat: matches!(C::PURPOSE, Purpose::Renew | Purpose::Release),
        is_asking,
    };
    let sent = async {
        let scripts = calls.iter().map(|call| call.script(at)).collect::<Result<Vec<_>, _>>()?;
        C::PURPOSE.connection(&at.server).call(&scripts, terms, deadline).await
    };
    match sent.await {
        Ok((replies, replicated)) => replies.into_iter().map(|reply| Ok((reply?, replicated))).collect(),
        Err(error) => {
            let error = Arc::new(error);
            calls.iter().map(|_| Err(CallError::Common(Arc::clone(&error)))).collect()
        }
    }
}

impl Shared {
    /// Waits for the subscriptions of the managers, all together: one that gets no reply delays the
    /// others once.
    async fn subscribe<C: Call>(self: &Arc<Self>, calls: &[C]) {
        let mut managers: Vec<_> = calls.iter().flat_map(C::managers).collect();
        managers.sort_unstable();
        managers.dedup();
        if !self.messages.inbox.is_disconnected() {
            join_all(managers.into_iter().map(|manager| self.messages.wait_subscribed(manager))).await;
        }
    }

    /// The node to ask after this error, and whether it executes the script for this one, because
    /// the slot moves to it. An error of another kind is returned.
    ///
    /// Only a renewal, which has one key, is executed while a slot moves: another script is refused
    /// with `TRYAGAIN` if one of its keys is not there.
    async fn next_node<C: Call>(
        &self,
        call: &C,
        error: CallError,
        tries_left: usize,
    ) -> Result<(Arc<Self>, bool), CallError> {
        let (error, nodes) = match (error, self.nodes()) {
            (CallError::Redis(error), Some(nodes)) if CallError::is_of_cluster(&error) => (error, nodes),
            (error, _) => return Err(error),
        };
        let redirect = Redirect::of(&error, &self.server);
        let Some(redirect) = redirect.filter(|to| tries_left > 0 && (!to.is_ask || C::PURPOSE == Purpose::Renew))
        else {
            return Err(CallError::ClusterChanges(error));
        };
        let named = nodes.at(&redirect);
        if redirect.is_ask {
            return Ok((named, true));
        }
        nodes.refresh(Some(named)).await?;
        let owner = nodes.owner(nodes.slot(call.key())).ok_or(CallError::NoMaster)?;
        owner.subscribe(std::slice::from_ref(call)).await;
        Ok((owner, false))
    }
}

impl Purpose {
    fn connection(self, server: &Server) -> &SharedConnection {
        match self {
            Self::Acquire => &server.acquire_conn,
            Self::Renew => &server.renew_conn,
            Self::Release | Self::Once => &server.release_conn,
        }
    }
}

impl Redirect {
    /// The redirection that this error of a server is.
    fn of(error: &RedisError, asked: &Server) -> Option<Self> {
        let (address, _) = error.redirect_node()?;
        Self::parse(error.code() == Some("ASK"), &asked.topology.host(), address)
    }
}
