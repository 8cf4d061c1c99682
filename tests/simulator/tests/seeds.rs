//! Two thousand simulations, half of them with an option: a force release, a foreign client, a
//! clock that is set, or lost data.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
};

use tower_lock_simulator::simulation::{self, Options};

const SEEDS: u64 = 2_000;

fn option(seed: u64) -> Option<&'static str> {
    ["force", "java", "ctr", "back", "flush", "step", "copies"].get(usize::try_from(seed % 14).expect("small")).copied()
}

/// Guarantee: G1.
#[test]
fn two_thousand_simulations_keep_exclusion_and_clean_up() {
    let (next, sections) = (AtomicU64::new(0), AtomicU64::new(0));
    let failed = Mutex::new(Vec::new());
    let run = || {
        loop {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= SEEDS {
                return;
            }
            let mut options = Options::default();
            let option = option(seed);
            if let Some(name) = option {
                options.set(name).expect("a known option");
            }
            let report = simulation::run(seed, None, options, false);
            sections.fetch_add(report.sections, Relaxed);
            if let Some(violation) = report.violation {
                let option = option.map(|name| format!(" --option {name}")).unwrap_or_default();
                let again = format!("cargo run -p tower-lock-simulator -- {seed}{option} --trace");
                failed.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{violation}: {again}"));
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(run);
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(sections.load(Relaxed) > 20 * SEEDS, "too few sections: {sections:?}");
}

#[test]
fn seed_is_deterministic() {
    for seed in [1, 2, 3] {
        let (one, other) = (
            simulation::run(seed, None, Options::default(), true),
            simulation::run(seed, None, Options::default(), true),
        );
        assert!(!one.trace.is_empty() && one.trace == other.trace, "{seed}");
    }
}
