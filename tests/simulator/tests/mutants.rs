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
    world::{self, Options},
};

/// How many worlds it took, when this was written. Twenty times as many are tried, but for those that take thousands.
const RANDOM: &[(&str, u64)] = &[];

/// Where, and why not at random.
const DIRECTED: &[(&str, &str)] = &[
    ("no_gap_checkin", "costs a check-in, a second, and no promise"),
    ("no_purge", "no world has a thousand processes"),
    ("push_ignored", "no ghost is there to be offered anything, while the rest holds"),
    ("leave_raises", "no world writes another type in the place of a lock"),
    ("yield_clean", "a lost acquire, a second one, a whole turn and a yield, all within half a second: 2 915 worlds"),
    ("recv_time", "a slow answer, and then no renewal for a whole lease: 1 576 worlds"),
    ("renew_recv", "the same"),
];

fn is_noticed(mutant: &Mutant, worlds: u64) -> bool {
    let mut options = Options::default();
    mutant.option.map(|name| options.set(name).expect("there is one"));
    let (next, noticed) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while !noticed.load(Relaxed) {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= worlds {
                        return;
                    }
                    if world::run(seed, Some(mutant), options, false).violation.is_some() {
                        noticed.store(true, Relaxed);
                    }
                }
            });
        }
    });
    noticed.load(Relaxed)
}

#[test]
fn whatever_is_wrong_is_noticed_in_random_worlds() {
    let unnoticed = RANDOM.iter().filter(|(name, worlds)| {
        let mutant = Mutant::named(name).expect("there is one");
        !is_noticed(mutant, (20 * worlds).clamp(100, 1_000).max(*worlds))
    });
    let unnoticed: Vec<_> = unnoticed.map(|(name, _)| name).collect();
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}

#[test]
fn every_mutant_is_noticed_somewhere() {
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
