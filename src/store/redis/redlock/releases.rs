//! Releases and renewals: all servers, and the decision of a majority.

use std::sync::Arc;

use super::{group::Group, node::Node};
use crate::{
    clock::BootInstant,
    store::{
        ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreError,
        redis::operations::Together,
        remote::batching::{SendRequests, SharedCalls, send_alone},
    },
};

impl SendRequests<ReleaseRequest> for Group {
    fn calls(&self) -> &SharedCalls<ReleaseRequest> {
        &self.releases
    }

    /// On all servers, also those that have not granted the key: their vote may have come late.
    async fn send(
        self: &Arc<Self>,
        requests: Vec<ReleaseRequest>,
        called: BootInstant,
    ) -> Vec<Result<ReleaseReply, StoreError>> {
        let requests: Arc<[_]> = requests.into();
        let release = |node: Arc<Node>| {
            let requests = Arc::clone(&requests);
            async move { node.call(Together { requests, called }).await }
        };
        let answers = self.ask(requests.len(), self.limit(), release, |_, replies| replies.decide().is_some()).await;
        let outcomes: Vec<_> = answers.keys.iter().map(|replies| replies.decide().unwrap_or(Err(()))).collect();
        if requests.len() > 1 && outcomes.contains(&Err(())) && answers.may_be_of_one_key() {
            return send_alone(self, requests.to_vec(), called).await;
        }
        let reply = |(index, outcome): (usize, Result<_, ()>)| {
            outcome.map_err(|()| self.store_error("release", index, &answers))
        };
        outcomes.into_iter().enumerate().map(reply).collect()
    }
}

impl Group {
    /// Renews. An error: too few servers have replied.
    pub(super) async fn renew(&self, requests: Vec<RenewRequest>) -> Result<Vec<RenewReply>, StoreError> {
        let requests: Arc<[_]> = requests.into();
        let renew = |node: Arc<Node>| {
            let requests = Arc::clone(&requests);
            async move {
                let renewed = node.call(Together { requests, called: BootInstant::default() }).await?;
                Ok(renewed.into_iter().map(Ok).collect())
            }
        };
        let deadline = self.timeouts.call_deadline();
        let answers = self.ask(requests.len(), deadline, renew, |_, replies| replies.decide().is_some()).await;
        let replies = answers.keys.iter().enumerate();
        let replies = replies.map(|(index, replies)| {
            if replies.may_decide() {
                Ok(replies.decide().unwrap_or(RenewReply::Unknown))
            } else {
                Err(self.store_error("renew", index, &answers))
            }
        });
        replies.collect()
    }
}
