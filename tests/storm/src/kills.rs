//! Processes of which one is killed now and then.

use tokio::process::{Child, Command};
use tower_lock_testkit::wait::{soon, until};

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

/// Starts processes of a program, and kills and replaces one after each quarter of the sections.
///
/// The arguments of a process are its name, `arguments` and a seed, and `LOCK_URL` is the URL.
///
/// # Panics
///
/// Panics if a process fails, and if fewer than three were killed.
pub async fn run_with_kills(
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
    let mut kills = 0;
    let all = async {
        while !progress().is_complete() {
            let Progress { done, wanted } = progress();
            let goes_on = async || progress().is_complete() || progress().done >= done + wanted / 4;
            until("sections go on", goes_on).await;
            if !progress().is_complete() {
                let at = usize::try_from(kills % processes).expect("a few");
                running[at].kill().await.expect("it runs");
                running[at] = start(processes + kills);
                kills += 1;
            }
        }
        for process in &mut running {
            assert!(process.wait().await.expect("an end").success());
        }
    };
    soon("the end of all sections", all).await;
    assert!(kills >= 3, "{kills}");
}
