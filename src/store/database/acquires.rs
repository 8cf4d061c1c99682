//! Calls for acquires: many requests share one.

use std::{collections::HashSet, sync::Arc};

use futures_util::future::join_all;

use super::{
    driver::{Argument, Batch, Database, Messages, name},
    error::CallError,
    replies::{acquired, in_order, only},
    shared::Shared,
};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    store::{
        AcquireReply, AcquireRequest, IfBusy, StoreError,
        remote::batching::{SendRequests, send_alone},
    },
};

impl<D: Database> SendRequests<AcquireRequest> for Shared<D> {
    fn shares_waits(&self) -> bool {
        D::SYNCS_RELEASES
    }

    async fn send(
        self: &Arc<Self>,
        requests: Vec<AcquireRequest>,
        called: BootInstant,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        self.start();
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

impl<D: Database> Shared<D> {
    /// One statement for all requests. One of them may have expired while it waited.
    async fn acquire_together(
        &self,
        requests: &[AcquireRequest],
        called: BootInstant,
        has_messages: bool,
    ) -> Result<Vec<Result<AcquireReply, D::Error>>, D::Error> {
        let Some(first @ AcquireRequest { queue, demand, .. }) = requests.first() else { return Ok(Vec::new()) };
        if let Some(holder) = &first.in_place_of {
            return Ok(vec![self.redeem(first, holder, called).await]);
        }
        let waits = |request: &AcquireRequest| request.if_busy == IfBusy::Enqueue;
        let batch =
            &Batch::new::<D>(requests.iter().map(|of| (&of.key, &of.id, of.lease, Some(waits(of)), of.trace.as_ref())));
        let valid_for = requests.iter().map(|request| request.valid_for).min().unwrap_or_default();
        let arguments = [
            Argument::Queue(queue),
            Argument::Flag(demand.takes_record()),
            Argument::Requests(batch),
            Argument::Traces(batch),
        ];
        let rows = self.call_before_expiry(called, valid_for, "acquire", &arguments).await?;
        let reply = |at: usize, row: &D::Row| acquired::<D>(row, waits(&requests[at]), has_messages);
        in_order(batch, &rows, reply).ok_or(CallError::UnexpectedReply)
    }

    /// A request in place of a ticket, which has a call of its own.
    async fn redeem(
        &self,
        request: &AcquireRequest,
        holder: &AcquisitionId,
        called: BootInstant,
    ) -> Result<AcquireReply, D::Error> {
        let AcquireRequest { key, id, lease, valid_for, trace, .. } = request;
        let (name, id, holder) = (name::<D>(key).ok_or(CallError::InvalidKey)?, id.to_string(), holder.to_string());
        let arguments = [
            Argument::Text(Some(&name)),
            Argument::Text(Some(&id)),
            Argument::Time(*lease),
            Argument::Text(Some(&holder)),
            Argument::Trace(trace.as_ref()),
        ];
        let rows = self.call_before_expiry(called, *valid_for, "redeem", &arguments).await?;
        acquired::<D>(only(&rows)?, false, false).ok_or(CallError::UnexpectedReply)?
    }
}
