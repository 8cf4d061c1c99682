//! Programs that end when the test does, however it ends.

use std::{
    fs, io,
    io::Write,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{sleep, timeout};

/// Longer than anything takes here, on a machine that does something else as well.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A program that is killed when this is dropped, and when this process ends in whatever way.
#[derive(Debug)]
pub struct Process {
    child: Mutex<Child>,
    pid: u32,
}

/// A folder of its own, gone when dropped.
#[derive(Debug)]
pub(crate) struct TempFolder(PathBuf);

/// Says, past the harness that captures what tests print, that nothing was tested: "passed" alone would be a lie.
pub fn skipped(suite: &str, missing: &str) {
    let _ = writeln!(io::stderr(), "SKIPPED {suite}: {missing} is not there");
}

/// Where a program is: what the variable says, else in `PATH` or where servers are kept.
pub(crate) fn find(variable: Option<&str>, program: &str) -> Option<PathBuf> {
    if let Some(chosen) = variable.and_then(std::env::var_os).filter(|chosen| !chosen.is_empty()) {
        return Some(chosen.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders =
        std::env::split_paths(&path).chain(["/usr/sbin", "/usr/local/bin", "/usr/local/sbin"].map(Into::into));
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// A port that was free a moment ago. Somebody else may take it first: whoever starts a server on it is ready for that.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("bound").port()
}

pub(crate) fn local(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

// === impl Process ===

impl Process {
    /// A command that, once started by [`start`](Self::start), the kernel kills with this process. `setpriv` asks it to; where that is not
    /// to be had, dropping has to do.
    pub fn command(program: impl AsRef<Path>) -> Command {
        Self::command_as(program, &[])
    }

    /// The same, with privileges given up: `setpriv` knows the arguments. The signal is asked for after that, because it is forgotten with
    /// the user.
    pub(crate) fn command_as(program: impl AsRef<Path>, privileges: &[String]) -> Command {
        match find(None, "setpriv") {
            Some(setpriv) => {
                let mut command = Command::new(setpriv);
                command.args(privileges).args(["--pdeathsig", "KILL", "--"]).arg(program.as_ref());
                command
            }
            None => Command::new(program.as_ref()),
        }
    }

    /// Starts it.
    ///
    /// # Errors
    ///
    /// As [`Command::spawn`].
    ///
    /// # Panics
    ///
    /// Not unless a thread cannot be made.
    pub fn start(command: Command) -> io::Result<Self> {
        // For the kernel, the parent is the *thread* that forked: that of a test ends before those that share the server.
        type Job = (Command, mpsc::Sender<io::Result<Child>>);
        static STARTER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
        let starter = STARTER.get_or_init(|| {
            let (jobs, todo) = mpsc::channel::<Job>();
            let work = move || {
                for (mut command, answer) in todo {
                    let _ = answer.send(command.spawn());
                }
            };
            std::thread::Builder::new().name("starter".to_owned()).spawn(work).expect("a thread");
            jobs
        });
        let (answer, child) = mpsc::channel();
        starter.send((command, answer)).expect("the thread never ends");
        let child = child.recv().expect("it answers")?;
        Ok(Self { pid: child.id(), child: Mutex::new(child) })
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What it writes, if its command had that piped; once.
    pub fn take_stdout(&self) -> Option<std::process::ChildStdout> {
        self.child().stdout.take()
    }

    /// Stops it where it stands: sockets stay open, and nobody answers.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        // The kernel has it stopped a moment later.
        #[expect(clippy::disallowed_methods, reason = "a moment, and no runtime is needed for it")]
        for _ in 0..1_000 {
            match fs::read_to_string(format!("/proc/{}/stat", self.pid)) {
                Ok(stat) if !stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                _ => return,
            }
        }
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Asks it to end: SIGTERM.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Kills it, and waits for that: SIGKILL.
    pub fn kill(&self) {
        let mut child = self.child();
        let _ = child.kill();
        let _ = child.wait();
    }

    /// How it ended, if it has.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.child().try_wait().ok().flatten()
    }

    /// How it ended, once it has.
    ///
    /// # Panics
    ///
    /// It did not end within a minute.
    pub async fn end(&self) -> ExitStatus {
        let end = async {
            loop {
                if let Some(status) = self.ended() {
                    return status;
                }
                sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(TIMEOUT, end).await.unwrap_or_else(|_| panic!("process {} does not end", self.pid))
    }

    fn signal(&self, signal: Signal) {
        // Not one that was waited for: its number may be somebody else's by now.
        if self.ended().is_none() {
            let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).expect("a process");
            let _ = kill_process(pid, signal);
        }
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

// === impl Folder ===

impl TempFolder {
    const NAME: &str = "tower-lock-faults-";

    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let parent = std::env::temp_dir();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        if number == 0 {
            Self::sweep(&parent);
        }
        // Short: the path of a socket in it has 107 bytes at the most.
        let path = parent.join(format!("{}{}-{number}", Self::NAME, std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).expect("a temporary folder");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// What those left behind that were killed.
    fn sweep(parent: &Path) {
        let Ok(entries) = fs::read_dir(parent) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let owner = name.to_str().and_then(|name| name.strip_prefix(Self::NAME)?.split('-').next()?.parse().ok());
            if let Some(owner) = owner.and_then(Pid::from_raw)
                && rustix::process::test_kill_process(owner).is_err()
            {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
