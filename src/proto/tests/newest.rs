//! Requests that a newer one replaces.

use super::*;

impl Harness {
    /// A request that waits, and that replaces older ones.
    fn newest(&mut self, waiter: u32) -> u64 {
        self.send(LockRequest { wait: WAIT, sharing: Sharing::Newest, ..request_of(waiter) })
    }

    fn hold_newest(&mut self, waiter: u32) -> Arc<Section<NoDriver>> {
        self.newest(waiter);
        self.reply(GRANTED);
        self.expect_grant(waiter)
    }

    fn expect_superseded(&mut self, waiter: u32) {
        match self.results.remove(0) {
            (rejected, Err(LockError::Superseded)) if rejected == waiter => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Guarantee: G25.
#[test]
fn newer_request_asks_for_an_id_of_its_own_beside_the_holder() {
    let mut h = harness();
    let first = h.hold_newest(1);
    assert!(first.grant.id.is_replaceable() && first.grant.id.max_holders() == 1);
    h.newest(2);
    assert!(h.sent_acquire().id != first.grant.id, "the store knows which one is newer");
    h.reply(QUEUED);
    assert_eq!(h.superseded, [], "before the store says so");
    h.handle(Event::Revoked(first.grant.id.clone()));
    assert_eq!((h.verifications, h.superseded.len()), (1, 0), "a message may be forged");
    h.handle(Event::Superseded(first.grant.id.clone()));
    assert_eq!((&h.superseded[..], first.end_reason()), (&[first.token][..], None), "it is still held");
    h.end_guard(&first, GuardEnd::ReleasedAfterFailure);
    assert_eq!(h.sent_release().block_for, Duration::ZERO);
    h.reply_freed();
    assert!(h.results.is_empty(), "the store grants the next section");
}

/// Guarantee: G25.
#[test]
fn waiting_request_is_rejected_with_the_next_one() {
    let mut h = harness();
    h.newest(1);
    h.reply(QUEUED);
    h.newest(2);
    h.expect_superseded(1);
    let left = h.calls.remove(0);
    assert!(matches!(left.op, StoreOp::Release(_)), "{left:?}");
    let second = h.take_call();
    assert!(matches!(second.op, StoreOp::Acquire(_)), "at once, behind those of other processes: {second:?}");
    h.newest(3);
    h.expect_superseded(2);
    assert!(h.calls.is_empty(), "the store must see the second one first");
    h.handle(Event::Acquired(second.number, Ok(GRANTED)));
    assert!(h.results.is_empty(), "a request that was replaced is never granted");
    let left = h.calls.remove(0);
    assert!(matches!(left.op, StoreOp::Release(_)), "{left:?}");
    h.reply(GRANTED);
    h.expect_grant(3);
}

/// Guarantee: G25.
#[test]
fn waiting_request_asks_after_a_message_and_ends_by_the_reply() {
    let mut h = harness();
    h.newest(1);
    h.reply(QUEUED);
    let id = AcquisitionId::from_text("test:0000000000000001:0/1");
    h.handle(Event::Revoked(id.clone()));
    assert_eq!(h.sent_acquire().id, id);
    h.reply(AcquireReply::Superseded);
    h.expect_superseded(1);
    assert_eq!(h.sent_release().id, id, "it leaves the queue, or passes its offer on");
}

/// A message during a call: the reply may be older.
/// Guarantee: G25.
#[test]
fn message_during_a_call_has_the_request_ask_again() {
    let mut h = harness();
    h.newest(1);
    let id = h.sent_acquire().id.clone();
    h.handle(Event::Revoked(id.clone()));
    h.reply(QUEUED);
    assert_eq!(h.sent_acquire().id, id);
    h.handle(Event::Revoked(id.clone()));
    h.reply(GRANTED);
    assert!(h.results.is_empty() && h.sent_acquire().id == id, "not before another reply");
    h.reply(AcquireReply::Superseded);
    h.expect_superseded(1);
}

/// Guarantee: G25.
#[test]
fn other_requests_for_the_key_are_not_replaced() {
    let (mut h, held) = holding();
    h.request(2, true);
    h.newest(3);
    assert!(h.results.is_empty() && h.calls.is_empty(), "they wait");
    assert_eq!(h.end_guard(&held, GuardEnd::Released), Some(ReleaseOutcome::HandedOff));
    let second = h.expect_grant(2);
    h.end_guard(&second, GuardEnd::Released);
    h.reply_freed();
    assert!(h.sent_acquire().id.is_replaceable(), "not under the grant of another kind");
    h.reply(GRANTED);
    let third = h.expect_grant(3);
    h.request(4, true);
    h.handle(Event::Superseded(second.grant.id.clone()));
    assert_eq!((h.superseded.len(), third.end_reason()), (0, None));
}

/// Its id asks the store after that of the waiter before it.
#[test]
fn older_request_ends_although_another_waiter_is_first() {
    let mut h = harness();
    let held = h.hold_newest(1);
    h.request(2, true);
    h.reply(QUEUED);
    h.newest(3);
    assert_eq!((&h.superseded[..], h.calls.len()), (&[held.token][..], 0));
}

/// A flood for one key makes few calls, whether the store replies or not.
///
/// Guarantee: G15.
#[test]
fn flood_of_replaced_requests_makes_few_calls() {
    let mut h = harness();
    for waiter in 0..1_000 {
        h.newest(waiter);
    }
    assert_eq!((h.results.len(), h.calls.len()), (999, 1));
    let first = h.take_call();
    h.handle(Event::Acquired(first.number, Ok(QUEUED)));
    assert_eq!(h.calls.len(), 2, "a release, and an acquire for the newest request alone");
}

/// Guarantee: G25.
#[test]
fn request_of_the_same_owner_enters_its_own_section() {
    let mut h = harness();
    let owner = Owner::new();
    let request =
        |waiter, sharing| LockRequest { wait: WAIT, sharing, owner: Some(owner.clone()), ..request_of(waiter) };
    h.send(request(1, Sharing::Newest));
    h.send(request(2, Sharing::Newest));
    assert!(h.results.is_empty(), "one does not replace the other");
    h.reply(GRANTED);
    assert_eq!(h.results.drain(..).map(|(waiter, _)| waiter).collect::<Vec<_>>(), [1, 2]);
    for (waiter, sharing) in [(3, Sharing::Newest), (4, Sharing::Alone)] {
        h.send(request(waiter, sharing));
        h.expect_grant(waiter);
    }
    assert!(h.calls.is_empty());
}
