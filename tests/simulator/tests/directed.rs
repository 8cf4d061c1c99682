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
    let mut scheduler = ManualScheduler::new(None, 1.0);
    assert!(scenario(&mut scheduler), "the scenario fails without a mutant: {:?}", scheduler.violations);
    for name in mutants {
        let mutant = Mutant::named(name).expect("a mutant");
        assert!(!scenario(&mut ManualScheduler::new(Some(mutant), 1.0)), "{name} is not detected");
    }
}

/// A acquires the key.
fn a_holds(scheduler: &mut ManualScheduler) {
    scheduler.request(A, 1);
    scheduler.run_all(&[A]);
    assert!(scheduler.is_holding(1));
}

fn waits(scheduler: &mut ManualScheduler, process: usize, client: u32) {
    scheduler.request(process, client);
    let acquire = scheduler.last(process, "acquire");
    scheduler.run_and_reply(acquire);
}

/// An acquire got no reply, a second one was granted, and the key is yielded before the first
/// one expires.
#[test]
fn yielded_id_is_released_once_its_calls_are_settled() {
    holds(
        |scheduler| {
            scheduler.request(A, 1);
            let late = scheduler.last(A, "acquire");
            let id = scheduler.args(late)[5].clone();
            scheduler.cut(late);
            scheduler.advance(30, &[]);
            let again = scheduler.last(A, "acquire");
            scheduler.run_and_reply(again);
            scheduler.request(A, 2);
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

/// The name of the lock holds a value of another type.
#[test]
fn release_at_a_key_of_another_type_ends() {
    holds(
        |scheduler| {
            let name = scheduler.name();
            scheduler.fake.command(&["SET", &name, "text"]);
            scheduler.request(B, 2);
            scheduler.run_all(&[B]);
            scheduler.advance(3_000, &[B]);
            let is_rejected =
                matches!(&scheduler.rejected[..], [(2, LockError::Store(e))] if e.kind() == StoreErrorKind::Refused);
            is_rejected && scheduler.count(B, "release") <= 2 && scheduler.is_clean(&[B])
        },
        &["release_fails_on_type"],
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
            scheduler.request(C, 3);
            let acquire = scheduler.last(C, "acquire");
            scheduler.run_and_reply(acquire);
            scheduler.is_holding(3) && scheduler.violations.is_empty()
        },
        &["renewal_from_reply"],
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

/// Found by a seed: the local clock is as fast as allowed, and no reply came for a while.
#[test]
fn acquire_expires_on_the_server_with_any_local_clock_rate() {
    for rate in [0.9901, 1.0, 1.0099] {
        for silence in [0, 5_000, 9_000, 60_000] {
            let mut scheduler = ManualScheduler::new(None, rate);
            scheduler.advance(silence, &[]);
            scheduler.request(A, 1);
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
            scheduler.request(A, 1);
            scheduler.advance(400, &[]);
            scheduler.run_all(&[A]);
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A]);
            scheduler.request(A, 2);
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

// === records ===

/// The yield runs after the process has lost the key, and the next holder has left a record.
#[test]
fn next_id_of_a_yield_gets_the_record() {
    holds(
        |scheduler| {
            scheduler.claim(A, 1, None);
            scheduler.run_all(&[A]);
            let is_first = scheduler.is_holding(1);
            // A section with a longer lock-delay needs a yield.
            let limits = HoldLimits { lock_delay: Duration::from_secs(60), ..HoldLimits::default() };
            scheduler.claim_with_limits(A, 2, limits);
            scheduler.end(1, GuardEnd::ReleasedAfterFailure);
            let slow = scheduler.last(A, "yield");
            scheduler.force(Duration::ZERO);
            scheduler.claim(B, 3, None);
            scheduler.run_all(&[B]);
            let is_second = scheduler.is_holding(3);
            scheduler.complete(3, "three", None);
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
            scheduler.claim(A, 1, None);
            scheduler.run_all(&[A]);
            scheduler.claim(A, 2, None);
            scheduler.complete(1, "one", None);
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
            scheduler.claim(A, 1, None);
            scheduler.run_all(&[A]);
            scheduler.claim(A, 2, None);
            scheduler.force(Duration::ZERO);
            scheduler.claim(B, 3, None);
            scheduler.run_all(&[B]);
            scheduler.complete(3, "three", None);
            scheduler.run_all(&[B]);
            scheduler.complete(1, "one", None);
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
                scheduler.request(A, client);
                scheduler.run_all(&[A]);
                scheduler.complete(client, "head", body);
                scheduler.run_all(&[A]);
            }
            scheduler.claim(B, 3, None);
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
            scheduler.claim(A, 3, Some(&owner));
            scheduler.end(1, GuardEnd::Released);
            scheduler.run_all(&[A]);
            let is_alone = scheduler.is_holding(2) && !scheduler.is_holding(3);
            // The handler would wait for itself.
            scheduler.claim(A, 4, Some(&owner));
            let is_rejected = matches!(&scheduler.rejected[..], [(4, LockError::WouldDeadlock)]);
            scheduler.complete(2, "two", None);
            scheduler.run_all(&[A]);
            is_alone && is_rejected && scheduler.heads() == [(3, "two".to_owned())] && scheduler.is_clean(&[A])
        },
        &["join_owner"],
    );
}
