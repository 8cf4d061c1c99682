//! Acquires: a vote of all servers, and a raise where a majority has granted the key.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep},
};

use super::{
    group::{Answers, Group},
    node::{Node, Raises, Validity, Votes, Withdrawal},
    quorum::{Ballot, Raise},
};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    limits::{REDLOCK_POLL, REDLOCK_REVOTE_DELAY, REDLOCK_SPLIT_POLL, REDLOCK_VOTES_MAX},
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, IfBusy, StoreError,
        redis::wire::{RaiseRequest, Raised, Vote},
        remote::{
            batching::{SendRequests, send_alone},
            inline::poll_and_spawn,
        },
    },
};

const CLOCKS_DIFFER: &str = "the clocks of the servers differ by more than half a day, or the last fence of one of them does: correct the clock";
const TOO_LATE: &str = "the votes have ended: the call took too long, or the key was revoked";

/// The outcome of one vote, and of the raise that follows it.
enum Outcome {
    Reply(Result<AcquireReply, StoreError>),
    /// The votes were split, and the acquisition does not wait.
    Split {
        lease_left: Duration,
    },
}

impl SendRequests<AcquireRequest> for Group {
    async fn send(
        self: &Arc<Self>,
        requests: Vec<AcquireRequest>,
        called: BootInstant,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        let valid_for = requests.iter().map(|request| request.valid_for).min().unwrap_or_default();
        self.acquire(requests, Validity { called, valid_for }).await
    }
}

impl Group {
    /// Acquires, and votes again where the votes of callers that do not wait are split: each of
    /// them would be rejected, although the key is free.
    pub(super) async fn acquire(
        self: &Arc<Self>,
        requests: Vec<AcquireRequest>,
        validity: Validity,
    ) -> Vec<Result<AcquireReply, StoreError>> {
        let last_vote = self.limit();
        let mut replies: Vec<_> = requests.iter().map(|_| None).collect();
        let mut open: Vec<_> = (0..requests.len()).collect();
        for votes in 1.. {
            let asked: Arc<[_]> = open.iter().map(|index| requests[*index].clone()).collect();
            let outcomes = self.vote_and_raise(&asked, validity).await;
            let is_last = votes == REDLOCK_VOTES_MAX || Instant::now() >= last_vote;
            let mut split = Vec::new();
            for (index, outcome) in std::mem::take(&mut open).into_iter().zip(outcomes) {
                match outcome {
                    Outcome::Reply(reply) => replies[index] = Some(reply),
                    Outcome::Split { lease_left } if is_last => {
                        replies[index] = Some(Ok(AcquireReply::busy(lease_left)));
                    }
                    Outcome::Split { .. } => split.push(index),
                }
            }
            if split.is_empty() {
                break;
            }
            open = split;
            sleep(REDLOCK_REVOTE_DELAY.mul_f64(fastrand::f64()) * u32::try_from(votes).unwrap_or(1)).await;
        }
        replies.into_iter().flatten().collect()
    }

    async fn vote_and_raise(self: &Arc<Self>, requests: &Arc<[AcquireRequest]>, validity: Validity) -> Vec<Outcome> {
        let vote = |node: Arc<Node>| {
            let votes = Votes(Arc::clone(requests), validity);
            async move { node.call(votes).await }
        };
        let (ballots, votes) = self.ask(requests.len(), self.limit(), vote, |_, votes| votes.decide()).await;
        self.withdraw(requests, &ballots, &votes);
        if requests.len() > 1 && ballots.contains(&Ballot::Undecided) && votes.may_be_of_one_key() {
            let alone = send_alone(self, requests.to_vec(), validity.called).await;
            return alone.into_iter().map(Outcome::Reply).collect();
        }
        let won: Vec<_> = requests.iter().zip(&ballots).filter_map(|(request, ballot)| won(request, *ballot)).collect();
        let (raises, raised) = self.raise(won, validity).await;
        let mut raises = raises.into_iter().enumerate();
        let outcome = |(index, (request, ballot)): (usize, (&AcquireRequest, &Ballot))| match *ballot {
            Ballot::Won { .. } => Outcome::Reply(match raises.next() {
                Some((_, Raise::Held { fence })) => Ok(AcquireReply::granted(fence)),
                // It was too slow, or an operator has revoked the key: nothing counts.
                Some((index, Raise::NotHolder | Raise::Undecided)) => {
                    Err(self.store_error_because("acquire", index, &raised, Some(TOO_LATE)))
                }
                None => unreachable!("one for each that has won"),
            }),
            Ballot::Undecided => {
                let reason = votes.keys[index].is_granted_by_majority().then_some(CLOCKS_DIFFER);
                Outcome::Reply(Err(self.store_error_because("acquire", index, &votes, reason)))
            }
            Ballot::Lost { lease_left, is_split } => match request.if_busy {
                IfBusy::Fail if is_split => Outcome::Split { lease_left },
                IfBusy::Fail => Outcome::Reply(Ok(AcquireReply::busy(lease_left))),
                IfBusy::Enqueue => Outcome::Reply(Ok(queued(lease_left, is_split))),
            },
        };
        requests.iter().zip(&ballots).enumerate().map(outcome).collect()
    }

    /// Gives these grants the fence and the lease that a majority must have. Returns the outcomes,
    /// and the replies for their errors.
    ///
    /// A server that has not replied to the vote executes the raise after it, because both are sent
    /// on one connection.
    pub(super) async fn raise(&self, requests: Vec<RaiseRequest>, validity: Validity) -> (Vec<Raise>, Answers<Raised>) {
        let requests: Arc<[_]> = requests.into();
        if requests.is_empty() {
            return (Vec::new(), Answers::default());
        }
        let raise = |node: Arc<Node>| {
            let raises = Raises(Arc::clone(&requests), validity);
            async move { node.call(raises).await }
        };
        self.ask(requests.len(), self.limit(), raise, |index, replies| replies.decide(requests[index].fence)).await
    }

    /// Ends the votes on acquisitions that have no majority, so that nobody finds them in its way.
    ///
    /// A withdrawal is sent before the caller gets its reply: the votes of its next attempt are
    /// executed afterwards. A server that has not replied yet gets one, too.
    fn withdraw(&self, requests: &[AcquireRequest], ballots: &[Ballot], votes: &Answers<Vote>) {
        let Ok(runtime) = Handle::try_current() else { return };
        for (index, node) in self.nodes.iter().enumerate().filter(|(index, _)| !votes.has_failed(*index)) {
            let may_have_granted = |key: usize| match votes.keys[key].of(index) {
                Some(Vote::Granted { .. }) => true,
                Some(Vote::Busy { .. }) => false,
                None => votes.unanswered.contains(&index),
            };
            let is_withdrawn = |key: &usize| !matches!(ballots[*key], Ballot::Won { .. }) && may_have_granted(*key);
            let withdrawn = (0..requests.len()).filter(is_withdrawn);
            let withdrawn: Vec<(LockKey, AcquisitionId)> =
                withdrawn.map(|key| (requests[key].key.clone(), requests[key].id.clone())).collect();
            if !withdrawn.is_empty() {
                let node = Arc::clone(node);
                poll_and_spawn(async move { drop(node.call(Withdrawal(withdrawn)).await) }, &runtime);
            }
        }
    }
}

/// The raise that a won vote needs.
fn won(request: &AcquireRequest, ballot: Ballot) -> Option<RaiseRequest> {
    let Ballot::Won { fence } = ballot else { return None };
    let AcquireRequest { key, id, lease, .. } = request.clone();
    Some(RaiseRequest { key, id, fence, lease })
}

/// No server keeps a queue: the waiter asks again. With jitter: waiters whose votes were split must
/// not meet again.
fn queued(lease_left: Duration, is_split: bool) -> AcquireReply {
    let [least, most] = if is_split { REDLOCK_SPLIT_POLL } else { REDLOCK_POLL };
    AcquireReply::Queued {
        ahead: 0,
        lease_left,
        poll_in: Some(least + (most - least).mul_f64(fastrand::f64())),
        held_by: None,
    }
}
