//! Interleavings that were found by thinking, by models or by a seed: each is delivered by hand. It holds, and it is noticed if the rule that makes
//! it hold is broken.

use std::time::Duration;

use tower_lock::{
    LockError,
    deadpool_redis::redis::Value,
    store::StoreErrorKind,
    test_util::decisions::{Ending, Terms},
};
use tower_lock_simulator::{
    lab::{A, B, C, Lab},
    mutants::Mutant,
};

/// It holds; and with each of these mutants it does not.
fn holds(scenario: fn(&mut Lab) -> bool, mutants: &[&str]) {
    let mut lab = Lab::new(None, true);
    assert!(scenario(&mut lab), "it does not hold: {:?}", lab.wrong);
    for name in mutants {
        let mutant = Mutant::named(name).expect("a mutant");
        assert!(!scenario(&mut Lab::new(Some(mutant), true)), "nobody notices {name}");
    }
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A has the key.
fn a_is_in(lab: &mut Lab) {
    lab.ask(A, 1, true);
    lab.flow(&[A]);
    assert!(lab.is_in(1));
}

fn waits(lab: &mut Lab, process: usize, who: u32) {
    lab.ask(process, who, true);
    let acquire = lab.last(process, "acquire");
    lab.go(acquire);
}

/// H1: the offer is over and somebody else is in, and only then its message comes.
#[test]
fn stale_offer_starts_no_section() {
    holds(
        |lab| {
            a_is_in(lab);
            waits(lab, B, 2);
            lab.end(1, Ending::Released);
            let release = lab.last(A, "release");
            lab.go(release);
            lab.later(4_010, &[]);
            waits(lab, C, 3);
            let is_in = lab.is_in(3);
            lab.gap(B);
            lab.hear(0);
            lab.flow(&[B]);
            is_in && !lab.is_in(2) && lab.wrong.is_empty()
        },
        &[],
    );
}

/// H2: the connection breaks, its bytes are in the server's buffer, and who waited has gone.
#[test]
fn expired_acquire_does_nothing_after_its_connection() {
    holds(
        |lab| {
            lab.ask(A, 1, true);
            let late = lab.last(A, "acquire");
            lab.cut(late);
            lab.leave(1);
            lab.later(3_000, &[A]);
            lab.run(late);
            lab.later(1_000, &[A]);
            lab.is_clean(&[A])
        },
        &["no_until"],
    );
}

/// H2: it runs in time, but after it was given back.
#[test]
fn unanswered_call_is_released_again_when_expired() {
    holds(
        |lab| {
            lab.ask(A, 1, true);
            let late = lab.last(A, "acquire");
            lab.cut(late);
            lab.leave(1);
            lab.flow(&[A]);
            lab.later(50, &[A]);
            lab.run(late);
            let was_taken = lab.holder().is_some();
            lab.later(3_000, &[A]);
            was_taken && lab.is_clean(&[A])
        },
        &["leave_once", "no_giveback_unknown"],
    );
}

/// Found by a seed: the answer of a give-back comes when the acquire is void, but the give-back ran before it.
#[test]
fn early_release_is_not_final_however_late_its_reply() {
    holds(
        |lab| {
            lab.ask(A, 1, true);
            let late = lab.last(A, "acquire");
            lab.cut(late);
            lab.later(30, &[]);
            let again = lab.last(A, "acquire");
            lab.go(again);
            lab.end(1, Ending::Released);
            let release = lab.last(A, "release");
            lab.later(200, &[]);
            lab.run(release);
            lab.later(200, &[]);
            lab.run(late);
            let was_taken = lab.holder().is_some();
            lab.later(100, &[]);
            lab.answer(release);
            lab.later(3_000, &[A]);
            was_taken && lab.is_clean(&[A])
        },
        &["leave_once"],
    );
}

/// The same with an attempt that is refused at once.
#[test]
fn busy_reply_before_a_late_acquire_is_not_final() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.ask(B, 2, false);
            let late = lab.last(B, "acquire");
            lab.cut(late);
            lab.later(30, &[]);
            let again = lab.last(B, "acquire");
            lab.run(again);
            lab.end(1, Ending::Released);
            lab.flow(&[A]);
            lab.later(300, &[]);
            lab.run(late);
            let was_taken = lab.holder().is_some();
            lab.later(170, &[]);
            lab.answer(again);
            lab.later(3_000, &[B]);
            was_taken && lab.is_clean(&[A, B])
        },
        &[],
    );
}

/// H3: who waits leaves while its question is under way, and the question runs later.
#[test]
fn in_flight_acquire_is_awaited_before_its_release() {
    holds(
        |lab| {
            lab.ask(B, 2, true);
            let slow = lab.last(B, "acquire");
            lab.leave(2);
            lab.flow_but(B, slow);
            lab.later(100, &[]);
            lab.go(slow);
            lab.later(3_000, &[B]);
            lab.is_clean(&[B])
        },
        &["no_close"],
    );
}

/// H3: a message comes while a check-in is under way: nothing runs before its answer.
#[test]
fn offer_starts_nothing_before_the_in_flight_reply() {
    holds(
        |lab| {
            a_is_in(lab);
            waits(lab, B, 2);
            lab.gap(B);
            let slow = lab.last(B, "acquire");
            lab.end(1, Ending::Released);
            let release = lab.last(A, "release");
            lab.go(release);
            lab.hear(0);
            let (early, asked) = (lab.is_in(2), lab.count(B, "acquire"));
            lab.go(slow);
            let is_in = lab.is_in(2);
            lab.end(2, Ending::Released);
            lab.flow(&[A, B]);
            !early && asked == 2 && is_in && lab.is_clean(&[A, B])
        },
        &[],
    );
}

/// H4: the offer is short, and what runs under it counts on a whole lease.
#[test]
fn claimed_offer_has_a_full_lease() {
    holds(
        |lab| {
            a_is_in(lab);
            waits(lab, B, 2);
            lab.end(1, Ending::Released);
            lab.flow(&[A, B]);
            let is_in = lab.is_in(2);
            lab.later(9_000, &[]);
            waits(lab, C, 3);
            is_in && !lab.is_in(3) && lab.wrong.is_empty()
        },
        &["claim_no_lease"],
    );
}

/// H5: a renewal under way runs behind a bad end.
#[test]
fn late_renewal_does_not_extend_an_aborted_section() {
    holds(
        |lab| {
            lab.ask_on(A, 1, true, Terms { lock_delay: ms(1_000), ..Terms::default() });
            lab.flow(&[A]);
            lab.later(10_001, &[]);
            let renew = lab.last(A, "renew");
            lab.end(1, Ending::Dropped);
            let release = lab.last(A, "release");
            lab.go(release);
            lab.run(renew);
            lab.ms_left() <= 1_000 && lab.wrong.is_empty()
        },
        &["end_keeps_field", "renew_blind"],
    );
}

/// H6: an acquire got no answer, a second one was granted, and before the first is void the turn is given away.
#[test]
fn yielded_id_is_released_once_its_calls_are_settled() {
    holds(
        |lab| {
            lab.ask(A, 1, true);
            let late = lab.last(A, "acquire");
            let id = lab.args(late)[0].clone();
            lab.cut(late);
            lab.later(30, &[]);
            let again = lab.last(A, "acquire");
            lab.go(again);
            lab.ask(A, 2, true);
            waits(lab, C, 3);
            lab.later(110, &[]);
            lab.end(1, Ending::Released);
            let turn = lab.last(A, "yield");
            lab.go(turn);
            lab.run(late);
            let was_there = lab.line().contains(&id);
            lab.later(1_000, &[A]);
            was_there && !lab.line().contains(&id) && lab.wrong.is_empty()
        },
        &["yield_clean"],
    );
}

/// H7: the key was taken away, a late acquire took a place in the line again, and the section ends.
#[test]
fn release_without_a_lock_removes_the_queue_entry() {
    holds(
        |lab| {
            lab.ask(B, 2, true);
            let late = lab.last(B, "acquire");
            lab.cut(late);
            lab.later(30, &[]);
            let again = lab.last(B, "acquire");
            lab.go(again);
            lab.force(Duration::ZERO);
            waits(lab, C, 3);
            lab.run(late);
            let was_there = !lab.line().is_empty();
            lab.end(2, Ending::Dropped);
            lab.later(2_000, &[B]);
            was_there && lab.line().is_empty()
        },
        &["abandon_no_lrem"],
    );
}

/// H9: an operator takes away what was offered a moment ago.
#[test]
fn revocation_at_the_handoff_never_overlaps_the_next_holder() {
    holds(
        |lab| {
            a_is_in(lab);
            waits(lab, B, 2);
            waits(lab, C, 3);
            lab.end(1, Ending::Released);
            let release = lab.last(A, "release");
            lab.go(release);
            lab.force(Duration::ZERO);
            lab.flow(&[B]);
            let b_is_in = lab.is_in(2);
            lab.flow(&[C]);
            !b_is_in && lab.is_in(3) && lab.wrong.is_empty()
        },
        &[],
    );
}

#[test]
fn holder_stops_after_a_revocation_message() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.force(ms(1_000));
            lab.hear(0);
            lab.later(100, &[A]);
            !lab.is_in(1)
        },
        &["force_deaf"],
    );
}

/// H11: a stranger unlocks as Redisson does, and knows of no line.
#[test]
fn poll_finds_a_key_freed_by_a_foreign_client() {
    holds(
        |lab| {
            let name = lab.name();
            lab.fake.command(&["HSET", &name, "8b1b3cd2:1", "1"]);
            lab.fake.command(&["PEXPIRE", &name, "30000"]);
            waits(lab, B, 2);
            lab.fake.command(&["DEL", &name]);
            lab.later(1_250, &[B]);
            lab.is_in(2)
        },
        &["no_checkin"],
    );
}

/// H12: neither the holder nor the first of the line lives.
#[test]
fn poll_moves_the_queue_past_dead_waiters() {
    holds(
        |lab| {
            a_is_in(lab);
            waits(lab, B, 2);
            waits(lab, C, 3);
            lab.dies(A);
            lab.dies(B);
            // A whole lease of a holder that is dead, and nothing beyond it.
            lab.later(31_500, &[C]);
            lab.is_in(3)
        },
        &["no_skip_dead"],
    );
}

/// H13: a lock that somebody else left without an end.
#[test]
fn lock_without_a_ttl_is_waited_for_and_not_touched() {
    holds(
        |lab| {
            let name = lab.name();
            lab.fake.command(&["HSET", &name, "somebody:1", "1"]);
            waits(lab, B, 2);
            lab.later(30_000, &[B]);
            let asked = lab.count(B, "acquire");
            lab.leave(2);
            lab.flow(&[B]);
            !lab.is_in(2) && lab.ms_left() == -1 && lab.line().is_empty() && (25..50).contains(&asked)
        },
        &["no_checkin"],
    );
}

/// H14: a process that crashes and starts again, and again.
#[test]
fn queue_of_dead_waiters_is_bounded_and_admits_live_ones() {
    holds(
        |lab| {
            a_is_in(lab);
            for dead in 0..300 {
                lab.stranger_lines_up(&format!("dead:{dead:x}:1"), 10);
            }
            let bounded = lab.line().len() <= 10;
            let reply = lab.stranger_lines_up("b:0000000000000001:7", 10);
            bounded && lab.line() == ["b:0000000000000001:7"] && matches!(reply, Value::Array(_))
        },
        &["no_purge"],
    );
}

/// H15: the first of the line has left, and its give-back runs behind the offer.
#[test]
fn release_after_an_offer_passes_it_on_at_once() {
    holds(
        |lab| {
            a_is_in(lab);
            waits(lab, B, 2);
            waits(lab, C, 3);
            lab.leave(2);
            lab.end(1, Ending::Released);
            let (ours, theirs) = (lab.last(A, "release"), lab.last(B, "release"));
            lab.go(ours);
            lab.go(theirs);
            lab.flow(&[C]);
            lab.is_in(3)
        },
        &["leave_no_pass", "leave_no_lock"],
    );
}

/// H16: an id that nobody knows any more is offered the key.
#[test]
fn offer_to_a_forgotten_id_is_released_at_once() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.stranger_lines_up("b:0000000000000001:77", 10);
            lab.end(1, Ending::Released);
            lab.flow(&[A, B]);
            lab.holder().is_none()
        },
        &["push_ignored"],
    );
}

/// H17: the give-back of a bad end gets lost; its repeat must not free the key any sooner.
#[test]
fn repeated_release_keeps_the_lock_delay() {
    holds(
        |lab| {
            lab.ask_on(A, 1, true, Terms { lock_delay: ms(1_000), ..Terms::default() });
            lab.flow(&[A]);
            waits(lab, C, 3);
            lab.end(1, Ending::Dropped);
            let lost = lab.last(A, "release");
            lab.cut(lost);
            let lost = lab.last(A, "release");
            lab.cut(lost);
            lab.later(50, &[A]);
            lab.holder().is_some_and(|holder| holder.ends_with(":end")) && lab.ms_left() > 900
        },
        &["repeat_frees", "abandon_releases"],
    );
}

/// H19: the name of the lock is that of something else.
#[test]
fn release_at_a_key_of_another_type_ends() {
    holds(
        |lab| {
            let name = lab.name();
            lab.fake.command(&["SET", &name, "text"]);
            lab.ask(B, 2, true);
            lab.flow(&[B]);
            lab.later(3_000, &[B]);
            let refused = matches!(&lab.refused[..], [(2, LockError::Store(e))] if e.kind() == StoreErrorKind::Refused);
            refused && lab.count(B, "release") <= 2 && lab.is_clean(&[B])
        },
        &["leave_raises"],
    );
}

/// H21: who waits and who does not share an attempt. The first has a place that nobody heard of, and leaves.
#[test]
fn rejected_call_without_wait_keeps_the_queue_entry() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.ask(B, 2, true);
            let unheard = lab.last(B, "acquire");
            lab.run(unheard);
            lab.ask(B, 3, false);
            lab.cut(unheard);
            lab.leave(2);
            lab.later(600, &[B]);
            let refused = matches!(&lab.refused[..], [(3, LockError::Busy { .. })]);
            refused && lab.line().is_empty()
        },
        &["q_fresh"],
    );
}

/// H22: the counter is lost, and the fences go on by the clock.
#[test]
fn fences_rise_after_a_lost_counter() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.end(1, Ending::Released);
            lab.flow(&[A]);
            lab.fake.command(&["DEL", "tower-lock:lock:f"]);
            lab.later(1, &[]);
            waits(lab, B, 2);
            lab.is_in(2) && lab.wrong.is_empty()
        },
        &[],
    );
}

/// The server's clock was set back; the counter is what is left.
#[test]
fn fences_rise_after_the_clock_was_set_back() {
    holds(
        |lab| {
            // By ten hours.
            let ahead = lab.server_us() + 36_000_000_000;
            lab.fake.command(&["SET", "tower-lock:lock:f", &ahead.to_string()]);
            a_is_in(lab);
            lab.end(1, Ending::Released);
            lab.flow(&[A]);
            waits(lab, B, 2);
            let holder = lab.name();
            lab.fake.data().hash(&holder)[0].1 == (ahead + 2).to_string()
        },
        &["fence_clock"],
    );
}

/// H23: a renewal runs at once, and is answered late.
#[test]
fn renewal_counts_from_when_it_was_sent() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.later(10_001, &[]);
            let renew = lab.last(A, "renew");
            lab.run(renew);
            lab.later(490, &[]);
            lab.answer(renew);
            lab.later(29_515, &[]);
            lab.ask(C, 3, true);
            let acquire = lab.last(C, "acquire");
            lab.go(acquire);
            lab.is_in(3) && lab.wrong.is_empty()
        },
        &["renew_recv"],
    );
}

#[test]
fn grant_counts_from_when_it_was_requested() {
    holds(
        |lab| {
            lab.ask(A, 1, true);
            let acquire = lab.last(A, "acquire");
            lab.run(acquire);
            lab.later(490, &[]);
            lab.answer(acquire);
            lab.later(29_515, &[]);
            lab.ask(C, 3, true);
            let acquire = lab.last(C, "acquire");
            lab.go(acquire);
            lab.is_in(3) && lab.wrong.is_empty()
        },
        &["recv_time"],
    );
}

/// What was said while nobody listened is lost: whoever waits asks at once, and not at its next check-in.
#[test]
fn waiter_polls_at_once_after_a_message_gap() {
    holds(
        |lab| {
            a_is_in(lab);
            waits(lab, B, 2);
            lab.end(1, Ending::Released);
            lab.flow(&[A]);
            lab.messages.clear();
            lab.gap(B);
            lab.flow(&[B]);
            lab.is_in(2)
        },
        &["no_gap_checkin"],
    );
}

/// Found by a seed: a section has ended in time, and its limit passes while others are asked whether they want their turn.
#[test]
fn max_hold_during_a_yield_causes_no_busy_loop() {
    holds(
        |lab| {
            lab.ask_on(A, 1, true, Terms { max_hold: Some(ms(200)), ..Terms::default() });
            lab.flow(&[A]);
            lab.ask(A, 2, true);
            lab.later(150, &[]);
            lab.end(1, Ending::Released);
            let turn = lab.last(A, "yield");
            lab.later(300, &[]);
            let still = lab.wrong.is_empty();
            lab.go(turn);
            still && lab.is_in(2)
        },
        &[],
    );
}

/// Found by a seed: our clock is as fast as it may be, and nothing was heard for a while.
#[test]
fn acquire_expires_on_the_server_with_any_local_clock_rate() {
    for rate in [0.9901, 1.0, 1.0099] {
        for silence in [0, 5_000, 9_000, 60_000] {
            let mut lab = Lab::with_rate(None, true, rate);
            lab.later(silence, &[]);
            lab.ask(A, 1, true);
            let acquire = lab.last(A, "acquire");
            let asked = lab.local();
            let until: i64 = lab.args(acquire)[1].parse().expect("a number");
            // Half a second of ours.
            while lab.local().saturating_duration_since(asked) < ms(500) {
                lab.later(1, &[]);
            }
            assert!(until <= lab.server_us(), "{rate}, after {silence} ms: {until}, and it is {}", lab.server_us());
        }
    }
}

/// The server's clock is learnt from an answer that was long under way.
#[test]
fn acquire_expires_in_time_with_slow_replies() {
    holds(
        |lab| {
            lab.ask(A, 1, true);
            lab.later(400, &[]);
            lab.flow(&[A]);
            lab.end(1, Ending::Released);
            lab.flow(&[A]);
            lab.ask(A, 2, true);
            let late = lab.last(A, "acquire");
            lab.cut(late);
            lab.leave(2);
            lab.later(600, &[A]);
            lab.run(late);
            lab.is_clean(&[A])
        },
        &["until_upper", "no_until"],
    );
}

#[test]
fn holder_that_continues_after_a_yield_has_a_full_lease() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.ask(A, 2, true);
            lab.later(15_000, &[]);
            lab.end(1, Ending::Released);
            let turn = lab.last(A, "yield");
            lab.go(turn);
            lab.is_in(2) && lab.ms_left() > 29_000
        },
        &["yield_no_extend"],
    );
}

#[test]
fn yielded_holder_waits_for_its_next_turn() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.ask(A, 2, true);
            waits(lab, B, 3);
            lab.later(150, &[]);
            lab.end(1, Ending::Released);
            lab.flow(&[A]);
            let a_is_in = lab.is_in(2);
            lab.flow(&[B]);
            !a_is_in && lab.is_in(3) && lab.wrong.is_empty()
        },
        &["yield_keeps", "no_yield"],
    );
}

/// A copy of a yield comes when the section runs that the first one let go on, and somebody waits by now.
#[test]
fn copy_of_a_yield_frees_nothing() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.ask(A, 2, true);
            lab.later(150, &[]);
            lab.end(1, Ending::Released);
            let turn = lab.last(A, "yield");
            lab.go(turn);
            waits(lab, B, 3);
            lab.run(turn);
            lab.flow(&[B]);
            lab.is_in(2) && !lab.is_in(3) && lab.wrong.is_empty()
        },
        &["yield_any_fence"],
    );
}

/// Found by a seed: a yield gets no answer, the next id lines up, and then the yield runs.
#[test]
fn late_yield_leaves_no_second_queue_entry() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.ask(A, 2, true);
            lab.later(150, &[]);
            lab.end(1, Ending::Released);
            let turn = lab.last(A, "yield");
            lab.cut(turn);
            let next = lab.last(A, "acquire");
            lab.run(next);
            let was_in_line = lab.line().len() == 1;
            lab.run(turn);
            lab.answer(next);
            lab.flow(&[A]);
            let is_in = lab.is_in(2);
            lab.end(2, Ending::Released);
            let release = lab.last(A, "release");
            lab.run(release);
            was_in_line && is_in && lab.is_clean(&[])
        },
        &[],
    );
}

/// The deadline is over and nobody has looked yet: it is looked at before anything runs.
#[test]
fn expired_lease_is_ended_in_any_order_of_checks() {
    holds(
        |lab| {
            a_is_in(lab);
            lab.freeze(A);
            lab.later(30_010, &[]);
            waits(lab, C, 3);
            !lab.is_in(1) && lab.is_in(3) && lab.wrong.is_empty()
        },
        &[],
    );
}

/// Found by a seed: the first one leaves while it is asked for, and the next one wants the key to be kept for longer than the store was told.
#[test]
fn grant_that_yields_before_its_first_section_is_renewed() {
    holds(
        |lab| {
            lab.ask(A, 1, true);
            let acquire = lab.last(A, "acquire");
            lab.ask_on(A, 2, true, Terms { lock_delay: ms(3_000), ..Terms::default() });
            lab.leave(1);
            lab.go(acquire);
            let yields = lab.count(A, "yield");
            lab.flow(&[A]);
            let began = lab.is_in(2);
            lab.later(40_000, &[A]);
            yields == 1 && began && lab.is_in(2) && lab.count(A, "renew") >= 3
        },
        &["no_renew"],
    );
}
