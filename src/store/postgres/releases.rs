//! Calls for releases: many requests share one.

use std::sync::Arc;

use tokio_postgres::types::Type;

use super::{
    connection::Parameter,
    error::CallError,
    replies::{in_order, released},
    schema::name,
    shared::{Shared, millis},
};
use crate::{
    clock::BootInstant,
    limits::MAX_RECORD_BODY_BYTES,
    store::{
        ReleaseReply, ReleaseRequest, StoreError,
        remote::batching::{SendRequests, send_alone},
    },
};

impl SendRequests<ReleaseRequest> for Shared {
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

impl Shared {
    /// One statement for all requests.
    async fn release_together(&self, requests: &[ReleaseRequest]) -> Result<Vec<ReleaseReply>, CallError> {
        let Some(ReleaseRequest { queue, record, .. }) = requests.first() else { return Ok(Vec::new()) };
        let keys = requests.iter().map(|request| name(&request.key)).collect::<Option<Vec<_>>>();
        let keys = keys.ok_or(CallError::InvalidKey)?;
        let ids: Vec<_> = requests.iter().map(|request| request.id.to_string()).collect();
        let blocks: Vec<_> = requests.iter().map(|request| millis(request.block_for)).collect();
        let offer = millis(queue.offer_ttl);
        // A request with a record has a call of its own.
        let head = record.as_ref().map(|new| &*new.record.head);
        let body = record.as_ref().and_then(|new| new.record.body.as_deref());
        let body = body.filter(|body| body.len() <= MAX_RECORD_BODY_BYTES);
        let keep = record.as_ref().map_or(0, |new| millis(new.keep_for));
        let parameters: [Parameter<'_>; 7] = [
            (&offer, Type::INT8),
            (&keys, Type::TEXT_ARRAY),
            (&ids, Type::TEXT_ARRAY),
            (&blocks, Type::INT8_ARRAY),
            (&head, Type::BYTEA),
            (&body, Type::BYTEA),
            (&keep, Type::INT8),
        ];
        let is_synced = record.is_some() || blocks.iter().any(|block| *block > 0);
        let rows = if is_synced {
            self.server.call_retry(&self.server.synced_conns.take(), "release", &parameters).await?
        } else {
            self.server.call_retry(&self.server.release_conn, "release", &parameters).await?
        };
        in_order(requests.len(), &rows, released)
    }
}
