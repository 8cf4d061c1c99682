//! Each rule of the protocol has a mutant that breaks it, and the simulator detects every mutant.
//!
//! | mutant | detected by |
//! |---|---|
//! | those in [`RANDOM`] | random simulations; some by a directed test as well |
//! | those in [`DIRECTED`] | tests in `directed.rs` only: it needs rare events, or costs only time |
//!
//! Some attacks on the older protocol have no counterpart here: `batch_*` (one key per script, and
//! renewals check each key separately), `leave_first` (an attempt has one call in flight, and none
//! while it holds; `repeat_frees` remains of it), `no_unknown` (the same as `leave_once`), and all
//! that acted on a message alone (`wake_recv`, `no_fence`, `own_offer_only`, `my_offer`,
//! `wait_now_not_counter`, `reply_no_counter`, `counter_only`, `f0_any`): a woken process sends a
//! request first.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use tower_lock_simulator::{
    mutants::{MUTANTS, Mutant},
    simulation::{self, Options},
};

/// The number of simulations until the detection, from the first seed on. The test runs three times
/// as many, and 300 more.
const RANDOM: &[(&str, u64)] = &[
    ("recv_time", 279),
    ("no_corr", 2),
    ("same_id", 1),
    ("no_until", 3),
    ("until_upper", 44),
    ("leave_once", 811),
    ("no_giveback_unknown", 2),
    ("one_try", 2),
    ("no_close", 12),
    ("no_poll_check", 853),
    ("no_yield", 1),
    ("yield_keeps", 1),
    ("no_checkin", 1),
    ("no_renew", 51),
    ("abandon_releases", 2),
    ("repeat_frees", 455),
    ("force_deaf", 2),
    ("q_fresh", 68),
    ("barge", 2),
    ("fence_clock", 2),
    ("release_any", 3),
    ("renew_blind", 57),
    ("leave_no_lock", 2),
    ("leave_no_pass", 1),
    ("abandon_no_lrem", 3),
    ("end_keeps_field", 2),
    ("no_skip_dead", 1),
    ("dup_line", 2),
    ("offer_no_ttl", 3),
    ("line_short_ttl", 9),
    ("yield_keeps_own", 1),
    ("yield_no_extend", 238),
    ("no_retake", 6),
    ("claim_no_lease", 1),
    ("yield_any_fence", 303),
];

/// Why random simulations do not detect them.
const DIRECTED: &[(&str, &str)] = &[
    ("no_gap_checkin", "costs a poll interval and breaks no guarantee"),
    ("no_purge", "no simulation has a thousand processes"),
    ("push_ignored", "no forgotten id gets an offer while the rest works"),
    ("leave_raises", "no simulation writes another type to the key of a lock"),
    ("renew_recv", "one in two thousand seeds: a slow renewal, and then none for a whole lease"),
    (
        "yield_clean",
        "one in three thousand seeds: a lost acquire, another one, a whole section and a yield, all within half a second",
    ),
];

fn is_detected(mutant: &Mutant, seeds: u64) -> bool {
    let mut options = Options::default();
    if let Some(name) = mutant.option {
        options.set(name).expect("there is one");
    }
    let (next, detected) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while !detected.load(Relaxed) {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    if simulation::run(seed, Some(mutant), options, false).violation.is_some() {
                        detected.store(true, Relaxed);
                    }
                }
            });
        }
    });
    detected.load(Relaxed)
}

#[test]
fn random_simulations_detect_mutants() {
    let undetected = RANDOM.iter().filter(|(name, seeds)| {
        let mutant = Mutant::named(name).expect("there is one");
        !is_detected(mutant, 3 * seeds + 300)
    });
    let undetected: Vec<_> = undetected.map(|(name, _)| name).collect();
    assert!(undetected.is_empty(), "{undetected:?}");
}

#[test]
fn every_mutant_is_detected() {
    let known = |mutant: &&Mutant| {
        let random = RANDOM.iter().any(|(name, _)| *name == mutant.name);
        random != DIRECTED.iter().any(|(name, _)| *name == mutant.name)
    };
    let unknown: Vec<_> = MUTANTS.iter().filter(|mutant| !known(mutant)).map(|mutant| mutant.name).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    let directed = include_str!("directed.rs");
    for (name, _) in DIRECTED {
        assert!(directed.contains(&format!("\"{name}\"")), "no directed test has {name}");
    }
}
