//! Renewals: a call for each server, with all its keys.

use std::sync::Arc;

use futures_util::future::join_all;

use super::{
    error::CallError,
    routing::{Purpose, Route},
    shared::Shared,
    topology::{Servers, server::Server},
    wire::{self, Keyspace},
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
        let replies = renew_each(&shared, &requests).await;
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

/// A script for each request, because a script may have the keys of one slot only. All are sent
/// together.
async fn renew_each(shared: &Arc<Shared>, requests: &[RenewRequest]) -> Result<Vec<RenewReply>, CallError> {
    let Server { keyspace, renew_conn, min_replicas, timeouts, .. } = &*shared.server;
    if !renew_conn.is_connected() {
        // Not waited for: the other masters' renewals are in the same call.
        return Err(CallError::ConnectTimeout);
    }
    let deadline = timeouts.call_deadline();
    let (calls, is_sent): (Vec<_>, Vec<_>) =
        requests.iter().map(|request| keyspace.renew(std::slice::from_ref(request))).unzip();
    let (replies, replicated) = renew_conn.call_each_retry(&calls, *min_replicas, deadline).await?;
    let finish = requests.iter().zip(is_sent).zip(replies).map(|((request, is_sent), reply)| async move {
        let mut route = Route::new(shared, &request.key);
        let (reply, replicated) = match reply {
            Ok(reply) => (reply, replicated),
            Err(error) => {
                route.follow(error).await?;
                let call = |names: &Keyspace, _: &Shared| Ok(names.renew(std::slice::from_ref(request)).0);
                route.execute(Purpose::Renew, call, deadline).await?
            }
        };
        let mut reply = route.parsed(Purpose::Renew, wire::parse_renew(&reply, &is_sent))?;
        if replicated.is_err() {
            reply.iter_mut().for_each(doubt);
        }
        Ok::<_, CallError>(reply.pop().unwrap_or(RenewReply::Unknown))
    });
    let replies = join_all(finish).await;
    Ok(replies.into_iter().map(|reply| reply.unwrap_or(RenewReply::Unknown)).collect())
}

/// The deadline stays: a server that is promoted now may not know the new lease.
fn doubt(reply: &mut RenewReply) {
    if *reply == RenewReply::Extended {
        *reply = RenewReply::Unknown;
    }
}
