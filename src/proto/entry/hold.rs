//! Sections under a grant, one after the other.

use std::{sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::{Conversation, Delivery, queue_ops::refused};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    error::{LockError, LockLost},
    fencing::FencingToken,
    limits::{LOCAL_HANDOFF_SECTIONS, LOCAL_HANDOFF_TIME, MIN_REMAINING_DIVISOR, OFFER_TTL, STORE_TIMEOUT},
    proto::section::ReleaseOutcome,
    proto::{
        Action, Context, DriverTypes, Ending, Request, Verb,
        attempt::{Attempt, Held, Running, State},
        grant::Grant,
        pending_release::GiveBack,
        section::Section,
    },
    store::{StoreError, StoreErrorKind, YieldReply},
};

/// When a delivery is looked at first. What is late then has another store timeout, so that it is
/// recalled when an offer of the store would be over.
pub(super) const DELIVERY: Duration = OFFER_TTL.saturating_sub(STORE_TIMEOUT);

/// It is the turn of this request.
pub(super) fn start<D: DriverTypes>(
    deliveries: &mut SmallVec<[Delivery<D>; 1]>,
    (waiter, waits): (D::Waiter, bool),
    section: &Arc<Section<D>>,
    cx: &mut Context<'_, D>,
) {
    if section.sent() == 0 {
        // All earlier ones were taken: an owner that re-enters a million times leaves no list.
        deliveries.clear();
    }
    deliveries.push(Delivery { waiter: waiter.clone(), waits, due: cx.now().saturating_add(DELIVERY), is_late: false });
    cx.actions.push(Action::Start(waiter, Arc::clone(section)));
}

impl<D: DriverTypes> Conversation<D> {
    pub(super) fn granted(&mut self, asked: BootInstant, fence: u64, cx: &mut Context<'_, D>) {
        let Some(attempt) = &mut self.attempt else { return };
        let Some(token) = FencingToken::from_fence(fence) else {
            let error = StoreError::new("lock", "acquire", StoreErrorKind::Protocol);
            return self.give_up(&error, asked, cx);
        };
        let grant = Grant::new(cx.key.clone(), attempt.owner.clone(), token, attempt.lease, attempt.lock_delay, asked);
        let grant = Arc::new(grant);
        if grant.remaining(cx.now()) < attempt.lease / MIN_REMAINING_DIVISOR {
            // It took too long to hear of it: given back, and asked for again.
            return self.end(Duration::ZERO, None, cx);
        }
        attempt.ask_at = None;
        attempt.state =
            State::Held(Held { grant: Arc::clone(&grant), token, since: cx.now(), sections: 0, running: None });
        self.next_section(true, cx);
    }

    /// The first of the line has its turn, with all others of the same owner. Nobody is there: the key is given back.
    pub(super) fn next_section(&mut self, watch: bool, cx: &mut Context<'_, D>) {
        self.skip_late(cx);
        let Some(Attempt { state: State::Held(held), .. }) = &mut self.attempt else { return };
        let Some(first) = self.line.first() else {
            return self.end(Duration::ZERO, None, cx);
        };
        if first.terms.lock_delay > held.grant.lock_delay() || first.terms.store_lease(cx.lease) > held.grant.lease() {
            // I10: the store keeps the key for less than this one needs. A yield asks for more, and
            // the section begins after its answer.
            return self.yield_turn(cx);
        }
        let Some(first) = self.line.pop() else { return };
        let waits = first.waits();
        let Request { waiter, owner, terms, wait: _, parent: _ } = first;
        let token = held.token.with_sequence(held.sections);
        held.sections += 1;
        let looked_at = held.grant.look_at();
        let section = Arc::new(Section::new(Arc::clone(&held.grant), token, terms, cx.now()));
        held.grant.delivery_at(cx.now().saturating_add(DELIVERY));
        if watch || held.grant.look_at() < looked_at {
            cx.actions.push(Action::Watch(Arc::clone(&held.grant)));
        }
        let owner = owner.filter(|owner| !owner.is_retired());
        let mut holds = 1;
        start(&mut self.deliveries, (waiter, waits), &section, cx);
        if let Some(owner) = &owner {
            while let Some(request) = self.line.remove_of(owner, cx.now()) {
                holds += 1;
                let waits = request.waits();
                start(&mut self.deliveries, (request.waiter, waits), &section, cx);
            }
        }
        held.running = Some(Running { section, owner, holds, abnormal: false, in_order: false });
        self.refuse_those_who_do_not_wait(cx, refused);
    }

    /// A guard is given back. What became of it; `None`: the store is asked, and the [outcome](Action::Outcome) follows.
    pub fn guard_ended(
        &mut self,
        section: &Arc<Section<D>>,
        ending: Ending,
        cx: &mut Context<'_, D>,
    ) -> Option<ReleaseOutcome> {
        self.notice_loss(cx);
        let Some(Attempt { state: State::Held(held), .. }) = &mut self.attempt else {
            return Some(ReleaseOutcome::NotHeld);
        };
        let Some(running) = held.running.as_mut().filter(|running| running.is(section)) else {
            // Lost before, and given back then.
            return Some(ReleaseOutcome::NotHeld);
        };
        if ending == Ending::Unheard {
            section.taken();
        }
        running.abnormal |= ending == Ending::Dropped;
        running.in_order |= ending == Ending::Released;
        running.holds -= 1;
        if running.holds > 0 {
            return Some(ReleaseOutcome::StillHeld);
        }
        let (abnormal, in_order) = (running.abnormal, running.in_order);
        held.running = None;
        section.end(LockLost::Released);
        let block_for = match ending {
            // I10: a statement of it may be on its way still.
            _ if abnormal => section.terms.lock_delay,
            Ending::Released => section.terms.still_to_hold(section.began, cx.now()),
            // It says nothing of what others of its owner have done.
            Ending::Unheard if in_order => section.terms.still_to_hold(section.began, cx.now()),
            Ending::Unheard | Ending::Failed | Ending::Dropped => Duration::ZERO,
        };
        // The handoff and its terms are those of the next waiter whose wait is not over.
        self.skip_late(cx);
        if abnormal || !block_for.is_zero() || self.line.is_empty() {
            self.end(block_for, Some(Arc::clone(section)), cx);
            return None;
        }
        cx.actions.push(Action::Ended(Arc::clone(&section.grant)));
        self.hand_over(cx);
        Some(ReleaseOutcome::HandedOff)
    }

    /// The section has ended, and somebody here waits: no round trip, unless others may have waited for long enough.
    pub(super) fn hand_over(&mut self, cx: &mut Context<'_, D>) {
        let Some(Attempt { state: State::Held(held), .. }) = &self.attempt else { return };
        if self.line.first().is_some_and(|next| next.terms.store_lease(cx.lease) < held.grant.lease()) {
            // A crash of the next one is to cost no more than that one needs. One id never gets
            // less than before, because a late renewal of it may still ask for the longer lease:
            // another id asks.
            return self.end(Duration::ZERO, None, cx);
        }
        // A revoked grant may run to its answer, but nothing new begins under it: the yield finds
        // out.
        let is_ours = !held.grant.is_in_doubt()
            && cx.now().saturating_duration_since(held.since) < LOCAL_HANDOFF_TIME
            && held.sections < LOCAL_HANDOFF_SECTIONS
            && self.line.first().is_none_or(|next| held.grant.remaining(cx.now()) >= next.terms.least_run(cx.lease));
        if is_ours { self.next_section(false, cx) } else { self.yield_turn(cx) }
    }

    pub(super) fn yield_turn(&mut self, cx: &mut Context<'_, D>) {
        let Some(attempt) = self.attempt.take() else { return };
        let State::Held(held) = attempt.state else { unreachable!("yielded while it is held") };
        held.grant.section(BootInstant::FAR_FUTURE);
        let next = cx.ids.next();
        let lock_delay = self.lock_delay();
        // A yield sets the lease, and a renewal of the same id may have been done already: never
        // less than that asked for.
        let lease = held.grant.lease().max(self.lease(cx));
        let verb =
            Verb::Yield { fence: held.token.fence(), next: next.clone(), lease: lease.saturating_add(lock_delay) };
        let call = cx.call(&attempt.owner, verb);
        let mut attempt =
            Attempt { state: State::Yielding { held, next, is_refused: false }, lease, lock_delay, ..attempt };
        attempt.calls.begin(call.number, cx.now());
        attempt.hinted = false;
        attempt.taken_away = false;
        self.attempt = Some(attempt);
        cx.actions.push(Action::Send(call));
    }

    pub(super) fn yielded(&mut self, number: u64, answer: Result<YieldReply, StoreError>, cx: &mut Context<'_, D>) {
        let Some(mut attempt) = self.attempt.take_if(|attempt| attempt.calls.number() == Some(number)) else { return };
        let asked = attempt.calls.ended(number).unwrap_or(cx.now());
        let State::Yielding { mut held, next, is_refused } = attempt.state else {
            unreachable!("it was asked to yield")
        };
        let token = match &answer {
            // One that does not rise is none.
            Ok(YieldReply::Extended { fence }) => FencingToken::from_fence(*fence).filter(|token| *token > held.token),
            _ => None,
        };
        if let Some(token) = token {
            if is_refused {
                // It was ours when the yield was done, so the refusal is newer: a loss indeed.
                held.grant.end(LockLost::Revoked);
            }
            held.grant.extend(attempt.lease, asked, cx.now());
            held.grant.refence(token, attempt.lease, attempt.lock_delay);
            attempt.calls.answered();
            let doubted = attempt.taken_away;
            let lost = held.grant.remaining(cx.now()).is_zero();
            let held = Held { token, since: cx.now(), sections: 0, ..held };
            self.attempt = Some(Attempt { state: State::Held(held), ..attempt });
            // It may not be watched yet: the first one under a grant may have wanted another lock-delay.
            if lost {
                return self.end(Duration::ZERO, None, cx);
            }
            self.next_section(true, cx);
            if doubted {
                self.doubt(cx);
            }
            return;
        }
        // The old id is over. What becomes of the new one?
        held.grant.end(LockLost::Released);
        held.running = None;
        cx.actions.push(Action::Forget(held.grant));
        let Attempt { hinted, taken_away, lease, lock_delay, .. } = attempt;
        let new = Attempt { lines_up: true, hinted, taken_away, lease, lock_delay, ..Attempt::new(next) };
        let mut old = GiveBack {
            void_at: attempt.calls.void_at,
            ..GiveBack::new(attempt.owner, Duration::ZERO, cx.lease.longest, cx.now())
        };
        match answer {
            Ok(YieldReply::NotHolder(acquired)) => {
                // I8: an acquire of the old id that got no answer may still be done.
                if let Some(void_at) = old.void_at.filter(|void_at| *void_at > asked) {
                    old.again_at = Some(void_at.saturating_add(Duration::from_millis(1)));
                    self.give_backs.push(old);
                }
                self.attempt = Some(new);
                self.word(asked, Ok(acquired), cx);
            }
            // Not known: the old one is given back, and the new one asks.
            answer => {
                let unknown = || StoreError::new("lock", "yield", StoreErrorKind::Protocol);
                let error = answer.err().unwrap_or_else(unknown);
                let new = self.attempt.insert(new);
                new.calls.failed(&error, asked, cx.call_timeout, cx.now(), 0.0);
                self.give_back(old, cx);
                if self.line.is_empty() { self.end(Duration::ZERO, None, cx) } else { self.ask(cx) }
            }
        }
    }

    /// The section that runs under this grant may have reached its limit. If another one runs by now, it has a limit of its own.
    pub(super) fn limit(&mut self, owner: &AcquisitionId, cx: &mut Context<'_, D>) {
        if self.attempt.as_ref().is_none_or(|attempt| attempt.owner != *owner) {
            return;
        }
        self.notice_loss(cx);
        self.recall_undelivered(cx);
        if let Some(Attempt { state: State::Held(held) | State::Yielding { held, .. }, .. }) = &self.attempt {
            cx.actions.push(Action::Watch(Arc::clone(&held.grant)));
        }
    }

    /// A section that was sent and not taken within the time of an offer goes to the next one: its
    /// caller may never be polled again. Each caller counts as one hold.
    fn recall_undelivered(&mut self, cx: &mut Context<'_, D>) {
        let Some(Attempt { state: State::Held(held) | State::Yielding { held, .. }, .. }) = &self.attempt else {
            return;
        };
        let (now, lease_left, ahead) = (cx.now(), held.grant.remaining(cx.now()), self.line.len());
        if held.running.as_ref().is_none_or(|running| running.section.is_delivered()) {
            self.deliveries.clear();
        }
        let mut next = BootInstant::FAR_FUTURE;
        self.deliveries.retain(|delivery| {
            if delivery.due <= now && delivery.is_late {
                let error = if delivery.waits {
                    LockError::TimedOut { waited: Duration::ZERO, lease_left, ahead }
                } else {
                    refused(lease_left, ahead)
                };
                cx.actions.push(Action::Recall(delivery.waiter.clone(), error));
                return false;
            }
            if delivery.due <= now {
                delivery.is_late = true;
                delivery.due = now.saturating_add(STORE_TIMEOUT);
            }
            next = next.min(delivery.due);
            true
        });
        held.grant.delivery_at(next);
    }

    /// What is past its deadline or its limit is lost, whoever looks first.
    pub(super) fn notice_loss(&mut self, cx: &mut Context<'_, D>) {
        let lost = match self.attempt.as_ref().map(|attempt| (attempt, &attempt.state)) {
            Some((attempt, State::Held(held))) => {
                let over = match &held.running {
                    Some(running) => running.section.remaining(cx.now()).is_zero().then(|| running.section.why()),
                    None => held.grant.remaining(cx.now()).is_zero().then(|| held.grant.why()),
                };
                over.map(|why| (attempt.owner.clone(), why.unwrap_or(LockLost::Expired)))
            }
            _ => None,
        };
        if let Some((owner, why)) = lost {
            self.lost(&owner, why, cx);
        }
    }

    /// A message says that the store has taken the key away from this owner. Anybody who can send messages can say so: the store is asked,
    /// and its word alone ends what runs (I7).
    pub(super) fn taken_away(&mut self, owner: &AcquisitionId, cx: &mut Context<'_, D>) {
        let Some(attempt) = &mut self.attempt else { return };
        let is_next = matches!(&attempt.state, State::Yielding { next, .. } if next == owner);
        if attempt.owner == *owner || is_next {
            // The grant that the awaited answer tells of may be the one that is over.
            attempt.taken_away = attempt.calls.number().is_some();
            self.doubt(cx);
        }
    }

    pub(super) fn doubt(&mut self, cx: &mut Context<'_, D>) {
        if let Some(Attempt { state: State::Held(held), .. }) = &self.attempt {
            cx.actions.push(Action::Doubt(Arc::clone(&held.grant)));
        }
    }

    /// Whoever waits here asks anew, under another id, in the same order.
    pub(super) fn lost(&mut self, owner: &AcquisitionId, why: LockLost, cx: &mut Context<'_, D>) {
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.owner == *owner) else { return };
        let delay = match &mut attempt.state {
            State::Held(held) => {
                let running = held.running.take();
                if let Some(running) = &running {
                    running.section.end(held.grant.why().unwrap_or(why));
                }
                held.grant.end(why);
                running.map_or(Duration::ZERO, |running| running.section.terms.lock_delay)
            }
            // Nothing runs; the answer that is awaited says what is left of it. A renewal behind
            // the yield is refused as one behind a revocation: to end the grant here would tell of
            // a loss that is none.
            State::Yielding { is_refused, .. } if why == LockLost::Revoked => {
                *is_refused = true;
                return;
            }
            State::Yielding { held, .. } => return held.grant.end(why),
            State::Asking | State::Queued => return,
        };
        self.end(delay, None, cx);
    }
}
