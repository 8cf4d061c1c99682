//! Each rule of the protocol has a mutant that breaks it, and the simulator detects every mutant.
//!
//! | mutant | detected by |
//! |---|---|
//! | those in [`RANDOM`] | random simulations; some by a directed test as well |
//! | those in [`CHECKED`] | one check in random simulations: of records, or of shared calls |
//! | those in [`DIRECTED`] | tests in `directed.rs` only: rare events, or a cost in time |

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use tower_lock_simulator::{
    mutants::{MUTANTS, Mutant},
    simulation::{self, Options},
};

/// The number of simulations until the detection, from the first seed on. The test runs three times
/// as many, and 300 more.
const RANDOM: &[(&str, u64)] = &[
    ("deadline_from_reply", 279),
    ("uncorrelated_replies", 2),
    ("same_id", 1),
    ("no_call_expiry", 3),
    ("clock_from_request", 44),
    ("release_once", 811),
    ("no_release_in_doubt", 2),
    ("no_release_retry", 2),
    ("no_wait_for_reply", 12),
    ("no_deadline_check", 853),
    ("no_yield", 1),
    ("hold_after_yield", 1),
    ("no_polls", 1),
    ("no_renewal", 51),
    ("no_lock_delay", 2),
    ("no_lock_delay_on_retry", 455),
    ("ignore_revocation", 2),
    ("enqueue_per_call", 68),
    ("ignore_queue", 2),
    ("fence_from_clock", 2),
    ("release_any_holder", 3),
    ("renew_any_holder", 57),
    ("release_keeps_lock", 2),
    ("release_without_offer", 1),
    ("release_keeps_entry", 3),
    ("lock_delay_keeps_holder", 2),
    ("offer_to_dead", 1),
    ("duplicate_entries", 2),
    ("offer_without_ttl", 3),
    ("short_entry_ttl", 9),
    ("yield_keeps_holder", 1),
    ("yield_without_extension", 238),
    ("no_repeated_acquire", 6),
    ("claim_keeps_offer_ttl", 1),
    ("yield_ignores_fence", 303),
];

/// The number of simulations until the detection, as above, and the check that detects the mutant.
const CHECKED: &[(&str, u64, &str)] = &[
    ("record_for_plain", 1, "and asked for none"),
    ("join_plain_grant", 1, "begins a duplicate of the record"),
    ("record_before_reply", 1, "and the store has replied with None"),
    ("record_despite_loss", 3, "and the store has replied with"),
    ("no_record_on_retry", 485, "and the store has replied with None"),
    ("free_key_ignores_record", 1, "begins a duplicate of the record"),
    ("busy_key_ignores_record", 1, "begins a duplicate of the record"),
    ("record_of_any", 3, "leaves the record"),
    ("record_of_former_holder", 3, "leaves the record"),
    ("record_without_ttl", 1, "leaves a record without an end"),
    ("recorded_keeps_entry", 13, "gets a record, and is still there"),
    ("recorded_keeps_offer", 1, "gets a record, and is still there"),
    ("recorded_without_offer", 1, "gets a record, and frees the key though a waiter exists"),
    ("replies_out_of_order", 1, "two are in"),
    ("lost_reply_of_first_only", 528, "is forgotten, and still there"),
    ("fast_path_of_first_key", 1, "leaves too many holders"),
    ("queue_of_first_key", 1, "gets Ok(Queued"),
    ("release_of_first_key", 2, "is released, and is still there"),
    ("lease_of_first_key", 1, "without an end"),
    ("type_of_one_key_fails_all", 2, "acquire is an error: -WRONGTYPE"),
    ("block_of_first_key", 1, "too early"),
    ("free_despite_queue", 37, "a free key lets"),
    ("free_despite_block", 6, "too early"),
    ("free_despite_doubt", 992, "is forgotten, and still there"),
    ("waits_for_smaller", 1, "while it holds the greater"),
    ("keeps_greater", 1, "while it holds the greater"),
    ("forgets_one_at_a_loss", 2, "is idle for"),
    ("share_for_alone", 1, "is granted to a client that needs Alone"),
    ("share_drops_waiter_that_does_not_fit", 1, "past"),
    ("share_passes_queue", 1, "past"),
    ("share_shortens_others", 14, "two are in"),
    ("ended_shares_count", 51, "past"),
    ("share_without_block", 1, "too early"),
    ("renewal_of_the_shared_key_alone", 1, "two are in"),
    ("renewal_of_the_share_alone", 1, "two are in"),
    ("share_beside_whole", 1, "two are in"),
    ("limit_not_read", 1, "leaves too many holders"),
    ("offered_share_not_counted", 3, "leaves too many holders"),
    ("inbox_without_limit", 1, "past"),
    ("ticket_stays_after_redeem", 1, "leaves too many holders"),
    ("ticket_without_lease", 1, "ms of its gap"),
    ("redeem_under_the_same_fence", 1, "the fence"),
    ("redeem_of_a_free_key", 1, "which has no key"),
    ("dropped_is_kept", 1, "whose work has ended"),
    ("no_heir_on_retry", 7, "leaves its key to no ticket"),
    ("no_return_to_ticket", 2, "forgotten"),
    ("newer_before_the_end", 2, "two are in"),
    ("replaced_waiter_is_granted", 1, "gets Ok(Granted"),
    ("fresh_id_is_superseded", 1, "gets Ok(Superseded"),
    ("delay_after_replaced", 21, "was replaced, and blocks its key"),
];

/// Why random simulations do not detect them.
const DIRECTED: &[(&str, &str)] = &[
    ("no_poll_after_gap", "costs a poll interval and breaks no guarantee"),
    ("full_queue_keeps_dead", "no simulation has a thousand processes"),
    ("ignore_stale_offer", "no forgotten id gets an offer while the rest works"),
    ("release_fails_on_type", "no simulation writes another type to the key of a lock"),
    ("renewal_from_reply", "one in two thousand seeds: a slow renewal, and then none for a whole lease"),
    (
        "forget_yielded_id",
        "one in three thousand seeds: a lost acquire, another one, a whole section and a yield, all within half a second",
    ),
    ("yield_ignores_record", "no yield runs after the loss of its key and before the next record"),
    ("any_record_before", "one in three thousand seeds: a release after the loss of its key and the record of another"),
    ("no_record_before", "costs an acquire and breaks no guarantee"),
    ("record_keeps_body", "no duplicate replaces a record"),
    ("join_owner", "no simulation has owners"),
];

/// Whether a violation that contains this text is found.
fn is_detected(mutant: &Mutant, seeds: u64, check: &str) -> bool {
    let mut options = Options::default();
    if let Some(name) = mutant.option {
        options.set(name).expect("a known name");
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
                    let violation = simulation::run(seed, Some(mutant), options, false).violation;
                    if violation.is_some_and(|violation| violation.contains(check)) {
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
    let all = RANDOM.iter().map(|&(name, seeds)| (name, seeds, "")).chain(CHECKED.iter().copied());
    let undetected = all.filter(|&(name, seeds, check)| {
        let mutant = Mutant::named(name).expect("a known name");
        !is_detected(mutant, 3 * seeds + 300, check)
    });
    let undetected: Vec<_> = undetected.map(|(name, ..)| name).collect();
    assert!(undetected.is_empty(), "{undetected:?}");
}

/// A patch that matches nothing leaves the script intact.
#[test]
fn each_patch_of_a_script_changes_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src/store/redis/wire/lua");
    let script = |name: &str| fs::read_to_string(folder.join(format!("{name}.lua"))).expect("a script");
    let names = [
        "acquire",
        "acquire_share",
        "yield",
        "release",
        "release_share",
        "keep",
        "redeem",
        "renew",
        "force",
        "queue",
        "newest",
        "record",
        "fence",
        "each",
    ];
    let all: Vec<_> = names.into_iter().map(script).collect();
    let stale = |mutant: &&Mutant| mutant.patched().any(|text| !all.iter().any(|script| script.contains(text)));
    let stale: Vec<_> = MUTANTS.iter().filter(stale).map(|mutant| mutant.name).collect();
    assert!(stale.is_empty(), "{stale:?}");
}

#[test]
fn every_mutant_is_detected() {
    let known = |mutant: &&Mutant| {
        let random = RANDOM.iter().any(|(name, _)| *name == mutant.name)
            || CHECKED.iter().any(|(name, ..)| *name == mutant.name);
        random != DIRECTED.iter().any(|(name, _)| *name == mutant.name)
    };
    let unknown: Vec<_> = MUTANTS.iter().filter(|mutant| !known(mutant)).map(|mutant| mutant.name).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    let directed = include_str!("directed.rs");
    for (name, _) in DIRECTED {
        assert!(directed.contains(&format!("\"{name}\"")), "no directed test has {name}");
    }
}
