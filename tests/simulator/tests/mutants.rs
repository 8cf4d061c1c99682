//! Each rule is there for a reason: without it, worlds go wrong. A simulator that notices nothing proves nothing.
//!
//! | mutant | noticed by |
//! |---|---|
//! | those in [`RANDOM`] | random worlds, as many as it says, and some directly as well |
//! | those in [`DIRECTED`] | tests in `directed.rs` alone: it takes too much at once, or costs nothing but time |
//!
//! Of what the older protocol was attacked with, this one has no counterpart for `batch_*` (one key a script, and renewals look at each key by
//! itself), `leave_first` (an attempt has one call under way at a time, and while it holds none; `repeat_frees` is what is left of it), `no_unknown`
//! (here the same as `leave_once`), and for whatever ran on a message alone (`wake_recv`, `no_fence`, `own_offer_only`, `my_offer`,
//! `wait_now_not_counter`, `reply_no_counter`, `counter_only`, `f0_any`): a woken process asks first.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use tower_lock_simulator::{
    mutants::{MUTANTS, Mutant},
    simulation::{self, Options},
};

/// How many worlds it took when this was written, from the first seed on. Three times as many are tried, and a few more.
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

/// Where, and why not at random.
const DIRECTED: &[(&str, &str)] = &[
    ("no_gap_checkin", "costs a check-in, a second, and no promise"),
    ("no_purge", "no simulation has a thousand processes"),
    ("push_ignored", "no ghost is there to be offered anything, while the rest holds"),
    ("leave_raises", "no simulation writes another type in the place of a lock"),
    ("renew_recv", "one in two thousand worlds: a slow renewal, and then none for a whole lease"),
    (
        "yield_clean",
        "one in three thousand worlds: a lost acquire, another one, a whole turn and a yield, all within half a second",
    ),
];

fn is_noticed(mutant: &Mutant, worlds: u64) -> bool {
    let mut options = Options::default();
    if let Some(name) = mutant.option {
        options.set(name).expect("there is one");
    }
    let (next, noticed) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while !noticed.load(Relaxed) {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= worlds {
                        return;
                    }
                    if simulation::run(seed, Some(mutant), options, false).violation.is_some() {
                        noticed.store(true, Relaxed);
                    }
                }
            });
        }
    });
    noticed.load(Relaxed)
}

#[test]
fn random_simulations_detect_mutants() {
    let unnoticed = RANDOM.iter().filter(|(name, worlds)| {
        let mutant = Mutant::named(name).expect("there is one");
        !is_noticed(mutant, 3 * worlds + 300)
    });
    let unnoticed: Vec<_> = unnoticed.map(|(name, _)| name).collect();
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
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
        assert!(directed.contains(&format!("\"{name}\"")), "nothing shows {name}");
    }
}
