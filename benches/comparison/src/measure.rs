//! Clocks, counters of Redis, and statistics.

use std::{
    ops::{Add, Sub},
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use tower_lock_testkit::RedisServer;

/// Nanoseconds of the monotonic clock, which all processes share.
pub fn nanos() -> u64 {
    clock(ClockId::Monotonic)
}

/// The CPU time of this process, in nanoseconds.
pub fn own_cpu() -> u64 {
    clock(ClockId::ProcessCPUTime)
}

fn clock(id: ClockId) -> u64 {
    let time = clock_gettime(id);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The CPU time of a process, in nanoseconds. The kernel counts in steps of ten milliseconds.
pub fn cpu_of(pid: u32) -> u64 {
    let fields = Fields::of(pid).expect("a process");
    fields.nanos(11) + fields.nanos(12)
}

/// The CPU time of a process and of those that it has started, in nanoseconds. Those that have
/// ended count, too.
pub fn cpu_of_family(pid: u32) -> u64 {
    let parent = Fields::of(pid).expect("a process");
    let ended = parent.nanos(13) + parent.nanos(14);
    let processes = std::fs::read_dir("/proc").expect("a folder").flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let children = pids.filter_map(Fields::of).filter(|child| child.number(1) == u64::from(pid));
    cpu_of(pid) + ended + children.map(|child| child.nanos(11) + child.nanos(12)).sum::<u64>()
}

/// The state of a process, from the kernel.
struct Fields(Vec<String>);

impl Fields {
    fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name of the program, in parentheses, may have spaces.
        Some(Self(stat.rsplit(')').next()?.split_whitespace().map(str::to_owned).collect()))
    }

    fn number(&self, at: usize) -> u64 {
        self.0[at].parse().expect("a number")
    }

    /// From steps of ten milliseconds.
    fn nanos(&self, at: usize) -> u64 {
        self.number(at) * 10_000_000
    }
}

/// The counters of a Redis. The difference of two readings is the work between them.
#[derive(Clone, Copy, Debug, Default)]
pub struct RedisWork {
    /// Nanoseconds.
    pub cpu: f64,
    /// Also those that scripts call.
    pub commands: f64,
    /// Also functions of a library in Redis.
    pub scripts: f64,
    /// Received and sent.
    pub bytes: f64,
}

impl RedisWork {
    /// The counters since the start of the server. The reading itself counts as one command.
    pub async fn of(server: &RedisServer) -> Self {
        let reply = server.command(&["INFO", "everything"]).await;
        let text = reply.text().expect("a text");
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = |name: &str| field(name).and_then(|value| value.trim().parse::<f64>().ok()).unwrap_or(0.0);
        let calls = |command: &str| {
            let statistics = field(&format!("cmdstat_{command}")).and_then(|rest| rest.strip_prefix("calls="));
            statistics.and_then(|rest| rest.split(',').next()?.parse::<f64>().ok()).unwrap_or(0.0)
        };
        Self {
            cpu: cpu_of(server.pid()) as f64,
            commands: number("total_commands_processed"),
            scripts: calls("eval") + calls("evalsha") + calls("fcall"),
            bytes: number("total_net_input_bytes") + number("total_net_output_bytes"),
        }
    }
}

impl Add for RedisWork {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            cpu: self.cpu + other.cpu,
            commands: self.commands + other.commands,
            scripts: self.scripts + other.scripts,
            bytes: self.bytes + other.bytes,
        }
    }
}

impl Sub for RedisWork {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            cpu: self.cpu - before.cpu,
            commands: self.commands - before.commands,
            scripts: self.scripts - before.scripts,
            bytes: self.bytes - before.bytes,
        }
    }
}

/// A quantile of durations in nanoseconds, as microseconds.
pub fn quantile_us(durations: &mut [u64], quantile: f64) -> f64 {
    if durations.is_empty() {
        return f64::NAN;
    }
    let at = ((durations.len() - 1) as f64 * quantile).round() as usize;
    *durations.select_nth_unstable(at).1 as f64 / 1e3
}

pub fn median(values: &[f64]) -> f64 {
    let mut values: Vec<_> = values.iter().copied().filter(|value| !value.is_nan()).collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => f64::midpoint(values[count / 2 - 1], values[count / 2]),
    }
}

pub async fn sleep(seconds: f64) {
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
}
