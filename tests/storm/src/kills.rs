//! Processes of which one is killed or stopped now and then.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    time::sleep,
};
use tower_lock_testkit::wait::{soon, until};

/// The end of a process, or an interruption of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is killed, and another one takes its place.
    Kill,
    /// It stops for this long.
    Stop(Duration),
}

/// How far a storm is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The sections so far.
    pub done: u64,
    /// The processes end after so many.
    pub wanted: u64,
}

impl Progress {
    /// Whether the processes end.
    #[must_use]
    pub fn is_complete(self) -> bool {
        self.done >= self.wanted
    }
}

/// Starts processes of a program. After each quarter of the sections, one of them has this fault.
///
/// The arguments of a process are its name, `arguments` and a seed, and `LOCK_URL` is the URL.
///
/// # Panics
///
/// Panics if a process fails, and if fewer than three were killed or none was stopped.
pub async fn run_with_faults(
    fault: Fault,
    program: &str,
    url: &str,
    arguments: &[String],
    processes: u64,
    seed: u64,
    progress: impl Fn() -> Progress,
) {
    let start = |number: u64| -> Child {
        let mut command = Command::new(program);
        command.arg(format!("process-{number}")).args(arguments).arg((seed.wrapping_add(number)).to_string());
        command.env("LOCK_URL", url).kill_on_drop(true).spawn().expect("it starts")
    };
    let mut running: Vec<_> = (0..processes).map(start).collect();
    let mut faults = 0;
    let all = async {
        while !progress().is_complete() {
            let Progress { done, wanted } = progress();
            let goes_on = async || progress().is_complete() || progress().done >= done + wanted / 4;
            until("sections go on", goes_on).await;
            if !progress().is_complete() {
                let process = &mut running[usize::try_from(faults % processes).expect("a few")];
                match fault {
                    Fault::Kill => {
                        process.kill().await.expect("it runs");
                        *process = start(processes + faults);
                    }
                    Fault::Stop(time) => {
                        let pid = process.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?)).expect("it runs");
                        kill_process(pid, Signal::STOP).expect("it runs");
                        sleep(time).await;
                        kill_process(pid, Signal::CONT).expect("it runs");
                    }
                }
                faults += 1;
            }
        }
        for process in &mut running {
            assert!(process.wait().await.expect("an end").success());
        }
    };
    soon("the end of all sections", all).await;
    // The others may do more than a quarter while one is stopped.
    assert!(faults >= if fault == Fault::Kill { 3 } else { 1 }, "{faults}");
}
