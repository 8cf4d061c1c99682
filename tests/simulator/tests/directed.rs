//! Interleavings found by analysis, by models or by a seed, delivered step by step. Each test
//! passes, and fails if the rule behind it is broken.

use std::time::Duration;

use tower_lock::{
    __internals::proto::{GuardEnd, HoldLimits},
    LockError, Owner,
    deadpool_redis::redis::Value,
    store::StoreErrorKind,
};
use tower_lock_simulator::{
    manual_scheduler::{A, B, C, ManualScheduler},
    mutants::Mutant,
};
use tower_lock_testkit::wait::ms;

/// The scenario passes, and fails with each of these mutants.
fn holds(scenario: fn(&mut ManualScheduler) -> bool, mutants: &[&str]) {
    let mut scheduler = ManualScheduler::new(None, true);
    assert!(scenario(&mut scheduler), "the scenario fails without a mutant: {:?}", scheduler.violations);
    for name in mutants {
        let mutant = Mutant::named(name).expect("a mutant");
        assert!(!scenario(&mut ManualScheduler::new(Some(mutant), true)), "{name} is not detected");
    }
}

/// A acquires the key.
fn a_holds(scheduler: &mut ManualScheduler) {
    scheduler.request(A, 1, true);
    scheduler.run_all(&[A]);
    assert!(scheduler.is_holding(1));
}

fn waits(scheduler: &mut ManualScheduler, process: usize, client: u32) {
    scheduler.request(process, client, true);
    let acquire = scheduler.last(process, "acquire");
    scheduler.run_and_reply(acquire);
}

/// An offer has expired and another client holds the key when its message arrives.
#[test]
fn stale_offer_starts_no_section() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            waits(scheduler, B, 2);
            scheduler.end(1, GuardEnd::Released);
            let release = scheduler.last(A, "release");
            scheduler.run_and_reply(release);
            scheduler.advance(4_010, &[]);
            waits(scheduler, C, 3);
            let is_holding = scheduler.is_holding(3);
            scheduler.gap(B);
            scheduler.deliver_message(0);
            scheduler.run_all(&[B]);
            is_holding && !scheduler.is_holding(2) && scheduler.violations.is_empty()
        },
        &[],
    );
}

/// The connection breaks with the request in the buffer of the server, and the waiter has
/// cancelled.
#[test]
fn expired_acquire_does_nothing_after_its_connection() {
    holds(
        |scheduler| {
            scheduler.request(A, 1, true);
            let late = scheduler.last(A, "acquire");
            scheduler.cut(late);
            scheduler.leave(1);
            scheduler.advance(3_000, &[A]);
            scheduler.run(late);
            scheduler.advance(1_000, &[A]);
            scheduler.is_clean(&[A])
        },
        &["no_call_expiry"],
    );
}

/// The acquire runs in time, but after its release.
#[test]
fn unanswered_call_is_released_again_when_expired() {
    holds(
        |scheduler| {
            scheduler.request(A, 1, true);
            let late = scheduler.last(A, "acquire");
            scheduler.cut(late);
            scheduler.leave(1);
            scheduler.run_all(&[A]);
            scheduler.advance(50, &[A]);
            scheduler.run(late);
            let was_taken = scheduler.holder().is_some();
            scheduler.advance(3_000, &[A]);
            was_taken && scheduler.is_clean(&[A])
        },
        &["release_once", "no_release_in_doubt"],
    );
}

/// Found by a seed: the reply to a release arrives after the acquire has expired, but the release
/// ran before it.
#[test]
fn early_release_is_not_final_however_late_its_reply() {
    holds(
        |scheduler| {
            scheduler.request(A, 1, true);
            let late = scheduler.last(A, "acquire");
            scheduler.cut(late);
            scheduler.advance(30, &[]);
            let again = scheduler.last(A, "acquire");
            scheduler.run_and_reply(again);
            scheduler.end(1, GuardEnd::Released);
            let release = scheduler.last(A, "release");
            scheduler.advance(200, &[]);
            scheduler.run(release);
            scheduler.advance(200, &[]);
            scheduler.run(late);
            let was_taken = scheduler.holder().is_some();
            scheduler.advance(100, &[]);
            scheduler.deliver_reply(release);
            scheduler.advance(3_000, &[A]);
            was_taken && scheduler.is_clean(&[A])
        },
        &["release_once"],
    );
}

/// The same with an attempt that is rejected at once.
#[test]
fn busy_reply_before_a_late_acquire_is_not_final() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.request(B, 2, false);
            let late = scheduler.last(B, "acquire");
            scheduler.cut(late);
            scheduler.advance(30, &[]);
            let again = scheduler.last(B, "acquire");
            scheduler.run(again);
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A]);
            scheduler.advance(300, &[]);
            scheduler.run(late);
            let was_taken = scheduler.holder().is_some();
            scheduler.advance(170, &[]);
            scheduler.deliver_reply(again);
            scheduler.advance(3_000, &[B]);
            was_taken && scheduler.is_clean(&[A, B])
        },
        &[],
    );
}

/// A waiter cancels while its acquire is in flight, and the acquire runs later.
#[test]
fn in_flight_acquire_is_awaited_before_its_release() {
    holds(
        |scheduler| {
            scheduler.request(B, 2, true);
            let slow = scheduler.last(B, "acquire");
            scheduler.leave(2);
            scheduler.run_all_but(B, slow);
            scheduler.advance(100, &[]);
            scheduler.run_and_reply(slow);
            scheduler.advance(3_000, &[B]);
            scheduler.is_clean(&[B])
        },
        &["no_wait_for_reply"],
    );
}

/// A message arrives while a poll is in flight: no section starts before the reply.
#[test]
fn offer_starts_nothing_before_the_in_flight_reply() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            waits(scheduler, B, 2);
            scheduler.gap(B);
            let slow = scheduler.last(B, "acquire");
            scheduler.end(1, GuardEnd::Released);
            let release = scheduler.last(A, "release");
            scheduler.run_and_reply(release);
            scheduler.deliver_message(0);
            let (early, acquires) = (scheduler.is_holding(2), scheduler.count(B, "acquire"));
            scheduler.run_and_reply(slow);
            let is_holding = scheduler.is_holding(2);
            scheduler.end(2, GuardEnd::Released);
            scheduler.run_all(&[A, B]);
            !early && acquires == 2 && is_holding && scheduler.is_clean(&[A, B])
        },
        &[],
    );
}

/// The offer is short, and its section relies on a whole lease.
#[test]
fn claimed_offer_has_a_full_lease() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            waits(scheduler, B, 2);
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A, B]);
            let is_holding = scheduler.is_holding(2);
            scheduler.advance(9_000, &[]);
            waits(scheduler, C, 3);
            is_holding && !scheduler.is_holding(3) && scheduler.violations.is_empty()
        },
        &["claim_keeps_offer_ttl"],
    );
}

/// A renewal in flight runs after an aborted section.
/// Guarantee: G3.
#[test]
fn late_renewal_does_not_extend_an_aborted_section() {
    holds(
        |scheduler| {
            scheduler.request_with_limits(A, 1, true, HoldLimits { lock_delay: ms(1_000), ..HoldLimits::default() });
            scheduler.run_all(&[A]);
            scheduler.advance(10_001, &[]);
            let renew = scheduler.last(A, "renew");
            scheduler.end(1, GuardEnd::Dropped);
            let release = scheduler.last(A, "release");
            scheduler.run_and_reply(release);
            scheduler.run(renew);
            scheduler.ms_left() <= 1_000 && scheduler.violations.is_empty()
        },
        &["lock_delay_keeps_holder", "renew_any_holder"],
    );
}

/// An acquire got no reply, a second one was granted, and the key is yielded before the first
/// one expires.
#[test]
fn yielded_id_is_released_once_its_calls_are_settled() {
    holds(
        |scheduler| {
            scheduler.request(A, 1, true);
            let late = scheduler.last(A, "acquire");
            let id = scheduler.args(late)[5].clone();
            scheduler.cut(late);
            scheduler.advance(30, &[]);
            let again = scheduler.last(A, "acquire");
            scheduler.run_and_reply(again);
            scheduler.request(A, 2, true);
            waits(scheduler, C, 3);
            scheduler.advance(110, &[]);
            scheduler.end(1, GuardEnd::Released);
            let yield_call = scheduler.last(A, "yield");
            scheduler.run_and_reply(yield_call);
            scheduler.run(late);
            let was_there = scheduler.queue().contains(&id);
            scheduler.advance(1_000, &[A]);
            was_there && !scheduler.queue().contains(&id) && scheduler.violations.is_empty()
        },
        &["forget_yielded_id"],
    );
}

/// The key is revoked, a late acquire enqueues again, and the section ends.
#[test]
fn release_without_a_lock_removes_the_queue_entry() {
    holds(
        |scheduler| {
            scheduler.request(B, 2, true);
            let late = scheduler.last(B, "acquire");
            scheduler.cut(late);
            scheduler.advance(30, &[]);
            let again = scheduler.last(B, "acquire");
            scheduler.run_and_reply(again);
            scheduler.force(Duration::ZERO);
            waits(scheduler, C, 3);
            scheduler.run(late);
            let was_there = !scheduler.queue().is_empty();
            scheduler.end(2, GuardEnd::Dropped);
            scheduler.advance(2_000, &[B]);
            was_there && scheduler.queue().is_empty()
        },
        &["release_keeps_entry"],
    );
}

/// An operator revokes a key that was just offered.
#[test]
fn revocation_at_the_handoff_never_overlaps_the_next_holder() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            waits(scheduler, B, 2);
            waits(scheduler, C, 3);
            scheduler.end(1, GuardEnd::Released);
            let release = scheduler.last(A, "release");
            scheduler.run_and_reply(release);
            scheduler.force(Duration::ZERO);
            scheduler.run_all(&[B]);
            let b_is_in = scheduler.is_holding(2);
            scheduler.run_all(&[C]);
            !b_is_in && scheduler.is_holding(3) && scheduler.violations.is_empty()
        },
        &[],
    );
}

#[test]
fn holder_stops_after_a_revocation_message() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.force(ms(1_000));
            scheduler.deliver_message(0);
            scheduler.advance(100, &[A]);
            !scheduler.is_holding(1)
        },
        &["ignore_revocation"],
    );
}

/// A foreign client unlocks as Redisson does, without a look at the queue.
#[test]
fn poll_finds_a_key_freed_by_a_foreign_client() {
    holds(
        |scheduler| {
            let name = scheduler.name();
            scheduler.fake.command(&["HSET", &name, "8b1b3cd2:1", "1"]);
            scheduler.fake.command(&["PEXPIRE", &name, "30000"]);
            waits(scheduler, B, 2);
            scheduler.fake.command(&["DEL", &name]);
            scheduler.advance(1_250, &[B]);
            scheduler.is_holding(2)
        },
        &["no_polls"],
    );
}

/// Both the holder and the first waiter are dead.
#[test]
fn poll_moves_the_queue_past_dead_waiters() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            waits(scheduler, B, 2);
            waits(scheduler, C, 3);
            scheduler.crash(A);
            scheduler.crash(B);
            // A whole lease of the dead holder, and nothing beyond it.
            scheduler.advance(31_500, &[C]);
            scheduler.is_holding(3)
        },
        &["offer_to_dead"],
    );
}

/// A foreign lock without a TTL.
#[test]
fn lock_without_a_ttl_is_waited_for_and_not_touched() {
    holds(
        |scheduler| {
            let name = scheduler.name();
            scheduler.fake.command(&["HSET", &name, "foreign:1", "1"]);
            waits(scheduler, B, 2);
            scheduler.advance(30_000, &[B]);
            let acquires = scheduler.count(B, "acquire");
            scheduler.leave(2);
            scheduler.run_all(&[B]);
            !scheduler.is_holding(2)
                && scheduler.ms_left() == -1
                && scheduler.queue().is_empty()
                && (25..50).contains(&acquires)
        },
        &["no_polls"],
    );
}

/// A process that crashes and restarts repeatedly.
#[test]
fn queue_of_dead_waiters_is_bounded_and_admits_live_ones() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            for dead in 0..300 {
                scheduler.foreign_client_enqueues(&format!("dead:{dead:x}:1"), 10);
            }
            let bounded = scheduler.queue().len() <= 10;
            let reply = scheduler.foreign_client_enqueues("b:0000000000000001:7", 10);
            bounded && scheduler.queue() == ["b:0000000000000001:7"] && matches!(reply, Value::Array(_))
        },
        &["full_queue_keeps_dead"],
    );
}

/// The first waiter has cancelled, and its release runs after the offer.
#[test]
fn release_after_an_offer_passes_it_on_at_once() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            waits(scheduler, B, 2);
            waits(scheduler, C, 3);
            scheduler.leave(2);
            scheduler.end(1, GuardEnd::Released);
            let (ours, theirs) = (scheduler.last(A, "release"), scheduler.last(B, "release"));
            scheduler.run_and_reply(ours);
            scheduler.run_and_reply(theirs);
            scheduler.run_all(&[C]);
            scheduler.is_holding(3)
        },
        &["release_without_offer", "release_keeps_lock"],
    );
}

/// A forgotten id gets an offer.
#[test]
fn offer_to_a_forgotten_id_is_released_at_once() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.foreign_client_enqueues("b:0000000000000001:77", 10);
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A, B]);
            scheduler.holder().is_none()
        },
        &["ignore_stale_offer"],
    );
}

/// The release of an aborted section is lost; its repetition must not free the key any sooner.
/// Guarantee: G3.
#[test]
fn repeated_release_keeps_the_lock_delay() {
    holds(
        |scheduler| {
            scheduler.request_with_limits(A, 1, true, HoldLimits { lock_delay: ms(1_000), ..HoldLimits::default() });
            scheduler.run_all(&[A]);
            waits(scheduler, C, 3);
            scheduler.end(1, GuardEnd::Dropped);
            let lost = scheduler.last(A, "release");
            scheduler.cut(lost);
            let lost = scheduler.last(A, "release");
            scheduler.cut(lost);
            scheduler.advance(50, &[A]);
            scheduler.holder().is_some_and(|holder| holder.ends_with(":end")) && scheduler.ms_left() > 900
        },
        &["no_lock_delay_on_retry", "no_lock_delay"],
    );
}

/// The name of the lock holds a value of another type.
#[test]
fn release_at_a_key_of_another_type_ends() {
    holds(
        |scheduler| {
            let name = scheduler.name();
            scheduler.fake.command(&["SET", &name, "text"]);
            scheduler.request(B, 2, true);
            scheduler.run_all(&[B]);
            scheduler.advance(3_000, &[B]);
            let is_rejected =
                matches!(&scheduler.rejected[..], [(2, LockError::Store(e))] if e.kind() == StoreErrorKind::Refused);
            is_rejected && scheduler.count(B, "release") <= 2 && scheduler.is_clean(&[B])
        },
        &["release_fails_on_type"],
    );
}

/// A waiting and a non-waiting call share an attempt. The first has a queue entry without a
/// reply, and cancels.
#[test]
fn rejected_call_without_wait_keeps_the_queue_entry() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.request(B, 2, true);
            let unanswered = scheduler.last(B, "acquire");
            scheduler.run(unanswered);
            scheduler.request(B, 3, false);
            scheduler.cut(unanswered);
            scheduler.leave(2);
            scheduler.advance(600, &[B]);
            let is_rejected = matches!(&scheduler.rejected[..], [(3, LockError::Busy { .. })]);
            is_rejected && scheduler.queue().is_empty()
        },
        &["enqueue_per_call"],
    );
}

/// The counter is lost, and the fences continue with the clock.
/// Guarantee: G11.
#[test]
fn fences_rise_after_a_lost_counter() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A]);
            scheduler.fake.command(&["DEL", "tower-lock:lock:f"]);
            scheduler.advance(1, &[]);
            waits(scheduler, B, 2);
            scheduler.is_holding(2) && scheduler.violations.is_empty()
        },
        &[],
    );
}

/// The server clock was set back; the counter remains.
/// Guarantee: G11.
#[test]
fn fences_rise_after_the_clock_was_set_back() {
    holds(
        |scheduler| {
            // Ten hours.
            let ahead = scheduler.server_us() + 36_000_000_000;
            scheduler.fake.command(&["SET", "tower-lock:lock:f", &ahead.to_string()]);
            a_holds(scheduler);
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A]);
            waits(scheduler, B, 2);
            let holder = scheduler.name();
            scheduler.fake.data().hash(&holder)[0].1 == (ahead + 2).to_string()
        },
        &["fence_from_clock"],
    );
}

/// A renewal runs at once, and its reply is late.
#[test]
fn renewal_counts_from_when_it_was_sent() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.advance(10_001, &[]);
            let renew = scheduler.last(A, "renew");
            scheduler.run(renew);
            scheduler.advance(490, &[]);
            scheduler.deliver_reply(renew);
            scheduler.advance(29_515, &[]);
            scheduler.request(C, 3, true);
            let acquire = scheduler.last(C, "acquire");
            scheduler.run_and_reply(acquire);
            scheduler.is_holding(3) && scheduler.violations.is_empty()
        },
        &["renewal_from_reply"],
    );
}

#[test]
fn grant_counts_from_when_it_was_requested() {
    holds(
        |scheduler| {
            scheduler.request(A, 1, true);
            let acquire = scheduler.last(A, "acquire");
            scheduler.run(acquire);
            scheduler.advance(490, &[]);
            scheduler.deliver_reply(acquire);
            scheduler.advance(29_515, &[]);
            scheduler.request(C, 3, true);
            let acquire = scheduler.last(C, "acquire");
            scheduler.run_and_reply(acquire);
            scheduler.is_holding(3) && scheduler.violations.is_empty()
        },
        &["deadline_from_reply"],
    );
}

/// Messages are lost while unsubscribed: waiters poll at once, and not at their next interval.
#[test]
fn waiter_polls_at_once_after_a_message_gap() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            waits(scheduler, B, 2);
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A]);
            scheduler.messages.clear();
            scheduler.gap(B);
            scheduler.run_all(&[B]);
            scheduler.is_holding(2)
        },
        &["no_poll_after_gap"],
    );
}

/// Found by a seed: a section has ended in time, and its limit passes during a yield.
#[test]
fn max_hold_during_a_yield_causes_no_busy_loop() {
    holds(
        |scheduler| {
            scheduler.request_with_limits(A, 1, true, HoldLimits { max_hold: Some(ms(200)), ..HoldLimits::default() });
            scheduler.run_all(&[A]);
            scheduler.request(A, 2, true);
            scheduler.advance(150, &[]);
            scheduler.end(1, GuardEnd::Released);
            let yield_call = scheduler.last(A, "yield");
            scheduler.advance(300, &[]);
            let still = scheduler.violations.is_empty();
            scheduler.run_and_reply(yield_call);
            still && scheduler.is_holding(2)
        },
        &[],
    );
}

/// Found by a seed: the local clock is as fast as allowed, and no reply came for a while.
#[test]
fn acquire_expires_on_the_server_with_any_local_clock_rate() {
    for rate in [0.9901, 1.0, 1.0099] {
        for silence in [0, 5_000, 9_000, 60_000] {
            let mut scheduler = ManualScheduler::with_rate(None, true, rate);
            scheduler.advance(silence, &[]);
            scheduler.request(A, 1, true);
            let acquire = scheduler.last(A, "acquire");
            let sent_at = scheduler.local();
            let until: i64 = scheduler.args(acquire)[1].parse().expect("a number");
            // Half a second of local time.
            while scheduler.local().saturating_duration_since(sent_at) < ms(500) {
                scheduler.advance(1, &[]);
            }
            assert!(
                until <= scheduler.server_us(),
                "rate {rate}, {silence} ms without a reply: expires at {until}, server time {}",
                scheduler.server_us()
            );
        }
    }
}

/// The server clock is estimated from a slow reply.
#[test]
fn acquire_expires_in_time_with_slow_replies() {
    holds(
        |scheduler| {
            scheduler.request(A, 1, true);
            scheduler.advance(400, &[]);
            scheduler.run_all(&[A]);
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A]);
            scheduler.request(A, 2, true);
            let late = scheduler.last(A, "acquire");
            scheduler.cut(late);
            scheduler.leave(2);
            scheduler.advance(600, &[A]);
            scheduler.run(late);
            scheduler.is_clean(&[A])
        },
        &["clock_from_request", "no_call_expiry"],
    );
}

#[test]
fn holder_that_continues_after_a_yield_has_a_full_lease() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.request(A, 2, true);
            scheduler.advance(15_000, &[]);
            scheduler.end(1, GuardEnd::Released);
            let yield_call = scheduler.last(A, "yield");
            scheduler.run_and_reply(yield_call);
            scheduler.is_holding(2) && scheduler.ms_left() > 29_000
        },
        &["yield_without_extension"],
    );
}

#[test]
fn yielded_holder_waits_for_the_next_grant() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.request(A, 2, true);
            waits(scheduler, B, 3);
            scheduler.advance(150, &[]);
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A]);
            let a_holds = scheduler.is_holding(2);
            scheduler.run_all(&[B]);
            !a_holds && scheduler.is_holding(3) && scheduler.violations.is_empty()
        },
        &["hold_after_yield", "no_yield"],
    );
}

/// A copy of a yield runs during the section that the first one continued, with a waiter.
#[test]
fn copy_of_a_yield_frees_nothing() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.request(A, 2, true);
            scheduler.advance(150, &[]);
            scheduler.end(1, GuardEnd::Released);
            let yield_call = scheduler.last(A, "yield");
            scheduler.run_and_reply(yield_call);
            waits(scheduler, B, 3);
            scheduler.run(yield_call);
            scheduler.run_all(&[B]);
            scheduler.is_holding(2) && !scheduler.is_holding(3) && scheduler.violations.is_empty()
        },
        &["yield_ignores_fence"],
    );
}

/// Found by a seed: a yield gets no reply, the next id enqueues, and then the yield runs.
#[test]
fn late_yield_leaves_no_second_queue_entry() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.request(A, 2, true);
            scheduler.advance(150, &[]);
            scheduler.end(1, GuardEnd::Released);
            let yield_call = scheduler.last(A, "yield");
            scheduler.cut(yield_call);
            let next = scheduler.last(A, "acquire");
            scheduler.run(next);
            let was_queued = scheduler.queue().len() == 1;
            scheduler.run(yield_call);
            scheduler.deliver_reply(next);
            scheduler.run_all(&[A]);
            let is_holding = scheduler.is_holding(2);
            scheduler.end(2, GuardEnd::Released);
            let release = scheduler.last(A, "release");
            scheduler.run(release);
            was_queued && is_holding && scheduler.is_clean(&[])
        },
        &[],
    );
}

/// The deadline has passed without a check: it is checked before any work runs.
#[test]
fn expired_lease_is_ended_in_any_order_of_checks() {
    holds(
        |scheduler| {
            a_holds(scheduler);
            scheduler.freeze(A);
            scheduler.advance(30_010, &[]);
            waits(scheduler, C, 3);
            !scheduler.is_holding(1) && scheduler.is_holding(3) && scheduler.violations.is_empty()
        },
        &[],
    );
}

/// Found by a seed: the first client cancels during the acquire, and the next one needs a longer
/// lease than requested.
#[test]
fn grant_that_yields_before_its_first_section_is_renewed() {
    holds(
        |scheduler| {
            scheduler.request(A, 1, true);
            let acquire = scheduler.last(A, "acquire");
            scheduler.request_with_limits(A, 2, true, HoldLimits { lock_delay: ms(3_000), ..HoldLimits::default() });
            scheduler.leave(1);
            scheduler.run_and_reply(acquire);
            let yields = scheduler.count(A, "yield");
            scheduler.run_all(&[A]);
            let began = scheduler.is_holding(2);
            scheduler.advance(40_000, &[A]);
            yields == 1 && began && scheduler.is_holding(2) && scheduler.count(A, "renew") >= 3
        },
        &["no_renewal"],
    );
}

// === records ===

/// The yield runs after the process has lost the key, and the next holder has left a record.
#[test]
fn next_id_of_a_yield_gets_the_record() {
    holds(
        |scheduler| {
            scheduler.claim(A, 1, true, None);
            scheduler.run_all(&[A]);
            let is_first = scheduler.is_holding(1);
            // A section with a longer lock-delay needs a yield.
            let limits = HoldLimits { lock_delay: Duration::from_secs(60), ..HoldLimits::default() };
            scheduler.claim_with_limits(A, 2, limits);
            scheduler.end(1, GuardEnd::ReleasedAfterFailure);
            let slow = scheduler.last(A, "yield");
            scheduler.force(Duration::ZERO);
            scheduler.claim(B, 3, true, None);
            scheduler.run_all(&[B]);
            let is_second = scheduler.is_holding(3);
            scheduler.complete(3, "three", None, ms(60_000));
            scheduler.run_all(&[B]);
            scheduler.run_and_reply(slow);
            scheduler.run_all(&[A]);
            is_first
                && is_second
                && !scheduler.is_holding(2)
                && scheduler.heads() == [(2, "three".to_owned())]
                && scheduler.is_clean(&[A, B])
        },
        &["yield_ignores_record"],
    );
}

/// The connection breaks after the release has run: its repetition confirms the record, and the
/// duplicates need no call of their own.
#[test]
fn repeated_release_confirms_its_record() {
    holds(
        |scheduler| {
            scheduler.claim(A, 1, true, None);
            scheduler.run_all(&[A]);
            scheduler.claim(A, 2, true, None);
            scheduler.complete(1, "one", None, ms(60_000));
            let release = scheduler.last(A, "release");
            scheduler.run(release);
            scheduler.cut(release);
            let acquires = scheduler.count(A, "acquire");
            scheduler.run_all(&[A]);
            scheduler.heads() == [(2, "one".to_owned())]
                && scheduler.count(A, "acquire") == acquires
                && scheduler.is_clean(&[A])
        },
        &["no_record_before"],
    );
}

/// The process has lost the key, and the next holder has left a record: the release of the former
/// one leaves none, and its duplicates get that of the store.
#[test]
fn release_after_a_loss_confirms_no_record_of_another_holder() {
    holds(
        |scheduler| {
            scheduler.claim(A, 1, true, None);
            scheduler.run_all(&[A]);
            scheduler.claim(A, 2, true, None);
            scheduler.force(Duration::ZERO);
            scheduler.claim(B, 3, true, None);
            scheduler.run_all(&[B]);
            scheduler.complete(3, "three", None, ms(60_000));
            scheduler.run_all(&[B]);
            scheduler.complete(1, "one", None, ms(60_000));
            scheduler.run_all(&[A]);
            scheduler.heads() == [(2, "three".to_owned())] && scheduler.is_clean(&[A, B])
        },
        &["any_record_before"],
    );
}

#[test]
fn record_without_a_body_replaces_one_with_a_body() {
    holds(
        |scheduler| {
            for (client, body) in [(1, Some("body")), (2, None)] {
                // A client that ignores records.
                scheduler.request(A, client, true);
                scheduler.run_all(&[A]);
                scheduler.complete(client, "head", body, ms(60_000));
                scheduler.run_all(&[A]);
            }
            scheduler.claim(B, 3, true, None);
            scheduler.run_all(&[B]);
            matches!(&scheduler.recorded[..], [(3, record)] if record.body.is_none()) && scheduler.is_clean(&[A, B])
        },
        &["record_keeps_body"],
    );
}

/// Each of them would run the operation again.
#[test]
fn duplicate_does_not_join_the_section_of_its_owner() {
    holds(
        |scheduler| {
            let owner = Owner::new();
            a_holds(scheduler);
            // They wait together, so that one section could start for both.
            scheduler.request_for(A, 2, &owner);
            scheduler.claim(A, 3, true, Some(&owner));
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A]);
            let is_alone = scheduler.is_holding(2) && !scheduler.is_holding(3);
            // The handler would wait for itself.
            scheduler.claim(A, 4, true, Some(&owner));
            let is_rejected = matches!(&scheduler.rejected[..], [(4, LockError::WouldDeadlock)]);
            scheduler.complete(2, "two", None, ms(60_000));
            scheduler.run_all(&[A]);
            is_alone && is_rejected && scheduler.heads() == [(3, "two".to_owned())] && scheduler.is_clean(&[A])
        },
        &["join_owner"],
    );
}

/// A plain client holds the key, and the record of an earlier duplicate stands.
#[test]
fn plain_grant_is_not_passed_to_a_duplicate() {
    holds(
        |scheduler| {
            scheduler.claim(A, 1, true, None);
            scheduler.run_all(&[A]);
            scheduler.complete(1, "one", None, ms(60_000));
            scheduler.run_all(&[A]);
            scheduler.request(A, 2, true);
            scheduler.run_all(&[A]);
            scheduler.claim(A, 3, true, None);
            scheduler.end(2, GuardEnd::Released);
            scheduler.run_all(&[A]);
            scheduler.heads() == [(3, "one".to_owned())] && scheduler.is_clean(&[A])
        },
        &["join_plain_grant"],
    );
}

/// The waiter behind a duplicate gets the key when the duplicate gets the record.
#[test]
fn offer_to_a_duplicate_is_passed_on_when_it_gets_the_record() {
    holds(
        |scheduler| {
            scheduler.claim(A, 1, true, None);
            scheduler.run_all(&[A]);
            scheduler.claim(B, 2, true, None);
            scheduler.run_all(&[B]);
            waits(scheduler, C, 3);
            scheduler.complete(1, "one", None, ms(60_000));
            scheduler.run_all(&[A, B]);
            let is_offered = scheduler.messages.iter().any(|(process, _)| *process == C);
            scheduler.run_all(&[C]);
            let is_holding = scheduler.is_holding(3);
            scheduler.end(3, GuardEnd::Released);
            scheduler.run_all(&[C]);
            is_offered && is_holding && scheduler.heads() == [(2, "one".to_owned())] && scheduler.is_clean(&[A, B, C])
        },
        &["recorded_without_offer", "recorded_keeps_offer"],
    );
}
