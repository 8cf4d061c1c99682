//! Calls for acquires: many requests share one.

use std::{collections::HashSet, sync::Arc};

use futures_util::future::join_all;
use tokio_postgres::types::Type;

use super::{
    connection::Parameter,
    error::CallError,
    replies::{acquired, in_order},
    schema::name,
    shared::{Shared, millis},
};
use crate::{
    clock::BootInstant,
    store::{
        AcquireReply, AcquireRequest, IfBusy, StoreError,
        remote::batching::{SendRequests, send_alone},
    },
};

impl SendRequests<AcquireRequest> for Shared {
    async fn send(
        self: &Arc<Self>,
        requests: Vec<AcquireRequest>,
        called: BootInstant,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        let waiting = requests.iter().filter(|request| request.if_busy == IfBusy::Enqueue);
        let managers: HashSet<_> = waiting.map(|request| request.id.manager()).collect();
        // So that the first offer is not missed. Without messages, the waiter polls more often.
        let listens = join_all(managers.iter().map(|manager| self.messages.wait_subscribed(manager)));
        let has_messages = listens.await.into_iter().all(|listens| listens);
        let failed = |error| self.server.store_error("acquire", error);
        match self.acquire_together(&requests, called, has_messages).await {
            Ok(replies) => replies.into_iter().map(|reply| reply.map_err(failed)).collect(),
            Err(error) if requests.len() > 1 && error.may_be_of_one_key() => send_alone(self, requests, called).await,
            Err(error) => vec![Err(failed(error)); requests.len()],
        }
    }
}

impl Shared {
    /// One statement for all requests. One of them may have expired while it waited.
    async fn acquire_together(
        &self,
        requests: &[AcquireRequest],
        called: BootInstant,
        has_messages: bool,
    ) -> Result<Vec<Result<AcquireReply, CallError>>, CallError> {
        let Some(AcquireRequest { queue, demand, .. }) = requests.first() else { return Ok(Vec::new()) };
        let keys = requests.iter().map(|request| name(&request.key)).collect::<Option<Vec<_>>>();
        let keys = keys.ok_or(CallError::InvalidKey)?;
        let ids: Vec<_> = requests.iter().map(|request| request.id.to_string()).collect();
        let leases: Vec<_> = requests.iter().map(|request| millis(request.lease)).collect();
        let waits: Vec<_> = requests.iter().map(|request| request.if_busy == IfBusy::Enqueue).collect();
        let valid_for = requests.iter().map(|request| request.valid_for).min().unwrap_or_default();
        let (offer, entry) = (millis(queue.offer_ttl), millis(queue.entry_ttl));
        let capacity = i64::try_from(queue.capacity).unwrap_or(i64::MAX);
        let takes_record = demand.takes_record();
        let parameters: [Parameter<'_>; 8] = [
            (&offer, Type::INT8),
            (&entry, Type::INT8),
            (&capacity, Type::INT8),
            (&takes_record, Type::BOOL),
            (&keys, Type::TEXT_ARRAY),
            (&ids, Type::TEXT_ARRAY),
            (&leases, Type::INT8_ARRAY),
            (&waits, Type::BOOL_ARRAY),
        ];
        let rows = self.call_before_expiry(called, valid_for, "acquire", &parameters).await?;
        in_order(requests.len(), &rows, |row| Ok(acquired(row, has_messages)))
    }
}
