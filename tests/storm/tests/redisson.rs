//! Processes of this crate and clients of Redisson on one raw key. `scripts/redisson.sh` runs it.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::{
    env,
    io::{BufRead, BufReader},
    process::{ChildStdin, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use tokio::time::sleep;
use tower_lock_testkit::{Process, RedisServer, skipped, wait::until};

const NAME: &str = "myLock";
const PROCESSES: usize = 4;
const CLIENTS: &str = "2";
const THREADS_OF_A_CLIENT: &str = "2";
/// A process polls at most ten times a second because of messages: of much shorter sections it
/// gets a smaller share.
const SECTION_MS: &str = "10";
/// An idle machine needs a tenth of it.
const MAX_P99: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Ours,
    Java,
}

/// In microseconds of the time of day.
#[derive(Clone, Copy, Debug)]
struct Section {
    side: Side,
    start: u64,
    end: u64,
}

type Sections = Arc<Mutex<Vec<Section>>>;

/// A process whose output is its sections.
struct Contender {
    process: Process,
    input: Option<ChildStdin>,
    reader: Option<JoinHandle<bool>>,
}

impl Contender {
    fn start(mut command: Command, side: Side, sections: &Sections) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let process = Process::start(command).expect("the program");
        let (input, output) = (process.take_stdin(), process.take_stdout().expect("piped"));
        let sections = Arc::clone(sections);
        let reader = thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let mut words = line.split(' ').map(str::parse::<u64>);
                match (words.next(), words.next()) {
                    (Some(Ok(start)), Some(Ok(end))) => {
                        let section = Section { side, start, end };
                        sections.lock().unwrap_or_else(PoisonError::into_inner).push(section);
                    }
                    _ if line == "end" => return true,
                    // Redisson logs to its output.
                    _ => eprintln!("{line}"),
                }
            }
            false
        });
        Self { process, input, reader: Some(reader) }
    }

    async fn end(mut self) {
        drop(self.input.take());
        let reader = self.reader.take().expect("it runs");
        until("the contender ends", async || reader.is_finished()).await;
        assert!(reader.join().expect("no panic"), "it ended early");
        drop(self.process);
    }
}

/// The pauses between a section of one side and the next one, if that is of the other side.
fn pauses(sections: &[Section], from: Side) -> Vec<Duration> {
    let changes = sections.windows(2).filter(|pair| pair[0].side == from && pair[1].side != from);
    let mut pauses: Vec<_> = changes.map(|pair| Duration::from_micros(pair[1].start - pair[0].end)).collect();
    pauses.sort_unstable();
    pauses
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() * percent / 100).min(sorted.len() - 1)]
}

/// Guarantee: G5.
#[tokio::test]
async fn redisson_and_processes_share_a_raw_key() {
    let Some(classpath) = env::var_os("REDISSON_CLASSPATH") else {
        return skipped("redisson_and_processes_share_a_raw_key", "`REDISSON_CLASSPATH`: see scripts/redisson.sh");
    };
    let seconds = env::var("SECONDS_OF_REDISSON").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let redis = RedisServer::start().await;
    let sections = Sections::default();
    let mut java = Process::command("java");
    java.args(["-Xmx256m", "-cp"]).arg(classpath).args(["Contenders", &redis.url(), NAME, CLIENTS]);
    java.args([THREADS_OF_A_CLIENT, SECTION_MS]);
    let mut contenders = vec![Contender::start(java, Side::Java, &sections)];
    let count = |side| {
        let sections = sections.lock().unwrap_or_else(PoisonError::into_inner);
        sections.iter().filter(|section| section.side == side).count()
    };
    until("Redisson has started", async || count(Side::Java) > 0).await;
    for number in 0..PROCESSES {
        let mut ours = Process::command(env!("CARGO_BIN_EXE_contender"));
        ours.args([&redis.url(), &format!("api-{number}"), NAME, SECTION_MS]);
        contenders.push(Contender::start(ours, Side::Ours, &sections));
    }
    until("all have started", async || count(Side::Ours) > 0).await;
    // The virtual machine compiles what runs often.
    sleep(Duration::from_secs(3)).await;
    let begin = sections.lock().unwrap_or_else(PoisonError::into_inner).last().expect("running").end;
    sleep(Duration::from_secs(seconds)).await;
    let end = sections.lock().unwrap_or_else(PoisonError::into_inner).last().expect("running").end;
    for contender in contenders {
        contender.end().await;
    }
    let mut sections = std::mem::take(&mut *sections.lock().unwrap_or_else(PoisonError::into_inner));
    sections.sort_unstable_by_key(|section| section.start);
    for pair in sections.windows(2) {
        assert!(pair[0].end <= pair[1].start, "an overlap: {pair:?}");
    }
    sections.retain(|section| (begin..end).contains(&section.start));
    let ours = sections.iter().filter(|section| section.side == Side::Ours).count();
    let share = 100 * ours / sections.len();
    eprintln!("{} sections in {seconds} s, {share} % ours", sections.len());
    for (from, to) in [(Side::Ours, Side::Java), (Side::Java, Side::Ours)] {
        let pauses = pauses(&sections, from);
        let [half, p99, most] = [50, 99, 100].map(|percent| percentile(&pauses, percent));
        eprintln!("{from:?} to {to:?}: {} changes, p50 {half:?}, p99 {p99:?}, most {most:?}", pauses.len());
        assert!(p99 < MAX_P99, "{from:?} to {to:?}: {p99:?}");
    }
    assert!((25..=75).contains(&share), "{share} % ours");
    until("no data is left", async || {
        let keys = redis.command(&["KEYS", "*"]).await;
        // Redisson deletes its latch with a call of its own.
        keys.texts().iter().all(|key| key.starts_with("tower-lock:lock:f") || key.contains("unlock_latch"))
    })
    .await;
}
