//! Who waits for one key in this process, in order. Pure.

use std::{collections::VecDeque, time::Duration};

use super::hold_limits::HoldLimits;
use crate::{clock::BootInstant, owner::Owner};

/// One who asks for the key.
#[derive(Debug)]
pub struct LockRequest<W> {
    /// Who is told.
    pub waiter: W,
    /// How long it waits while another owner has the key. Zero: it is rejected.
    pub wait: Duration,
    /// Under whose name it re-enters what is held already.
    pub owner: Option<Owner>,
    /// The owner of the request that started its task, if it has no owner itself.
    pub parent: Option<Owner>,
    /// On which terms it will hold the key.
    pub limits: HoldLimits,
}

/// First come, first served.
#[derive(Debug)]
pub(super) struct WaitQueue<W> {
    entries: VecDeque<Entry<W>>,
    /// How many do not care to wait: they want to know at once.
    non_waiting: usize,
}

#[derive(Debug)]
struct Entry<W> {
    number: u64,
    /// When its wait is over, by the clock of leases: after a suspend the timer of its call is
    /// later. `FAR_FUTURE` if it does not wait, because the answer of the store is for that one, however
    /// late.
    deadline: BootInstant,
    request: LockRequest<W>,
}

impl<W> LockRequest<W> {
    /// Whether it waits while another owner has the key; else it is rejected.
    pub(super) const fn waits(&self) -> bool {
        !self.wait.is_zero()
    }
}

impl<W> WaitQueue<W> {
    pub(super) const fn new() -> Self {
        Self { entries: VecDeque::new(), non_waiting: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether somebody is in it who waits.
    pub(super) fn has_waiting(&self) -> bool {
        self.entries.len() > self.non_waiting
    }

    /// Whether somebody is in it who does not wait.
    pub(super) fn has_non_waiting(&self) -> bool {
        self.non_waiting > 0
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = &LockRequest<W>> {
        self.entries.iter().map(|place| &place.request)
    }

    pub(super) fn first(&self) -> Option<&LockRequest<W>> {
        self.entries.front().map(|place| &place.request)
    }

    /// Its wait is over at that moment.
    pub(super) fn push(&mut self, number: u64, until: BootInstant, request: LockRequest<W>) {
        if let Some(owner) = &request.owner {
            owner.enqueued();
        }
        self.non_waiting += usize::from(!request.waits());
        self.entries.push_back(Entry { number, deadline: until, request });
    }

    pub(super) fn pop(&mut self) -> Option<LockRequest<W>> {
        self.remove(0)
    }

    /// The first of it, if its wait is over.
    pub(super) fn pop_timed_out(&mut self, now: BootInstant) -> Option<LockRequest<W>> {
        if self.entries.front()?.deadline > now {
            return None;
        }
        self.pop()
    }

    /// Where this place is.
    pub(super) fn find(&self, number: u64) -> Option<usize> {
        self.entries.iter().position(|place| place.number == number)
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

    /// The first one that does not wait, and where it was.
    pub(super) fn remove_non_waiting(&mut self) -> Option<(usize, LockRequest<W>)> {
        if self.non_waiting == 0 {
            return None;
        }
        let at = self.entries.iter().position(|place| !place.request.waits())?;
        Some((at, self.remove(at)?))
    }

    /// Whether this owner waits in it.
    pub(super) fn has_owner(&self, owner: &Owner) -> bool {
        owner.is_waiting() && self.requests().any(|request| request.owner.as_ref() == Some(owner))
    }

    /// The first one of this owner whose wait is not over.
    pub(super) fn remove_owned_by(&mut self, owner: &Owner, now: BootInstant) -> Option<LockRequest<W>> {
        if !owner.is_waiting() {
            return None;
        }
        let is_next = |place: &Entry<W>| place.request.owner.as_ref() == Some(owner) && place.deadline > now;
        let at = self.entries.iter().position(is_next)?;
        self.remove(at)
    }
}
