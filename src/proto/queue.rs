//! The local waiters of one key, in order.

use std::{collections::VecDeque, time::Duration};

use super::{hold_limits::HoldLimits, sharing::Sharing};
use crate::{clock::BootInstant, owner::Owner, store::Demand, trace::SectionTrace};

/// One request for a key.
#[derive(Clone, Debug)]
pub struct LockRequest<W> {
    /// The receiver of the result.
    pub waiter: W,
    /// How long the request waits while another owner has the key. Zero: it is rejected at once.
    pub wait: Duration,
    /// The owner that the request re-enters as.
    pub owner: Option<Owner>,
    /// The owner of the parent request of its task, if the request has no owner itself.
    pub parent: Option<Owner>,
    /// The limits of its section.
    pub limits: HoldLimits,
    /// What it asks of the key.
    pub demand: Demand,
    /// With how many others it holds the key.
    pub sharing: Sharing,
    /// The trace of its section.
    pub trace: Option<SectionTrace>,
}

/// The capacity of a queue that is kept empty: few keys have more waiters at a time.
const MAX_SPARE: usize = 4;

/// A queue in first-come order.
#[derive(Debug)]
pub(super) struct WaitQueue<W> {
    entries: VecDeque<Entry<W>>,
    /// The number of requests without a wait.
    non_waiting: usize,
}

#[derive(Debug)]
struct Entry<W> {
    number: u64,
    /// The end of the wait, by the clock of leases. After a suspend of the machine, the timer of
    /// the call fires later than that. `FAR_FUTURE` for a request without a wait: it gets the reply
    /// of the store, however late that is.
    deadline: BootInstant,
    request: LockRequest<W>,
}

impl<W> LockRequest<W> {
    /// The same request with another waiter.
    pub fn map_waiter<V>(self, map: impl FnOnce(W) -> V) -> LockRequest<V> {
        let Self { waiter, wait, owner, parent, limits, demand, sharing, trace } = self;
        LockRequest { waiter: map(waiter), wait, owner, parent, limits, demand, sharing, trace }
    }

    /// Returns `true` if the request waits while another owner has the key.
    pub(super) const fn waits(&self) -> bool {
        !self.wait.is_zero()
    }
}

impl<W> WaitQueue<W> {
    pub(super) const fn new() -> Self {
        Self { entries: VecDeque::new(), non_waiting: 0 }
    }

    /// Frees the memory of a queue that was long.
    pub(super) fn shrink(&mut self) {
        if self.entries.is_empty() && self.entries.capacity() > MAX_SPARE {
            self.entries = VecDeque::new();
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns `true` if a request with a wait is queued.
    pub(super) fn has_waiting(&self) -> bool {
        self.entries.len() > self.non_waiting
    }

    /// Returns `true` if a request without a wait is queued.
    pub(super) fn has_non_waiting(&self) -> bool {
        self.non_waiting > 0
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = &LockRequest<W>> {
        self.entries.iter().map(|entry| &entry.request)
    }

    pub(super) fn first(&self) -> Option<&LockRequest<W>> {
        self.entries.front().map(|entry| &entry.request)
    }

    /// Adds a request that times out at `deadline`.
    pub(super) fn push(&mut self, number: u64, deadline: BootInstant, request: LockRequest<W>) {
        if let Some(owner) = &request.owner {
            owner.enqueued();
        }
        self.non_waiting += usize::from(!request.waits());
        self.entries.push_back(Entry { number, deadline, request });
    }

    pub(super) fn pop(&mut self) -> Option<LockRequest<W>> {
        self.remove(0)
    }

    /// Removes the first request if it has timed out.
    pub(super) fn pop_timed_out(&mut self, now: BootInstant) -> Option<LockRequest<W>> {
        if self.entries.front()?.deadline > now {
            return None;
        }
        self.pop()
    }

    /// The index of the request with this number.
    pub(super) fn find(&self, number: u64) -> Option<usize> {
        self.entries.iter().position(|entry| entry.number == number)
    }

    pub(super) fn remove(&mut self, at: usize) -> Option<LockRequest<W>> {
        let Entry { request, number: _, deadline: _ } =
            if at == 0 { self.entries.pop_front()? } else { self.entries.remove(at)? };
        if let Some(owner) = &request.owner {
            owner.dequeued();
        }
        self.non_waiting -= usize::from(!request.waits());
        Some(request)
    }

    /// Removes the first request without a wait that has at most this number of holders, and
    /// returns it with its index.
    pub(super) fn remove_non_waiting(&mut self, max_holders: u16) -> Option<(usize, LockRequest<W>)> {
        if self.non_waiting == 0 {
            return None;
        }
        let is_next =
            |Entry { request, .. }: &Entry<W>| !request.waits() && request.sharing.max_holders() <= max_holders;
        let at = self.entries.iter().position(is_next)?;
        Some((at, self.remove(at)?))
    }

    /// Removes the first request that a record answers.
    pub(super) fn remove_answered(&mut self) -> Option<LockRequest<W>> {
        let at = self.entries.iter().position(|entry| entry.request.demand.takes_record())?;
        self.remove(at)
    }

    /// Removes the first request that a newer one of this owner replaces.
    pub(super) fn remove_replaced(&mut self, owner: Option<&Owner>) -> Option<LockRequest<W>> {
        let is_other = |request: &LockRequest<W>| owner.is_none() || request.owner.as_ref() != owner;
        let is_replaced = |request: &LockRequest<W>| request.sharing == Sharing::Newest && is_other(request);
        let at = self.requests().position(is_replaced)?;
        self.remove(at)
    }

    /// Returns `true` if a request of this owner is queued.
    pub(super) fn has_owner(&self, owner: &Owner) -> bool {
        owner.is_waiting() && self.requests().any(|request| request.owner.as_ref() == Some(owner))
    }

    /// Removes the first request of this owner that has not timed out, and that may join.
    pub(super) fn remove_owned_by(
        &mut self,
        owner: &Owner,
        now: BootInstant,
        may_join: impl Fn(&LockRequest<W>) -> bool,
    ) -> Option<LockRequest<W>> {
        if !owner.is_waiting() {
            return None;
        }
        // A duplicate gets the record of the section, and does not join it.
        let is_next = |Entry { request, deadline, number: _ }: &Entry<W>| {
            request.owner.as_ref() == Some(owner)
                && *deadline > now
                && request.demand.joins_sections()
                && may_join(request)
        };
        let at = self.entries.iter().position(is_next)?;
        self.remove(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: BootInstant = BootInstant::from_nanos(1 << 40);
    const WAIT: Duration = Duration::from_secs(1);

    fn queue(requests: &[(u32, Duration, Option<&Owner>)]) -> WaitQueue<u32> {
        let mut queue = WaitQueue::new();
        for &(waiter, wait, owner) in requests {
            let owner = owner.cloned();
            let request = LockRequest {
                waiter,
                wait,
                owner,
                parent: None,
                limits: HoldLimits::default(),
                demand: Demand::new(),
                sharing: Sharing::Alone,
                trace: None,
            };
            let deadline = if wait.is_zero() { BootInstant::FAR_FUTURE } else { START.saturating_add(wait) };
            queue.push(u64::from(waiter), deadline, request);
        }
        queue
    }

    fn waiters(queue: &WaitQueue<u32>) -> Vec<u32> {
        queue.requests().map(|request| request.waiter).collect()
    }

    #[test]
    fn long_queue_frees_its_memory_at_its_end() {
        let mut queue = queue(&[(1, WAIT, None); 100]);
        while queue.pop().is_some() {
            queue.shrink();
        }
        queue.shrink();
        assert!(queue.entries.capacity() <= MAX_SPARE, "{}", queue.entries.capacity());
    }

    #[test]
    fn requests_without_a_wait_are_counted_and_removed_first() {
        let mut queue =
            queue(&[(1, WAIT, None), (2, Duration::ZERO, None), (3, WAIT, None), (4, Duration::ZERO, None)]);
        let removed: Vec<_> =
            std::iter::from_fn(|| queue.remove_non_waiting(1)).map(|(at, request)| (at, request.waiter)).collect();
        assert_eq!((removed, waiters(&queue)), (vec![(1, 2), (2, 4)], vec![1, 3]));
        assert!(queue.has_waiting() && !queue.has_non_waiting());
    }

    #[test]
    fn only_the_first_request_times_out() {
        let mut queue = queue(&[(1, WAIT * 2, None), (2, WAIT, None)]);
        assert!(queue.pop_timed_out(START.saturating_add(WAIT)).is_none(), "the first is not due");
        let order: Vec<_> = std::iter::from_fn(|| queue.pop_timed_out(START.saturating_add(WAIT * 2))).collect();
        assert_eq!(order.len(), 2);
    }

    #[test]
    fn an_owner_is_waiting_while_a_request_of_it_is_queued() {
        let (owner, other) = (Owner::new(), Owner::new());
        let mut queue = queue(&[(1, WAIT, Some(&owner)), (2, WAIT * 2, Some(&owner)), (3, WAIT, Some(&other))]);
        assert!(queue.has_owner(&owner) && owner.is_waiting());
        let removed = queue.remove_owned_by(&owner, START.saturating_add(WAIT), |_| true).map(|request| request.waiter);
        assert_eq!(removed, Some(2), "the first has timed out");
        let at = queue.find(1).expect("queued");
        queue.remove(at);
        assert!(!queue.has_owner(&owner) && !owner.is_waiting());
        assert_eq!(waiters(&queue), [3]);
    }
}
