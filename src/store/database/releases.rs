//! Calls for releases: many requests share one.

use std::{sync::Arc, time::Duration};

use super::{
    driver::{Argument, Batch, Database, name},
    error::CallError,
    replies::{in_order, only, released},
    shared::Shared,
};
use crate::{
    clock::BootInstant,
    limits::MAX_RECORD_BODY_BYTES,
    store::{
        Heir, ReleaseReply, ReleaseRequest, StoreError,
        remote::batching::{SendRequests, send_alone},
    },
};

impl<D: Database> SendRequests<ReleaseRequest> for Shared<D> {
    fn shares_waits(&self) -> bool {
        D::SYNCS_RELEASES
    }

    async fn send(
        self: &Arc<Self>,
        requests: Vec<ReleaseRequest>,
        called: BootInstant,
    ) -> Vec<Result<ReleaseReply, StoreError>> {
        match self.release_together(&requests).await {
            Ok(replies) => replies.into_iter().map(Ok).collect(),
            Err(error) if requests.len() > 1 && error.may_be_of_one_key() => send_alone(self, requests, called).await,
            Err(error) => vec![Err(self.server.store_error("release", error)); requests.len()],
        }
    }
}

impl<D: Database> Shared<D> {
    /// One statement for all requests.
    async fn release_together(&self, requests: &[ReleaseRequest]) -> Result<Vec<ReleaseReply>, D::Error> {
        let Some(first @ ReleaseRequest { queue, record, .. }) = requests.first() else { return Ok(Vec::new()) };
        if let Some(heir) = &first.heir {
            return Ok(vec![self.keep(first, heir).await?]);
        }
        let batch =
            &Batch::new::<D>(requests.iter().map(|of| (&of.key, &of.id, of.block_for, None, of.trace.as_ref())));
        // A request with a record has a call of its own.
        let body = record.as_ref().and_then(|new| new.record.body.as_deref());
        let arguments = [
            Argument::Offer(queue),
            Argument::Requests(batch),
            Argument::Traces(batch),
            Argument::Bytes(record.as_ref().map(|new| &*new.record.head)),
            Argument::Bytes(body.filter(|body| body.len() <= MAX_RECORD_BODY_BYTES)),
            Argument::Time(record.as_ref().map_or(Duration::ZERO, |new| new.keep_for)),
        ];
        let is_synced = D::SYNCS_RELEASES || record.is_some() || requests.iter().any(|of| !of.block_for.is_zero());
        let rows = if is_synced {
            self.server.call_retry(&self.server.synced_conns.take(), "release", &arguments).await?
        } else {
            self.server.call_retry(&self.server.main_conn, "release", &arguments).await?
        };
        in_order(batch, &rows, |_, row| released(row)).ok_or(CallError::UnexpectedReply)
    }

    /// A release that leaves its key to a ticket, which has a call of its own. It is a promise, and
    /// waits for the disk.
    async fn keep(&self, request: &ReleaseRequest, heir: &Heir) -> Result<ReleaseReply, D::Error> {
        let name = name::<D>(&request.key).ok_or(CallError::InvalidKey)?;
        let (id, ticket) = (request.id.to_string(), heir.id.to_string());
        let arguments = [
            Argument::Text(Some(&name)),
            Argument::Text(Some(&id)),
            Argument::Time(heir.lease),
            Argument::Text(Some(&ticket)),
        ];
        let rows = self.server.call_retry(&self.server.synced_conns.take(), "keep", &arguments).await?;
        released(only(&rows)?).ok_or(CallError::UnexpectedReply)
    }
}
