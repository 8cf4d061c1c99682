//! Three processes, and one of them leads. It is killed, and another one takes over.
//!
//! ```sh
//! export LOCK_URL=redis://localhost      # or mysql://.., or postgres://.., with its feature
//! cargo run --features redis --example leader                    # three processes
//! cargo run --features redis --example leader -- --process ann   # one of them
//! ```
//!
//! The part above "the demo" can be copied: of the crate `support` it has only the manager of the
//! locks, which `LockManager::connect` makes.

#![allow(clippy::disallowed_methods, reason = "a program with a runtime of its own, timed by a real clock")]

use std::{
    env,
    io::{BufRead, BufReader, PipeWriter, pipe},
    process::{Child, Command, ExitCode},
    time::{Duration, Instant},
};

use tokio::join;

use support::{Failure, Table};

const NAMES: [&str; 3] = ["ann", "bob", "eve"];

/// After a crash another process leads after the lease and the lock-delay.
const LEASE: Duration = Duration::from_secs(2);

/// The default.
const LOCK_DELAY: Duration = Duration::from_secs(1);

/// The writes of each leader, in the demo.
const WRITES: u32 = 20;

/// One of the processes of the service.
#[tokio::main]
async fn process(name: &str) -> Result<(), Failure> {
    let locks = support::lock_builder().await?.lease(LEASE).build();
    let shutdown = locks.shutdown_on_signal(Duration::from_secs(5));
    // The work. Each write has the fencing token: its receiver can reject the writes of a process
    // that was paused and no longer leads.
    let work = locks.lead(("outbox", "mover"), |lock| async move {
        loop {
            println!("{name} {}", lock.fencing_token());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    join!(shutdown, work);
    Ok(())
}

// === the demo ===

/// The processes. Dropped, they are killed.
struct Processes(Vec<(&'static str, Child)>);

impl Processes {
    /// All of them write into one pipe. It keeps the order of their lines.
    fn start(output: &PipeWriter) -> Result<Self, Failure> {
        let mut all = Self(Vec::new());
        for name in NAMES {
            let mut command = Command::new(env::current_exe()?);
            all.0.push((name, command.args(["--process", name]).stdout(output.try_clone()?).spawn()?));
        }
        Ok(all)
    }

    /// Sends `SIGKILL`: the process can release nothing.
    fn kill(&mut self, killed: &str) -> Result<(), Failure> {
        for (_, child) in self.0.iter_mut().filter(|(name, _)| *name == killed) {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for name in NAMES {
            drop(self.kill(name));
        }
    }
}

/// Consecutive writes of one process under one token.
struct Term {
    leader: String,
    token: i64,
    writes: u32,
    first_write: Instant,
    last_write: Instant,
}

/// Returns whether one process wrote at a time, and the next one only after the lock-delay.
fn demo() -> Result<bool, Failure> {
    if !support::locks_are_shared() {
        return Err("LOCK_URL names no store that the processes share, such as redis://localhost".into());
    }
    println!("Three processes. The one that leads is killed after its 20th write.\n");
    let started = Instant::now();
    let (input, output) = pipe()?;
    let mut processes = Processes::start(&output)?;
    drop(output);
    let mut terms: Vec<Term> = Vec::new();
    let mut killed = started;
    for line in BufReader::new(input).lines() {
        let line = line?;
        let (leader, token) = line.split_once(' ').ok_or("a line without a token")?;
        let (token, now) = (token.parse()?, Instant::now());
        if terms.last().is_none_or(|term| (&*term.leader, term.token) != (leader, token)) {
            terms.push(Term { leader: leader.into(), token, writes: 0, first_write: now, last_write: now });
        }
        let number = terms.len();
        let term = terms.last_mut().ok_or("no term")?;
        term.writes += 1;
        term.last_write = now;
        match (number, term.writes) {
            (1, WRITES) => {
                killed = now;
                processes.kill(leader)?;
            }
            (2, WRITES) | (3.., _) => break,
            _ => {}
        }
    }
    let mut table = Table::of(["leader", "fencing token", "writes", "first write", "last write"]);
    let after = |write: Instant| format!("{:.1} s", (write - started).as_secs_f64());
    for Term { leader, token, writes, first_write, last_write } in &terms {
        table.line([leader.into(), token.to_string(), writes.to_string(), after(*first_write), after(*last_write)]);
    }
    table.print();
    let [first, second] = &terms[..] else { return Ok(false) };
    let pause = second.first_write - killed;
    println!("Another one led {:.1} s after the kill.", pause.as_secs_f64());
    Ok(first.leader != second.leader && first.token < second.token && pause > LOCK_DELAY)
}

fn main() -> ExitCode {
    support::exit(run())
}

fn run() -> Result<(), Failure> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] | ["--demo"] if demo()? => Ok(()),
        [] | ["--demo"] => Err("the table is not as expected".into()),
        ["--process", name] => process(name),
        _ => Err("usage: [--demo | --process NAME]".into()),
    }
}
