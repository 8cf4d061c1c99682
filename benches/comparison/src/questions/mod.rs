//! The questions, and the parts that they share.

pub mod cluster;
pub mod growth;
pub mod hot_key;
pub mod http;
pub mod layer;
pub mod memory;
pub mod mysql;
pub mod postgres;
pub mod redis_cycles;
pub mod redlock;
pub mod replicas;
pub mod several_keys;
pub mod sessions;
pub mod shares;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{Command, Stdio},
};

use tokio::runtime::{Builder, Runtime};
use tower_lock_testkit::Process;

use crate::{chart::Chart, report::Goals};

/// One run of the program.
pub struct Run {
    /// Rounds of each comparison. Ratios are made within a round.
    pub rounds: usize,
    /// The factor of all durations.
    pub scale: f64,
    /// Also the parts that take minutes.
    pub long: bool,
    pub goals: Goals,
    /// The folder of the charts, if they are wanted.
    pub charts: Option<PathBuf>,
    /// A build of this program that valgrind can run.
    pub counted: Option<PathBuf>,
    /// The class path of the Java program, if it could be built.
    pub redisson: Option<String>,
    /// The same of the one with Curator.
    pub curator: Option<String>,
}

/// The name of a column.
pub const INSTRUCTIONS: &str = "instructions";

/// Counts of a variant for one unit of work, from the program `allocations`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allocations {
    pub count: f64,
    pub bytes: f64,
}

// === impl Run ===

impl Run {
    /// The variants of each round. Each round starts with another one.
    pub fn turns<T: Copy>(&self, variants: &[T]) -> Vec<T> {
        let mut turns = Vec::new();
        for round in 0..self.rounds {
            let start = round % variants.len();
            turns.extend(variants[start..].iter().chain(&variants[..start]));
        }
        turns
    }

    /// The instructions of a unit of work, outside of the kernel: a count that no other process
    /// changes.
    pub fn instructions(&self, question: &str, variant: &str) -> Option<f64> {
        const UNITS: u64 = 10_000;
        let counted = self.counted.as_ref()?;
        let count = |units: u64| {
            let mut command = Command::new("valgrind");
            command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(counted);
            let output = command.args(["count", question, variant, &units.to_string()]).output().expect("valgrind");
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{text}");
            let collected = text.lines().find_map(|line| line.split_once("Collected : ")).expect("a count");
            collected.1.trim().parse::<f64>().expect("a number")
        };
        // The difference does not include the start of the program.
        Some((count(2 * UNITS) - count(UNITS)) / UNITS as f64)
    }

    /// Says that the Java program could not be built.
    pub fn print_skipped(&self) {
        if self.redisson.is_none() {
            println!("\nskipped Redisson: it needs a JDK and Maven, see scripts/bench.sh");
        }
    }

    pub fn write(&self, chart: &Chart) {
        if let Some(folder) = &self.charts {
            chart.write(folder);
        }
    }
}

/// This program in another role. It is killed when it is dropped.
pub fn spawn_role(role: &str, arguments: &[&str]) -> Process {
    let mut command = Process::command(std::env::current_exe().expect("a path"));
    command.arg(role).args(arguments).stdout(Stdio::piped()).stdin(Stdio::piped());
    Process::start(command).expect("a process")
}

/// Two workers: as many as the smallest machine of a service has cores.
pub fn runtime() -> Runtime {
    workers(2)
}

pub fn workers(workers: usize) -> Runtime {
    Builder::new_multi_thread().worker_threads(workers).enable_all().build().expect("a runtime")
}

pub fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Runs the program `allocations`, which replaces the allocator by one that counts.
pub fn allocations(question: &str, arguments: &[&str]) -> BTreeMap<String, Allocations> {
    let program = std::env::current_exe().expect("a path").with_file_name("allocations");
    let output = Command::new(program).arg(question).args(arguments).output().expect("a program");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).expect("text");
    let parse = |line: &str| {
        let mut fields = line.split('\t');
        let name = fields.next()?.to_owned();
        let mut number = || fields.next()?.parse().ok();
        Some((name, Allocations { count: number()?, bytes: number()? }))
    };
    lines.lines().map(|line| parse(line).expect("a name and two numbers")).collect()
}
