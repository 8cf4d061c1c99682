//! Fences of several independent servers rise, and their grants do not overlap. Each rule has a
//! mutant that breaks it, and the simulation detects every mutant.

use std::time::Duration;

use tower_lock_simulator::{
    fake::Patch,
    redlock::{self, Mutation, Options, Report},
};

const SEEDS: u64 = 80;
/// Longer than the clocks of the servers differ.
const SHORT: Duration = Duration::from_millis(60);
/// Longer than a lease.
const LONG: Duration = Duration::from_millis(450);
const PLAIN: Options = Options { servers: 3, restarts_after: None, mutation: None, patches: &[] };

fn run(options: Options) -> Report {
    let mut sum = Report::default();
    for seed in 0..SEEDS {
        let report = redlock::run(seed, options).unwrap_or_else(|rule| panic!("seed {seed} of {options:?}: {rule}"));
        sum.grants += report.grants;
        sum.handoffs += report.handoffs;
        sum.yields += report.yields;
        sum.lost_votes += report.lost_votes;
    }
    eprintln!("{options:?}: {sum:?}");
    assert!(sum.handoffs > 2 * SEEDS && sum.lost_votes > 10 * SEEDS && sum.yields > 2 * SEEDS, "{sum:?}");
    sum
}

/// Guarantee: G1, G11.
#[test]
fn fences_of_a_majority_rise_and_its_grants_do_not_overlap() {
    for servers in [3, 5] {
        run(Options { servers, ..PLAIN });
        run(Options { servers, restarts_after: Some(LONG), ..PLAIN });
    }
}

/// Two grants may overlap then.
/// Guarantee: G11.
#[test]
fn fences_rise_although_a_server_restarts_empty() {
    run(Options { restarts_after: Some(SHORT), ..PLAIN });
    run(Options { servers: 5, restarts_after: Some(SHORT), ..PLAIN });
}

const fn patch(script: &'static str, old: &'static str, new: &'static str) -> Patch {
    Patch { script: Some(script), old, new }
}

const COUNTER_STAYS: &[Patch] = &[patch("raise", "if highest > 0 then", "if false then")];
const RAISE_WITHOUT_GRANT: &[Patch] = &[patch("raise", "held = 0\n", "held = fence\n")];
const WITHDRAW_OF_COMPLETE: &[Patch] = &[patch("withdraw", "string.sub(fence, -1) == '?'", "true")];
const VOTE_DESPITE_HOLDER: &[Patch] = &[patch("vote", "left ~= -2", "left ~= -2 and false")];

#[test]
fn each_mutant_of_the_rules_is_detected() {
    let mutants = [
        ("no raise", Some(Mutation::NoRaise), &[] as &[_], "has the fence"),
        ("the smallest fence", Some(Mutation::SmallestFence), &[], "has the fence"),
        ("less than a majority", Some(Mutation::SmallMajority), &[], "beside"),
        ("a deadline from the reply", Some(Mutation::DeadlineFromReply), &[], "beside"),
        ("no deadline", Some(Mutation::NoDeadline), &[], "beside"),
        ("the last fence is not raised", None, COUNTER_STAYS, "has the fence"),
        ("a raise without a grant counts", None, RAISE_WITHOUT_GRANT, "beside"),
        ("a withdrawal ends a complete grant", None, WITHDRAW_OF_COMPLETE, "beside"),
        ("a vote ignores the holder", None, VOTE_DESPITE_HOLDER, "beside"),
    ];
    for (name, mutation, patches, rule) in mutants {
        let options = Options { mutation, patches, ..PLAIN };
        let detected = (0..5_000).find_map(|seed| redlock::run(seed, options).err().map(|error| (seed, error)));
        let (seed, error) = detected.unwrap_or_else(|| panic!("{name} is not detected"));
        eprintln!("{name}: detected in seed {seed}: {error}");
        assert!(error.contains(rule), "{name}: {error}");
    }
}
