//! One key that everything contends for on Redis, with an empty section: in eight processes, and
//! with 2, 32 and 128 contenders in one process.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader},
    process::{ChildStdin, Stdio},
};

use tokio::runtime::Runtime;
use tower_lock_testkit::Process;

use super::{Run, runtime, spawn_role};
use crate::{
    chart::Chart,
    contender::Work,
    measure::{RedisWork, median, nanos, quantile_us, sleep},
    redis_lock::RedisLock,
    report::{
        Table,
        Target::{AtLeast, AtMost},
    },
    servers::Servers,
};

pub const REDISSON: &str = "Redisson";
pub const RATE: &str = "sections/s";
pub const HANDOFF: &str = "handoff p50 us";
pub const SWITCHES: &str = "to another";
pub const SCRIPTS: &str = "scripts";
pub const COMMANDS: &str = "commands";
pub const REDIS_CPU: &str = "Redis CPU us";
pub const SHARE: &str = "smallest share";
const COLUMNS: [(&str, usize); 7] =
    [(RATE, 0), (HANDOFF, 0), (SWITCHES, 2), (SCRIPTS, 2), (COMMANDS, 1), (REDIS_CPU, 1), (SHARE, 2)];

/// The contenders of one measurement.
#[derive(Clone, Copy)]
pub struct Contenders {
    pub processes: usize,
    pub in_each: Work,
}

/// The sections of one measurement, in the order of their starts.
pub struct Measured {
    /// Nanoseconds, as those of the sections.
    pub from: u64,
    pub until: u64,
    pub sections: Vec<Section>,
    pub redis: RedisWork,
}

/// A section of a contender.
pub struct Section {
    pub contender: usize,
    pub called: u64,
    pub start: u64,
    pub end: u64,
    pub released: u64,
    /// Zero if the lock has none.
    pub token: u64,
    pub keys: Vec<usize>,
}

pub fn answer(run: &mut Run) {
    let runtime = runtime();
    let servers = runtime.block_on(Servers::one());
    let measure = |run: &Run, name, contenders: Contenders, table: &mut Table| {
        let classes = run.redisson.as_deref().unwrap_or_default();
        // For dozens of turns of each.
        let seconds = 2.0 + contenders.in_each.tasks as f64 / 64.0;
        let measured = measure(&runtime, &servers, (name, classes), contenders, sleep(seconds * run.scale));
        push(measured, table, name, contenders);
    };
    let mut chart = Chart::new("hot_key", "One key on Redis, empty sections per second: more is better");

    let eight = Contenders { processes: 8, in_each: Work::of(1) };
    let mut processes = Table::new("one key, 8 processes", RedisLock::OURS, &COLUMNS);
    for name in run.turns(&[RedisLock::OURS, RedisLock::RSLOCK, RedisLock::SET_NX]) {
        measure(run, name, eight, &mut processes);
    }
    processes.print();
    chart.add("8 processes (a lock without a queue stays with one of them)", &processes, RATE, 0);
    let ours = |column| processes.median(RedisLock::OURS, column);
    run.goals.check("hot_key_scripts", ours(SCRIPTS), AtMost(3.0));
    run.goals.check("hot_key_commands", ours(COMMANDS), AtMost(17.0));

    let counts = [2, 32, 128];
    let mut tables = counts.map(|count| Table::new(format!("one key, {count} contenders"), RedisLock::OURS, &COLUMNS));
    for at in run.turns(&[0, 1, 2]) {
        let contenders = Contenders { processes: 1, in_each: Work::of(counts[at]) };
        // The virtual machine takes seconds to start.
        let is_measured = run.redisson.is_some() && tables[at].of(REDISSON, RATE).len() < 3;
        for name in [RedisLock::OURS, RedisLock::SET_NX].into_iter().chain(is_measured.then_some(REDISSON)) {
            measure(run, name, contenders, &mut tables[at]);
        }
    }
    for (table, count) in tables.iter().zip(counts) {
        table.print();
        chart.add(format!("{count} contenders"), table, RATE, 0);
    }
    run.write(&chart);
    let [two, many, most] = &tables;
    let rates = |table: &Table| table.of(RedisLock::OURS, RATE).to_vec();
    let flatness: Vec<_> = rates(most).iter().zip(rates(two)).map(|(most, two)| most / two).collect();
    run.goals.check("hot_key_flatness", median(&flatness), AtLeast(0.8));
    run.goals.check("hot_key_smallest_share_128", most.median(RedisLock::OURS, SHARE), AtLeast(0.95));
    for (table, count, least) in [(many, 32, 10.0), (most, 128, 50.0)] {
        let name = format!("hot_key_{count}_vs_redisson");
        match run.redisson {
            Some(_) => run.goals.check(name, table.ratio(RATE, RedisLock::OURS, REDISSON), AtLeast(least)),
            None => run.goals.skip(name, AtLeast(least)),
        }
    }
    run.print_skipped();
}

fn push(measured: Measured, table: &mut Table, name: &'static str, contenders: Contenders) {
    measured.assert_exclusive(name);
    let Measured { sections, redis, .. } = &measured;
    let count = sections.len() as f64;
    table.push(name, RATE, measured.rate());
    measured.push_handoffs(table, name);
    table.push(name, SCRIPTS, redis.scripts / count);
    table.push(name, COMMANDS, redis.commands / count);
    table.push(name, REDIS_CPU, redis.cpu / 1e3 / count);
    table.push(name, SHARE, measured.smallest_share(contenders));
}

/// Starts the contenders, counts their sections while something else happens, and stops them.
pub fn measure(
    runtime: &Runtime,
    servers: &Servers,
    (name, classes): (&'static str, &str),
    contenders: Contenders,
    meanwhile: impl Future<Output = ()>,
) -> Measured {
    let meanwhile = async {
        let (redis, from) = (servers.work().await, nanos());
        meanwhile.await;
        (from, nanos(), servers.work().await - redis)
    };
    let ((from, until, redis), sections) = contend(runtime, &servers.url(), (name, classes), contenders, meanwhile);
    runtime.block_on(servers.flush());
    let sections = within(sections, from, until);
    Measured { from, until, sections, redis }
}

/// The sections that start between two instants, in the order of their starts.
pub fn within(mut sections: Vec<Section>, from: u64, until: u64) -> Vec<Section> {
    sections.retain(|section| (from..until).contains(&section.start));
    sections.sort_by_key(|section| section.start);
    sections
}

/// Starts the contenders for the keys of this server, and stops them after something else happened.
/// Returns all their sections.
pub fn contend<T>(
    runtime: &Runtime,
    url: &str,
    (name, classes): (&'static str, &str),
    contenders: Contenders,
    meanwhile: impl Future<Output = T>,
) -> (T, Vec<Section>) {
    let start = |_| Contending::start(name, classes, url, contenders.in_each);
    let children: Vec<_> = (0..contenders.processes).map(start).collect();
    let mut children: Vec<_> = children.into_iter().map(Contending::ready).collect();
    let result = runtime.block_on(async {
        sleep(0.3).await;
        meanwhile.await
    });
    children.iter_mut().for_each(Contending::stop);
    let mut sections = Vec::new();
    for (at, child) in children.into_iter().enumerate() {
        let own = child.sections();
        sections.extend(
            own.map(|section| Section { contender: section.contender + at * contenders.in_each.tasks, ..section }),
        );
    }
    (result, sections)
}

/// A process with contenders.
pub struct Contending {
    process: Process,
    output: BufReader<std::process::ChildStdout>,
    /// The contenders stop when it is closed.
    input: Option<ChildStdin>,
}

// === impl Contenders ===

impl Contenders {
    fn count(self) -> usize {
        self.processes * self.in_each.tasks
    }
}

// === impl Measured ===

impl Measured {
    /// Sections per second.
    pub fn rate(&self) -> f64 {
        self.sections.len() as f64 / ((self.until - self.from) as f64 / 1e9)
    }

    /// Adds the time between sections of different contenders, and the part of the sections before
    /// which it is.
    pub fn push_handoffs(&self, table: &mut Table, name: &'static str) {
        let pairs = self.sections.windows(2).filter(|pair| pair[0].contender != pair[1].contender);
        let mut handoffs: Vec<_> = pairs.map(|pair| pair[1].start - pair[0].end).collect();
        table.push(name, SWITCHES, handoffs.len() as f64 / (self.sections.len() as f64 - 1.0));
        table.push(name, HANDOFF, quantile_us(&mut handoffs, 0.5));
    }

    /// Sections of a key that start before an earlier one ends.
    pub fn overlaps(&self) -> usize {
        let mut ends = HashMap::new();
        let mut overlaps = 0;
        for section in &self.sections {
            for key in &section.keys {
                let end = ends.entry(key).or_insert(0);
                overlaps += usize::from(section.start < *end);
                *end = section.end.max(*end);
            }
        }
        overlaps
    }

    /// Writes that a target accepts after that of a later section, if each section writes at its
    /// end. The target rejects a token below the last one, and knows nothing else.
    pub fn stale_writes(&self) -> usize {
        let mut writes: Vec<_> = self.sections.iter().collect();
        writes.sort_by_key(|section| section.end);
        let (mut token, mut start, mut stale) = (0, 0, 0);
        for write in writes {
            if write.token >= token {
                stale += usize::from(write.start < start);
                (token, start) = (write.token, write.start.max(start));
            }
        }
        stale
    }

    /// # Panics
    ///
    /// Panics if two sections of a key overlap, or if tokens do not rise.
    pub fn assert_exclusive(&self, name: &str) {
        assert_eq!(self.overlaps(), 0, "{name}: two contenders at the same time");
        let with_token = self.sections.iter().filter(|section| section.token > 0);
        assert!(with_token.is_sorted_by(|one, next| one.token < next.token), "{name}: a token that is not larger");
    }

    /// In nanoseconds. A wait that has not ended counts as long as it was measured.
    pub fn longest_wait(&self, contenders: Contenders) -> u64 {
        let mut waits_from = vec![self.from; contenders.count()];
        let mut longest = 0;
        for section in &self.sections {
            longest = longest.max(section.start - section.called);
            waits_from[section.contender] = section.released;
        }
        let unended = waits_from.into_iter().map(|from| self.until.saturating_sub(from));
        unended.fold(longest, u64::max)
    }

    /// The sections of the contender with the fewest, divided by an equal share.
    pub fn smallest_share(&self, contenders: Contenders) -> f64 {
        let all = contenders.count();
        let mut shares = vec![0.0; all];
        self.sections.iter().for_each(|section| shares[section.contender] += all as f64 / self.sections.len() as f64);
        shares.into_iter().fold(f64::INFINITY, f64::min)
    }
}

// === impl Contending ===

impl Contending {
    pub fn start(name: &str, classes: &str, url: &str, work: Work) -> Self {
        let work = work.arguments();
        let process = match name {
            name if name.starts_with(REDISSON) => {
                let mut command = Process::command("java");
                command.args(["-cp", classes, "Contenders", name, url]).args(work);
                command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
                Process::start(command).expect("a process")
            }
            name => {
                let arguments: Vec<_> = [name, url].into_iter().chain(work.iter().map(String::as_str)).collect();
                spawn_role("contender", &arguments)
            }
        };
        let output = BufReader::new(process.take_stdout().expect("a pipe"));
        let input = process.take_stdin();
        Self { process, output, input }
    }

    pub fn ready(mut self) -> Self {
        // A library may print lines before it.
        let mut line = String::new();
        while line.trim() != "ready" {
            line.clear();
            assert!(self.output.read_line(&mut line).expect("a pipe") > 0, "the contenders end before they start");
        }
        self
    }

    fn stop(&mut self) {
        self.input = None;
    }

    /// Stops the contenders, and returns their sections.
    pub fn stopped(mut self) -> impl Iterator<Item = Section> {
        self.stop();
        self.sections()
    }

    fn sections(self) -> impl Iterator<Item = Section> {
        let Self { process, output, .. } = self;
        let sections: Vec<_> = output.lines().map(|line| Section::parse(&line.expect("a pipe"))).collect();
        drop(process);
        sections.into_iter()
    }
}

// === impl Section ===

impl Section {
    fn parse(line: &str) -> Self {
        let mut numbers = line.split(' ').map(|number| number.parse::<u64>().expect("a number"));
        let mut number = || numbers.next().expect("six numbers and the keys");
        Self {
            contender: number() as usize,
            called: number(),
            start: number(),
            end: number(),
            released: number(),
            token: number(),
            keys: numbers.map(|key| key as usize).collect(),
        }
    }
}
