//! Decisions from the replies of the servers. Pure.
//!
//! A decision is made as soon as no further reply can change it, so that a server without a reply
//! delays nothing that the others have decided.

use std::{fmt::Debug, time::Duration};

use smallvec::SmallVec;

use crate::store::{
    ForceReleaseReply, Holder, KeyStatus, ReleaseReply, RenewReply,
    redis::wire::{Raised, Vote},
};

/// The replies of all servers to one question about one key.
#[derive(Clone, Debug)]
pub struct Replies<T>(SmallVec<[Reply<T>; 3]>);

/// The reply of one server.
#[derive(Clone, Debug)]
enum Reply<T> {
    /// It may come.
    Pending,
    /// There was an error, or none comes in time.
    Missing,
    Received(T),
}

/// The outcome of a vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ballot {
    /// A majority has granted the key. The grant counts when a majority has this fence.
    Won {
        /// The fence of the grant.
        fence: u64,
    },
    /// No majority can grant the key now.
    Lost {
        /// The time after which one may.
        lease_left: Duration,
        /// Whether only the votes of acquisitions without a majority are in the way.
        is_split: bool,
    },
    /// Too few servers have replied, or their clocks differ by more than half a day.
    Undecided,
}

/// The outcome of a raise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raise {
    /// A majority has this fence, or a larger one.
    Held {
        /// The fence.
        fence: u64,
    },
    /// No majority has the acquisition.
    NotHolder,
    /// Too few servers have replied.
    Undecided,
}

/// The fences of one grant differ by less than half a day, in microseconds: a server refuses a
/// fence that is a day ahead of its clock.
const MAX_DIFFERENCE: u64 = 43_200_000_000;

impl<T> Replies<T> {
    /// No reply yet of this number of servers.
    #[must_use]
    pub fn new(servers: usize) -> Self {
        Self((0..servers).map(|_| Reply::Pending).collect())
    }

    /// Sets the reply of a server. `None`: an error.
    pub fn set(&mut self, server: usize, reply: Option<T>) {
        self.0[server] = reply.map_or(Reply::Missing, Reply::Received);
    }

    /// No further reply is waited for: a decision is due.
    pub fn close(&mut self) {
        for reply in self.0.iter_mut().filter(|reply| matches!(reply, Reply::Pending)) {
            *reply = Reply::Missing;
        }
    }

    /// The servers that make a majority.
    #[must_use]
    pub fn majority(&self) -> usize {
        self.0.len() / 2 + 1
    }

    /// The reply of a server.
    #[must_use]
    pub fn of(&self, server: usize) -> Option<&T> {
        if let Reply::Received(reply) = &self.0[server] { Some(reply) } else { None }
    }

    /// Whether a majority has replied, or still may.
    #[must_use]
    pub fn may_decide(&self) -> bool {
        self.received().count() + self.pending() >= self.majority()
    }

    /// Whether a majority has replied, if no further reply can change that.
    #[must_use]
    pub fn is_majority(&self) -> Option<bool> {
        let is_majority = self.received().count() >= self.majority();
        (is_majority || !self.may_decide()).then_some(is_majority)
    }

    fn received(&self) -> impl Iterator<Item = &T> {
        self.0.iter().filter_map(|reply| if let Reply::Received(reply) = reply { Some(reply) } else { None })
    }

    fn count(&self, is_counted: impl Fn(&T) -> bool) -> usize {
        self.received().filter(|reply| is_counted(reply)).count()
    }

    fn pending(&self) -> usize {
        self.0.iter().filter(|reply| matches!(reply, Reply::Pending)).count()
    }

    fn missing(&self) -> usize {
        self.0.iter().filter(|reply| matches!(reply, Reply::Missing)).count()
    }

    /// The time until so many servers are free that they make a majority, from the time that each
    /// reply has until its server is.
    fn free_in(&self, left: impl Fn(&T) -> Duration) -> Duration {
        let mut left: SmallVec<[_; 9]> = self.received().map(left).collect();
        left.sort_unstable();
        left.get(self.majority() - 1).or(left.last()).copied().unwrap_or_default()
    }
}

impl Replies<Vote> {
    /// The outcome, if no further reply can change it.
    #[must_use]
    pub fn decide(&self) -> Option<Ballot> {
        if let Some(fence) = self.fence() {
            return Some(Ballot::Won { fence });
        }
        let granted = self.count(|vote| matches!(vote, Vote::Granted { .. }));
        let pending = self.pending();
        if pending > 0 && granted + pending >= self.majority() {
            return None;
        }
        if granted >= self.majority() || self.received().count() + pending < self.majority() {
            return Some(Ballot::Undecided);
        }
        if self.received().count() < self.majority() {
            // Whether the key is busy is not known: these servers may be a minority of old votes.
            return None;
        }
        let incomplete = self.count(|vote| matches!(vote, Vote::Busy { is_incomplete: true, .. }));
        let lease_left = self.free_in(|vote| match vote {
            Vote::Granted { .. } => Duration::ZERO,
            Vote::Busy { lease_left, .. } => *lease_left,
        });
        Some(Ballot::Lost { lease_left, is_split: granted + incomplete >= self.majority() })
    }

    /// Whether a majority has granted the key, although it may have no fence.
    #[must_use]
    pub fn is_granted_by_majority(&self) -> bool {
        self.count(|vote| matches!(vote, Vote::Granted { .. })) >= self.majority()
    }

    /// The fence of a grant: the largest one of a majority that has granted the key.
    ///
    /// A server whose clock is wrong by days is left out: the others would not keep its fence.
    fn fence(&self) -> Option<u64> {
        let fence = |vote: &Vote| if let Vote::Granted { fence } = vote { Some(*fence) } else { None };
        let mut fences: SmallVec<[_; 9]> = self.received().filter_map(fence).collect();
        fences.sort_unstable();
        let mut majorities = fences.windows(self.majority()).rev();
        let agree = |fences: &&[u64]| fences[fences.len() - 1] - fences[0] < MAX_DIFFERENCE;
        majorities.find(agree).map(|fences| fences[fences.len() - 1])
    }
}

impl Replies<Raised> {
    /// The outcome, if no further reply can change it.
    ///
    /// The fence is the largest one that a majority has reached. It may be larger than that of the
    /// call, if a copy of the call was sent after a later one.
    #[must_use]
    pub fn decide(&self, fence: u64) -> Option<Raise> {
        let held = |raised: &Raised| if let Raised::Held { fence } = raised { Some(*fence) } else { None };
        let mut fences: SmallVec<[_; 9]> = self.received().filter_map(held).filter(|held| *held >= fence).collect();
        fences.sort_unstable();
        if let Some(at) = fences.len().checked_sub(self.majority()) {
            return Some(Raise::Held { fence: fences[at] });
        }
        let (others, pending) = (self.count(|raised| *raised == Raised::NotHolder), self.pending());
        let is_lost = |others| self.0.len() - others < self.majority();
        if is_lost(others) {
            return Some(Raise::NotHolder);
        }
        let may_change = pending > 0 && (fences.len() + pending >= self.majority() || is_lost(others + pending));
        (!may_change).then_some(Raise::Undecided)
    }
}

impl Replies<RenewReply> {
    /// The outcome, if no further reply can change it.
    #[must_use]
    pub fn decide(&self) -> Option<RenewReply> {
        let [extended, others] =
            [RenewReply::Extended, RenewReply::NotHolder].map(|reply| self.count(|received| *received == reply));
        if extended >= self.majority() {
            Some(RenewReply::Extended)
        } else if self.0.len() - others < self.majority() {
            Some(RenewReply::NotHolder)
        } else {
            (self.pending() == 0).then_some(RenewReply::Unknown)
        }
    }
}

impl Replies<ReleaseReply> {
    /// The outcome, if no further reply can change it. `Err`: too few servers have replied.
    #[must_use]
    pub fn decide(&self) -> Option<Result<ReleaseReply, ()>> {
        let others = self.count(|reply| *reply == ReleaseReply::NotHolder);
        let freed = self.received().count() - others;
        if freed >= self.majority() {
            Some(Ok(ReleaseReply::Freed))
        } else if others >= self.majority() {
            Some(Ok(ReleaseReply::NotHolder))
        } else if !self.may_decide() {
            Some(Err(()))
        } else if self.pending() > 0 {
            None
        } else {
            // The acquisition may have been the holder together with servers that did not reply.
            let may_have_held = freed + self.missing() >= self.majority();
            Some(Ok(if may_have_held { ReleaseReply::Freed } else { ReleaseReply::NotHolder }))
        }
    }
}

impl Replies<KeyStatus> {
    /// The status of the key, if no further reply can change its holder. `Err`: too few servers
    /// have replied.
    #[must_use]
    pub fn decide(&self) -> Option<Result<KeyStatus, ()>> {
        let count = |holder: &Holder| self.count(|status| is_held_by(status, holder));
        let first = self.received().filter_map(KeyStatus::holder).max_by_key(|holder| count(holder));
        let most = first.map_or(0, count);
        if !self.may_decide() {
            return Some(Err(()));
        }
        let free = self.count(|status| status.lease_left.is_zero());
        if self.pending() > 0 && most.max(free) < self.majority() {
            return None;
        }
        // An operator sees a holder that may have a majority together with servers that are down.
        let holder = first.filter(|_| most + self.missing() >= self.majority()).map(|holder| self.holder(holder));
        Some(Ok(KeyStatus::new(holder, self.free_in(|status| status.lease_left), 0)))
    }

    /// The holder, with the largest fence that a majority has.
    fn holder(&self, holder: &Holder) -> Holder {
        let mut holders: SmallVec<[_; 9]> =
            self.received().filter_map(KeyStatus::holder).filter(|other| other.id == holder.id).collect();
        holders.sort_unstable_by_key(|holder| std::cmp::Reverse(holder.fence));
        let complete = holders.iter().filter(|holder| holder.fence > 0).take(self.majority()).last();
        let mut holder = (*complete.unwrap_or(&holder)).clone();
        // No server knows which processes are connected to the others.
        holder.connected = None;
        holder
    }
}

impl Replies<ForceReleaseReply> {
    /// The outcome, when each server has replied or is not waited for. `Err`: too few have replied.
    #[must_use]
    pub fn decide(&self) -> Option<Result<ForceReleaseReply, ()>> {
        if !self.may_decide() {
            return Some(Err(()));
        }
        if self.pending() > 0 {
            return None;
        }
        let count = |reply: &ForceReleaseReply| match reply {
            ForceReleaseReply::Revoked { .. } => self.count(|other| other == reply),
            _ => 0,
        };
        let revoked = self.received().max_by_key(|reply| count(reply));
        if let Some(revoked) = revoked.filter(|reply| count(reply) > 0)
            && count(revoked) + self.missing() >= self.majority()
        {
            return Some(Ok(revoked.clone()));
        }
        let blocked = |reply: &ForceReleaseReply| match reply {
            ForceReleaseReply::Unblocked { blocked_for } => *blocked_for,
            _ => Duration::ZERO,
        };
        let blocked_for = self.free_in(blocked);
        Some(Ok(if blocked_for.is_zero() {
            ForceReleaseReply::Free
        } else {
            ForceReleaseReply::Unblocked { blocked_for }
        }))
    }
}

fn is_held_by(status: &KeyStatus, holder: &Holder) -> bool {
    status.holder().is_some_and(|other| other.id == holder.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acquisition::AcquisitionId;

    const FENCE: u64 = 1_700_000_000_000_000;
    const LEASE: Duration = Duration::from_secs(30);

    fn granted(fence: u64) -> Option<Vote> {
        Some(Vote::Granted { fence: FENCE + fence })
    }

    fn busy(ms: u64, is_incomplete: bool) -> Option<Vote> {
        Some(Vote::Busy { lease_left: Duration::from_millis(ms), is_incomplete })
    }

    /// These replies of the first servers; the others have not replied. `None`: an error.
    fn replies<T: Clone>(servers: usize, received: &[Option<T>]) -> Replies<T> {
        let mut replies = Replies::new(servers);
        for (server, reply) in received.iter().enumerate() {
            replies.set(server, reply.clone());
        }
        replies
    }

    fn closed<T: Clone>(servers: usize, received: &[Option<T>]) -> Replies<T> {
        let mut replies = replies(servers, received);
        replies.close();
        replies
    }

    fn won(fence: u64) -> Option<Ballot> {
        Some(Ballot::Won { fence: FENCE + fence })
    }

    fn lost(ms: u64, is_split: bool) -> Option<Ballot> {
        Some(Ballot::Lost { lease_left: Duration::from_millis(ms), is_split })
    }

    #[test]
    fn vote_is_decided_by_a_majority_without_the_rest() {
        assert_eq!(replies(3, &[granted(1)]).decide(), None);
        assert_eq!(replies(3, &[granted(1), granted(5)]).decide(), won(5));
        assert_eq!(replies(5, &[granted(1), granted(5), None]).decide(), None);
        assert_eq!(replies(5, &[granted(1), granted(5), None, granted(3)]).decide(), won(5));
        assert_eq!(replies(3, &[busy(9, false), granted(1)]).decide(), None, "the third one decides");
        assert_eq!(replies(3, &[busy(9, false), busy(7, false)]).decide(), lost(9, false));
        assert_eq!(replies(3, &[None::<Vote>, None]).decide(), Some(Ballot::Undecided));
        assert_eq!(replies(3, &[busy(9, false), None]).decide(), None, "it may be an old vote");
        assert_eq!(closed(3, &[busy(9, false), None]).decide(), Some(Ballot::Undecided));
    }

    #[test]
    fn busy_key_is_free_when_a_majority_is() {
        let votes = [busy(500, false), granted(1), busy(30_000, false)];
        assert_eq!(replies(3, &votes).decide(), lost(500, false));
        let votes = [busy(9, false), busy(7, false), busy(5, false), busy(3, false), busy(1, false)];
        assert_eq!(replies(5, &votes).decide(), lost(5, false));
    }

    #[test]
    fn vote_is_split_if_no_other_acquisition_can_have_a_majority() {
        assert_eq!(replies(3, &[granted(1), busy(500, true), busy(500, true)]).decide(), lost(500, true));
        assert_eq!(replies(3, &[granted(1), busy(500, true), busy(9_000, false)]).decide(), lost(500, true));
        assert_eq!(replies(3, &[granted(1), busy(9, false), busy(9, false)]).decide(), lost(9, false));
        assert_eq!(replies(3, &[busy(9, true), busy(9, false), busy(9, false)]).decide(), lost(9, false));
    }

    #[test]
    fn server_whose_clock_is_wrong_by_days_does_not_count() {
        const DAY: u64 = 86_400_000_000;
        assert_eq!(replies(3, &[granted(2 * DAY), granted(1)]).decide(), None);
        assert_eq!(replies(3, &[granted(2 * DAY), granted(1), granted(5)]).decide(), won(5));
        let behind = Some(Vote::Granted { fence: FENCE - DAY });
        assert_eq!(replies(3, &[behind, granted(1), granted(5)]).decide(), won(5));
        assert_eq!(closed(3, &[granted(2 * DAY), granted(1)]).decide(), Some(Ballot::Undecided));
        let steps = [granted(0), granted(DAY / 3), granted(9 * DAY / 10), granted(DAY / 4), None];
        assert_eq!(replies(5, &steps).decide(), won(DAY / 3));
    }

    #[test]
    fn grant_counts_when_a_majority_has_its_fence() {
        let held = |fence| Some(Raised::Held { fence });
        assert_eq!(replies(3, &[held(7), Some(Raised::NotHolder)]).decide(7), None);
        assert_eq!(replies(3, &[held(7), Some(Raised::NotHolder), held(7)]).decide(7), Some(Raise::Held { fence: 7 }));
        assert_eq!(replies(3, &[held(9), held(7)]).decide(7), Some(Raise::Held { fence: 7 }), "of a majority");
        assert_eq!(replies(3, &[held(9), held(9)]).decide(7), Some(Raise::Held { fence: 9 }), "of a later call");
        assert_eq!(
            replies(3, &[held(9), held(6), None]).decide(7),
            Some(Raise::Undecided),
            "a smaller one does not count"
        );
        let others = [Some(Raised::NotHolder), Some(Raised::NotHolder)];
        assert_eq!(replies(3, &others).decide(7), Some(Raise::NotHolder));
        assert_eq!(closed(3, &[held(7), None]).decide(7), Some(Raise::Undecided));
        let refused = [Some(Raised::ClockBehind), held(7), None];
        assert_eq!(replies(3, &refused).decide(7), Some(Raise::Undecided));
    }

    #[test]
    fn renewal_is_known_when_a_majority_has_or_has_not_the_key() {
        use RenewReply::{Extended, NotHolder, Unknown};

        assert_eq!(replies(3, &[Some(Extended), Some(Extended)]).decide(), Some(Extended));
        assert_eq!(replies(3, &[Some(NotHolder), Some(NotHolder)]).decide(), Some(NotHolder));
        assert_eq!(replies(3, &[Some(NotHolder), Some(Extended)]).decide(), None);
        assert_eq!(closed(3, &[Some(NotHolder), Some(Extended)]).decide(), Some(Unknown));
        assert_eq!(replies(5, &[Some(NotHolder), Some(NotHolder), None, None, None]).decide(), Some(Unknown));
        assert_eq!(replies(5, &[Some(NotHolder), Some(NotHolder), None, Some(NotHolder)]).decide(), Some(NotHolder));
    }

    #[test]
    fn release_is_confirmed_by_a_majority() {
        use ReleaseReply::{Freed, NotHolder};

        assert_eq!(replies(3, &[Some(Freed), Some(Freed)]).decide(), Some(Ok(Freed)));
        assert_eq!(replies(3, &[Some(NotHolder), None]).decide(), None);
        assert_eq!(replies(3, &[Some(NotHolder), None, Some(NotHolder)]).decide(), Some(Ok(NotHolder)));
        assert_eq!(replies(3, &[Some(Freed), None, Some(NotHolder)]).decide(), Some(Ok(Freed)), "it may have held");
        assert_eq!(replies(3, &[Some(Freed), None, None]).decide(), Some(Err(())));
        assert_eq!(closed(3, &[Some(Freed)]).decide(), Some(Err(())), "too few have replied");
    }

    fn holder(name: &str, fence: u64) -> Holder {
        Holder::new(AcquisitionId::from_text(name), fence).connected(false)
    }

    fn status(holder: impl Into<Option<Holder>>, left: Duration) -> Option<KeyStatus> {
        Some(KeyStatus::new(holder.into(), left, 3))
    }

    #[test]
    fn status_has_the_holder_of_a_majority() {
        let id = |status: &KeyStatus| status.holder().map(|holder| (holder.id.to_string(), holder.fence));
        let decided =
            |received: &[Option<KeyStatus>]| replies(3, received).decide().map(|status| status.expect("replies"));
        let free = || status(None, Duration::ZERO);
        let held = decided(&[status(holder("a:1", 7), LEASE), status(holder("a:1", 9), LEASE / 2)]).expect("decided");
        assert_eq!((id(&held), held.lease_left, held.waiting), (Some(("a:1".to_owned(), 7)), LEASE, 0));
        assert_eq!(held.holder().and_then(|holder| holder.connected), None, "no server knows it");
        assert_eq!(decided(&[free(), free()]), Some(KeyStatus::new(None, Duration::ZERO, 0)));
        assert_eq!(decided(&[free(), status(holder("a:1", 7), LEASE)]), None, "the third one decides");
        let old = decided(&[free(), status(holder("a:1", 7), LEASE), free()]).expect("decided");
        assert_eq!((id(&old), old.lease_left), (None, Duration::ZERO), "the rest of a lost lock");
        let down = decided(&[None, status(holder("a:1", 7), LEASE), free()]).expect("decided");
        assert_eq!((id(&down).is_some(), down.lease_left), (true, LEASE), "it may have the key with the first");
        let blocked = decided(&[status(None, LEASE), status(None, LEASE), free()]).expect("decided");
        assert_eq!((id(&blocked), blocked.lease_left), (None, LEASE));
        assert_eq!(replies::<KeyStatus>(3, &[None, None]).decide(), Some(Err(())));
    }

    #[test]
    fn key_is_revoked_from_the_holder_of_a_majority() {
        let revoked = |name| ForceReleaseReply::Revoked { holders: vec![AcquisitionId::from_text(name)] };
        let unblocked = |blocked_for| ForceReleaseReply::Unblocked { blocked_for };
        let (free, a, b) = (ForceReleaseReply::Free, revoked("a:1"), revoked("b:1"));
        for (received, outcome) in [
            ([Some(&a), Some(&a), Some(&free)], Some(Ok(a.clone()))),
            ([Some(&a), Some(&free), None], Some(Ok(a.clone()))),
            ([Some(&a), Some(&free), Some(&free)], Some(Ok(free.clone()))),
            ([Some(&a), Some(&b), Some(&free)], Some(Ok(free.clone()))),
            ([Some(&unblocked(LEASE)), Some(&unblocked(LEASE / 2)), Some(&free)], Some(Ok(unblocked(LEASE / 2)))),
            ([Some(&a), None, None], Some(Err(()))),
        ] {
            let received = received.map(Option::<&ForceReleaseReply>::cloned);
            assert_eq!(replies(3, &received).decide(), outcome, "{received:?}");
        }
        assert_eq!(replies(3, &[Some(a.clone()), Some(a)]).decide(), None, "each is waited for");
    }

    /// Whichever replies follow, and in whichever order: the outcome stays.
    #[test]
    fn no_further_reply_changes_an_outcome() {
        fn check<T: Clone + Debug, O: PartialEq + Debug>(
            kinds: &[Option<T>],
            decide: impl Fn(&Replies<T>) -> Option<O>,
        ) {
            let n = kinds.len();
            for number in 0..n.pow(5) {
                let received: Vec<_> = (0..5).map(|server| kinds[number / n.pow(server) % n].clone()).collect();
                let last = decide(&replies(5, &received)).expect("each has replied");
                for count in 1..5 {
                    if let Some(outcome) = decide(&replies(5, &received[..count])) {
                        assert_eq!(outcome, last, "{count} of {received:?}");
                        assert_eq!(decide(&closed(5, &received[..count])), Some(outcome), "{count} of {received:?}");
                    }
                    assert!(decide(&closed(5, &received[..count])).is_some(), "{count} of {received:?}");
                }
            }
        }
        // What is decided, and not the numbers beside it: later replies may be more exact.
        let ballot = |ballot| match ballot {
            Ballot::Won { .. } => "won",
            Ballot::Lost { .. } => "lost",
            Ballot::Undecided => "void",
        };
        check(&[granted(1), busy(5, false), busy(3, true), None], |votes| votes.decide().map(ballot));
        let held = |fence| Some(Raised::Held { fence });
        let kind = |raise| std::mem::discriminant(&raise);
        check(&[held(7), held(9), Some(Raised::NotHolder), None], |raised| raised.decide(7).map(kind));
        check(&[Some(RenewReply::Extended), Some(RenewReply::NotHolder), None], Replies::<RenewReply>::decide);
        check(&[Some(ReleaseReply::Freed), Some(ReleaseReply::NotHolder), None], Replies::<ReleaseReply>::decide);
        let holders = [status(holder("a:1", 7), LEASE), status(holder("b:1", 7), LEASE), status(None, Duration::ZERO)];
        check(&[holders.as_slice(), &[None]].concat(), |statuses| {
            statuses.decide().map(|status| status.map(|status| status.holder().map(|holder| holder.id.clone())))
        });
    }
}
