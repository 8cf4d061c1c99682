//! Runs simulations: `simulator SEED`, `simulator FROM TO`, `--mutant NAME`, `--option flush`,
//! `--trace`.

use std::{
    io::Write,
    process::ExitCode,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use tower_lock_simulator::{
    mutants::{MUTANTS, Mutant},
    simulation::{self, Options},
};

struct Args {
    seeds: Vec<u64>,
    mutant: Option<&'static Mutant>,
    options: Options,
    trace: bool,
    stop: bool,
}

fn main() -> ExitCode {
    let Some(wanted) = parse_args() else {
        let names: Vec<_> = MUTANTS.iter().map(|mutant| mutant.name).collect();
        eprintln!(
            "simulator FROM [TO] [--mutant NAME] [--option force|flush|ctr|back|step|java|copies|one-rate|records|batches|free|several|shares|tickets|supersede].. [--trace] [--stop]\n\
             mutants: {}",
            names.join(" ")
        );
        return ExitCode::FAILURE;
    };
    let (from, to) = (wanted.seeds[0], wanted.seeds.get(1).copied().unwrap_or(wanted.seeds[0] + 1));
    let (next, failed, sections, scripts) =
        (AtomicU64::new(from), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let stopped = AtomicBool::new(false);
    #[expect(clippy::disallowed_methods, reason = "simulations per second")]
    let began = std::time::Instant::now();
    let run = || {
        while !stopped.load(Relaxed) {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= to {
                return;
            }
            let report = simulation::run(seed, wanted.mutant, wanted.options, wanted.trace);
            sections.fetch_add(report.sections, Relaxed);
            scripts.fetch_add(report.scripts, Relaxed);
            let mut out = std::io::stdout().lock();
            let _ = write!(out, "{}", report.trace);
            if let Some(violation) = report.violation {
                failed.fetch_add(1, Relaxed);
                let _ = writeln!(out, "seed {seed}: {violation}");
                stopped.fetch_or(wanted.stop, Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(run);
        }
    });
    let seconds = began.elapsed().as_secs_f64();
    let simulations = next.load(Relaxed).min(to) - from;
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let speed = simulations as f64 / seconds;
    let (sections, scripts, failed) = (sections.load(Relaxed), scripts.load(Relaxed), failed.load(Relaxed));
    println!(
        "{simulations} simulations, {speed:.0} a second: {sections} sections, {scripts} scripts, {failed} violations"
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn parse_args() -> Option<Args> {
    let mut wanted = Args { seeds: Vec::new(), mutant: None, options: Options::default(), trace: false, stop: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--trace" => wanted.trace = true,
            "--stop" => wanted.stop = true,
            "--mutant" => {
                let mutant = Mutant::named(&words.next()?)?;
                wanted.mutant = Some(mutant);
                if let Some(option) = mutant.option {
                    wanted.options.set(option)?;
                }
            }
            "--option" => wanted.options.set(&words.next()?)?,
            number => wanted.seeds.push(number.parse().ok()?),
        }
    }
    (1..=2).contains(&wanted.seeds.len()).then_some(wanted)
}
