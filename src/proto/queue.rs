//! Who waits for one key in this process, in order. Pure.

use std::{collections::VecDeque, time::Duration};

use super::hold_limits::Terms;
use crate::{clock::BootInstant, owner::Owner};

/// One who asks for the key.
#[derive(Debug)]
pub struct Request<W> {
    /// Who is told.
    pub waiter: W,
    /// How long it waits while another owner has the key. Zero: it is rejected.
    pub wait: Duration,
    /// Under whose name it re-enters what is held already.
    pub owner: Option<Owner>,
    /// The owner of the request that started its task, if it has no owner itself.
    pub parent: Option<Owner>,
    /// On which terms it will hold the key.
    pub terms: Terms,
}

/// First come, first served.
#[derive(Debug)]
pub(super) struct Line<W> {
    places: VecDeque<Place<W>>,
    /// How many do not care to wait: they want to know at once.
    impatient: usize,
}

#[derive(Debug)]
struct Place<W> {
    number: u64,
    /// When its wait is over, by the clock of leases: after a suspend the timer of its call is
    /// later. `FAR_FUTURE` if it does not wait, because the answer of the store is for that one, however
    /// late.
    until: BootInstant,
    request: Request<W>,
}

impl<W> Request<W> {
    /// Whether it waits while another owner has the key; else it is rejected.
    pub(super) const fn waits(&self) -> bool {
        !self.wait.is_zero()
    }
}

impl<W> Line<W> {
    pub(super) const fn new() -> Self {
        Self { places: VecDeque::new(), impatient: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether somebody is in it who waits.
    pub(super) fn has_patient(&self) -> bool {
        self.places.len() > self.impatient
    }

    /// Whether somebody is in it who does not wait.
    pub(super) fn has_impatient(&self) -> bool {
        self.impatient > 0
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = &Request<W>> {
        self.places.iter().map(|place| &place.request)
    }

    pub(super) fn first(&self) -> Option<&Request<W>> {
        self.places.front().map(|place| &place.request)
    }

    /// Its wait is over at that moment.
    pub(super) fn push(&mut self, number: u64, until: BootInstant, request: Request<W>) {
        if let Some(owner) = &request.owner {
            owner.lines_up();
        }
        self.impatient += usize::from(!request.waits());
        self.places.push_back(Place { number, until, request });
    }

    pub(super) fn pop(&mut self) -> Option<Request<W>> {
        self.remove(0)
    }

    /// The first of it, if its wait is over.
    pub(super) fn pop_late(&mut self, now: BootInstant) -> Option<Request<W>> {
        if self.places.front()?.until > now {
            return None;
        }
        self.pop()
    }

    /// Where this place is.
    pub(super) fn find(&self, number: u64) -> Option<usize> {
        self.places.iter().position(|place| place.number == number)
    }

    pub(super) fn remove(&mut self, at: usize) -> Option<Request<W>> {
        let Place { request, number: _, until: _ } =
            if at == 0 { self.places.pop_front()? } else { self.places.remove(at)? };
        if let Some(owner) = &request.owner {
            owner.leaves_line();
        }
        self.impatient -= usize::from(!request.waits());
        Some(request)
    }

    /// The first one that does not wait, and where it was.
    pub(super) fn remove_impatient(&mut self) -> Option<(usize, Request<W>)> {
        if self.impatient == 0 {
            return None;
        }
        let at = self.places.iter().position(|place| !place.request.waits())?;
        Some((at, self.remove(at)?))
    }

    /// Whether this owner waits in it.
    pub(super) fn has(&self, owner: &Owner) -> bool {
        owner.waits() && self.requests().any(|request| request.owner.as_ref() == Some(owner))
    }

    /// The first one of this owner whose wait is not over.
    pub(super) fn remove_of(&mut self, owner: &Owner, now: BootInstant) -> Option<Request<W>> {
        if !owner.waits() {
            return None;
        }
        let is_next = |place: &Place<W>| place.request.owner.as_ref() == Some(owner) && place.until > now;
        let at = self.places.iter().position(is_next)?;
        self.remove(at)
    }
}
