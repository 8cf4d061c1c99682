//! Calls for renewals: one for many leases.

use futures_util::future::join_all;

use super::{
    driver::{Argument, Batch, Database, Row},
    error::CallError,
    replies::position,
    shared::Shared,
};
use crate::store::{RenewReply, RenewRequest};

impl<D: Database> Shared<D> {
    /// Extends the leases. If the row of one of them is locked, the others are extended one by one.
    pub(super) async fn renew(&self, requests: &[RenewRequest]) -> Result<Vec<RenewReply>, D::Error> {
        match self.renew_together(requests).await {
            Err(error) if requests.len() > 1 && error.may_be_of_one_key() => {
                let each = requests.iter().map(|request| self.renew_together(std::slice::from_ref(request)));
                let one = |reply: Result<Vec<_>, _>| reply.ok().and_then(|mut one| one.pop());
                Ok(join_all(each).await.into_iter().map(|reply| one(reply).unwrap_or(RenewReply::Unknown)).collect())
            }
            replies => replies,
        }
    }

    /// One statement for all requests.
    async fn renew_together(&self, requests: &[RenewRequest]) -> Result<Vec<RenewReply>, D::Error> {
        // The database cannot have the others: they hold nothing.
        let mut replies = vec![RenewReply::NotHolder; requests.len()];
        let batch = &Batch::new::<D>(requests.iter().map(|of| (&of.key, &of.id, of.lease, None, None)));
        if batch.requests.is_empty() {
            return Ok(replies);
        }
        for row in self.server.call_retry(&self.server.main_conn, "renew", &[Argument::Requests(batch)]).await? {
            // Of a negative position, a newer acquisition waits.
            let is_superseded = row.number(0).is_some_and(|n| n < 0);
            let reply = if is_superseded { RenewReply::Superseded } else { RenewReply::Extended };
            replies[position(batch, &row).ok_or(CallError::UnexpectedReply)?] = reply;
        }
        Ok(replies)
    }
}
