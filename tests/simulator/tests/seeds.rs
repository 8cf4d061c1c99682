//! Hundreds of simulations, half of them with a rare fault: a force release, a foreign client, a
//! clock that is set, or lost data. A third of them have records, a fifth shared calls, a sixth
//! permits and readers, a seventh callers of several keys, an eighth tickets, and a ninth clients
//! that replace others. In a fourth of them the server is memory of the processes for some calls.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
};

use tower_lock_simulator::simulation::{self, Options};

const SEEDS: u64 = 700;

fn options(seed: u64) -> impl Iterator<Item = &'static str> {
    let faults = ["force", "java", "ctr", "back", "flush", "step", "copies"];
    let fault = faults.get(usize::try_from(seed % 14).expect("small")).copied();
    let more =
        [(3, "records"), (5, "batches"), (4, "free"), (7, "several"), (6, "shares"), (8, "tickets"), (9, "supersede")]
            .into_iter()
            // Foreign clients, with raw keys, have odd seeds: such a key has one holder.
            .filter(move |(nth, _)| seed.is_multiple_of(*nth));
    fault.into_iter().chain(more.map(|(_, name)| name))
}

/// Guarantee: G1, G22.
#[test]
fn simulations_keep_exclusion_and_clean_up() {
    let (next, sections, shared) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let (redeemed, replaced) = (AtomicU64::new(0), AtomicU64::new(0));
    let failed = Mutex::new(Vec::new());
    let run = || {
        loop {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= SEEDS {
                return;
            }
            let mut enabled = Options::default();
            options(seed).for_each(|name| enabled.set(name).expect("a known option"));
            let report = simulation::run(seed, None, enabled, false);
            sections.fetch_add(report.sections, Relaxed);
            shared.fetch_add(report.shared, Relaxed);
            redeemed.fetch_add(report.redeemed, Relaxed);
            replaced.fetch_add(report.replaced, Relaxed);
            if let Some(violation) = report.violation {
                let options: String = options(seed).map(|name| format!(" --option {name}")).collect();
                let again = format!("cargo run -p tower-lock-simulator -- {seed}{options} --trace");
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
    assert!(shared.load(Relaxed) > 10 * SEEDS, "too few shared calls: {shared:?}");
    assert!(redeemed.load(Relaxed) > SEEDS, "too few tickets: {redeemed:?}");
    assert!(replaced.load(Relaxed) > SEEDS / 4, "too few are replaced: {replaced:?}");
}

#[test]
fn seed_is_deterministic() {
    for seed in [1, 2, 3] {
        let options = Options { records: seed == 3, batches: seed > 1, tickets: seed == 2, ..Options::default() };
        let (one, other) = (simulation::run(seed, None, options, true), simulation::run(seed, None, options, true));
        assert!(!one.trace.is_empty() && one.trace == other.trace, "{seed}");
    }
}
