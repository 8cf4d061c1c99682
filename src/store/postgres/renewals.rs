//! Calls for renewals: one for many leases.

use futures_util::future::join_all;
use tokio_postgres::types::Type;

use super::{
    connection::Parameter,
    error::CallError,
    replies::position,
    schema::name,
    shared::{Shared, millis},
};
use crate::store::{RenewReply, RenewRequest, StoreError};

impl Shared {
    /// Extends the leases. If the row of one of them is locked, the others are extended one by one.
    pub(super) async fn renew(&self, requests: &[RenewRequest]) -> Result<Vec<RenewReply>, StoreError> {
        match self.renew_together(requests).await {
            Ok(replies) => Ok(replies),
            Err(error) if requests.len() > 1 && error.may_be_of_one_key() => {
                let each = requests.iter().map(|request| self.renew_together(std::slice::from_ref(request)));
                let one = |reply: Result<Vec<_>, _>| reply.ok().and_then(|mut one| one.pop());
                Ok(join_all(each).await.into_iter().map(|reply| one(reply).unwrap_or(RenewReply::Unknown)).collect())
            }
            Err(error) => Err(self.server.store_error("renew", error)),
        }
    }

    /// One statement for all requests.
    async fn renew_together(&self, requests: &[RenewRequest]) -> Result<Vec<RenewReply>, CallError> {
        // The database cannot have the others: they hold nothing.
        let named: Vec<_> =
            requests.iter().enumerate().filter_map(|(index, request)| Some((index, name(&request.key)?))).collect();
        let mut replies = vec![RenewReply::NotHolder; requests.len()];
        if named.is_empty() {
            return Ok(replies);
        }
        let keys: Vec<_> = named.iter().map(|(_, key)| &**key).collect();
        let ids: Vec<_> = named.iter().map(|(index, _)| requests[*index].id.to_string()).collect();
        let leases: Vec<_> = named.iter().map(|(index, _)| millis(requests[*index].lease)).collect();
        let parameters: [Parameter<'_>; 3] =
            [(&keys, Type::TEXT_ARRAY), (&ids, Type::TEXT_ARRAY), (&leases, Type::INT8_ARRAY)];
        for row in self.server.call_retry(&self.server.release_conn, "renew", &parameters).await? {
            let (index, _) = named.get(position(&row)?).ok_or(CallError::UnexpectedReply)?;
            replies[*index] = RenewReply::Extended;
        }
        Ok(replies)
    }
}
