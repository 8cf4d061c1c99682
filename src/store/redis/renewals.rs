//! Renewals: a call for each server, with all its keys.

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::{
    error::CallError,
    routing::{Purpose, Route},
    shared::Shared,
    topology::{Servers, server::Server},
    wire::{self, Keyspace, UnexpectedReply},
};
use crate::store::{RenewReply, RenewRequest, StoreError};

/// Extends the leases. A master of a Cluster that is down delays no renewal at the others.
pub(super) async fn renew(
    servers: &Servers<Shared>,
    requests: Vec<RenewRequest>,
) -> Result<Vec<RenewReply>, StoreError> {
    if requests.is_empty() {
        return Ok(Vec::new());
    }
    let nodes = match servers {
        Servers::One(only) => {
            let reply = renew_together(only, &requests).await;
            return reply.map_err(|error| only.server.store_error("renew", error));
        }
        Servers::Cluster(nodes) => nodes,
    };
    nodes.load("renew").await?;
    let mut replies = vec![RenewReply::Unknown; requests.len()];
    let (groups, _) = nodes.groups(requests.into_iter().enumerate(), |(_, request)| &request.key);
    let renewed = groups.into_iter().map(|(shared, requests)| async move {
        let (places, requests): (Vec<_>, Vec<_>) = requests.into_iter().unzip();
        let replies = renew_at_node(&shared, &requests).await;
        (places, replies.map_err(|error| shared.server.store_error("renew", error)))
    });
    let (mut failure, mut any_replied) = (None, false);
    for (places, renewed) in join_all(renewed).await {
        match renewed {
            Ok(renewed) => {
                any_replied = true;
                places.into_iter().zip(renewed).for_each(|(place, reply)| replies[place] = reply);
            }
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) if !any_replied => Err(error),
        _ => Ok(replies),
    }
}

/// One script for all requests.
async fn renew_together(shared: &Shared, requests: &[RenewRequest]) -> Result<Vec<RenewReply>, CallError> {
    let Server { keyspace, renew_conn, min_replicas, timeouts, .. } = &*shared.server;
    let (call, is_sent) = keyspace.renew(requests);
    let (reply, replicated) = renew_conn.call_replicated_retry(&call, *min_replicas, timeouts.call_deadline()).await?;
    let mut replies = renew_conn.parsed(wire::parse_renew(&reply, &is_sent))?;
    if replicated.is_err() {
        replies.iter_mut().for_each(doubt);
    }
    Ok(replies)
}

/// One script for all requests. A key whose slot moves has a script of its own.
async fn renew_at_node(shared: &Arc<Shared>, requests: &[RenewRequest]) -> Result<Vec<RenewReply>, CallError> {
    let Server { keyspace, renew_conn, min_replicas, timeouts, .. } = &*shared.server;
    if !renew_conn.is_connected() {
        // Not waited for: the other masters' renewals are in the same call.
        return Err(CallError::ConnectTimeout);
    }
    let deadline = timeouts.call_deadline();
    if let [only] = requests {
        return Ok(vec![renew_alone(shared, only, deadline).await?]);
    }
    let (call, is_sent) = keyspace.renew(requests);
    let (mut replies, replicated) = match renew_conn.call_replicated_retry(&call, *min_replicas, deadline).await {
        Ok((reply, replicated)) => (renew_conn.parsed(wire::parse_renew(&reply, &is_sent))?, replicated),
        Err(error) if error.is_refusal() => (vec![RenewReply::Unknown; requests.len()], Ok(())),
        Err(error) => return Err(error),
    };
    // Before the doubt: a renewal that was executed is not repeated.
    let others: Vec<_> = (0..replies.len()).filter(|at| replies[*at] == RenewReply::Unknown).collect();
    if replicated.is_err() {
        replies.iter_mut().for_each(doubt);
    }
    let renewed = others.iter().map(|at| renew_alone(shared, &requests[*at], deadline));
    for (at, reply) in others.iter().zip(join_all(renewed).await) {
        replies[*at] = reply.unwrap_or(RenewReply::Unknown);
    }
    Ok(replies)
}

async fn renew_alone(shared: &Arc<Shared>, request: &RenewRequest, deadline: Instant) -> Result<RenewReply, CallError> {
    let mut route = Route::new(shared, &request.key);
    let (_, is_sent) = shared.server.keyspace.renew(std::slice::from_ref(request));
    let call = |names: &Keyspace, _: &Shared| Ok(names.renew(std::slice::from_ref(request)).0);
    let (reply, replicated) = route.execute(Purpose::Renew, call, deadline).await?;
    let mut reply = route.parsed(Purpose::Renew, wire::parse_renew(&reply, &is_sent))?;
    if replicated.is_err() {
        reply.iter_mut().for_each(doubt);
    }
    reply.pop().ok_or_else(|| UnexpectedReply.into())
}

/// The deadline stays: a server that is promoted now may not know the new lease.
fn doubt(reply: &mut RenewReply) {
    if *reply == RenewReply::Extended {
        *reply = RenewReply::Unknown;
    }
}
