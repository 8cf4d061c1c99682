//! Child processes that end with the test.

use std::{
    fs, io,
    io::Write,
    net::{Ipv4Addr, SocketAddr},
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
use tokio::{
    net::TcpSocket,
    time::{sleep, timeout},
};

use crate::wait::until_blocking;

/// Longer than any step takes, even on a busy machine.
pub(crate) const TIMEOUT: Duration = crate::limits::BROKEN;

/// A child process that is killed on drop and when this process ends for any reason.
#[derive(Debug)]
pub struct Process {
    child: Mutex<Child>,
    pid: u32,
}

/// A temporary folder that is removed on drop.
#[derive(Debug)]
pub struct TempFolder(PathBuf);

/// Makes a self-signed certificate of this machine, for servers and clients: `crt` and `key` in
/// this folder. Returns `false` if there is no `openssl`.
pub fn certificate(folder: &Path) -> bool {
    let script = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key -out crt -days 2 \
                  -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext basicConstraints=critical,CA:false \
                  && chmod 644 key";
    let made = Command::new("sh").args(["-c", script]).current_dir(folder).output();
    made.is_ok_and(|made| made.status.success())
}

/// Prints to stderr, past the test harness, that a suite was skipped: "passed" alone is misleading.
pub fn skipped(suite: &str, missing: &str) {
    let _ = writeln!(io::stderr(), "SKIPPED {suite}: {missing} is not there");
}

/// The path of a program: from the environment variable, from `PATH` or from a server folder.
pub(crate) fn find(variable: Option<&str>, program: &str) -> Option<PathBuf> {
    if let Some(chosen) = variable.and_then(std::env::var_os).filter(|chosen| !chosen.is_empty()) {
        return Some(chosen.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders =
        std::env::split_paths(&path).chain(["/usr/sbin", "/usr/local/bin", "/usr/local/sbin"].map(Into::into));
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// A port that no other process gets when it asks for a free one, also while its server is down.
#[derive(Debug)]
pub struct ReservedPort(TcpSocket);

impl ReservedPort {
    /// Takes a free one.
    ///
    /// # Panics
    ///
    /// Panics if the machine has no sockets.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each one is another port")]
    pub fn new() -> Self {
        let reserve = || {
            let socket = TcpSocket::new_v4().expect("a socket");
            // Below those that the kernel gives to connections: one of them would otherwise have
            // the port of a server that is down.
            socket.bind(local(fastrand::u16(10_000..32_768))).ok()?;
            // After the bind, for which a port that is only reserved would be free, too. It does
            // not listen, so that a server that sets the same option can.
            socket.set_reuseaddr(true).expect("an option");
            Some(Self(socket))
        };
        std::iter::repeat_with(reserve).flatten().next().expect("a free port")
    }

    /// Its number.
    ///
    /// # Panics
    ///
    /// Does not panic: the socket is bound.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.0.local_addr().expect("bound").port()
    }
}

/// Whether the process with this id was neither killed nor stopped.
pub(crate) fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['T', 'Z']))
}

pub(crate) fn local(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

// === impl Process ===

impl Process {
    /// A command that the kernel kills with this process, by `setpriv`. Without `setpriv` only the
    /// drop kills it.
    pub fn command(program: impl AsRef<Path>) -> Command {
        Self::command_as(program, &[])
    }

    /// The same with dropped privileges, by arguments of `setpriv`. The parent-death signal is set
    /// after that, because a change of the user clears it.
    pub(crate) fn command_as(program: impl AsRef<Path>, privileges: &[String]) -> Command {
        Self::command_ended_by("KILL", program, privileges)
    }

    /// The same with the signal that the kernel sends.
    pub(crate) fn command_ended_by(signal: &str, program: impl AsRef<Path>, privileges: &[String]) -> Command {
        match find(None, "setpriv") {
            Some(setpriv) => {
                let mut command = Command::new(setpriv);
                command.args(privileges).args(["--pdeathsig", signal, "--"]).arg(program.as_ref());
                command
            }
            None => Command::new(program.as_ref()),
        }
    }

    /// Starts the process.
    ///
    /// # Errors
    ///
    /// As [`Command::spawn`].
    ///
    /// # Panics
    ///
    /// Panics if the starter thread cannot be created.
    pub fn start(command: Command) -> io::Result<Self> {
        // The kernel takes the *thread* that forked for the parent. The thread of a test can end
        // before other users of the server do.
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
        let child = child.recv().expect("a result")?;
        Ok(Self { pid: child.id(), child: Mutex::new(child) })
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The stdout of the process, if its command piped it. Returns it once.
    pub fn take_stdout(&self) -> Option<std::process::ChildStdout> {
        self.child().stdout.take()
    }

    /// The stdin of the process, if its command piped it. Returns it once.
    pub fn take_stdin(&self) -> Option<std::process::ChildStdin> {
        self.child().stdin.take()
    }

    /// Stops the process with SIGSTOP: its sockets stay open and it does not respond.
    ///
    /// # Panics
    ///
    /// Panics if the process still runs after ten seconds.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        // The kernel stops the process asynchronously. A test of a process that still runs would
        // show nothing.
        assert!(until_blocking(|| !self.is_running()), "process {} does not stop", self.pid);
    }

    /// Whether the process was neither killed nor stopped.
    pub(crate) fn is_running(&self) -> bool {
        is_running(self.pid)
    }

    /// Continues the process.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Sends SIGKILL and waits for the end of the process.
    pub fn kill(&self) {
        let mut child = self.child();
        let _ = child.kill();
        let _ = child.wait();
    }

    /// The exit status, if the process has ended.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.child().try_wait().ok().flatten()
    }

    /// Waits for the exit status.
    ///
    /// # Panics
    ///
    /// Panics if the process does not end within a minute.
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

    pub(crate) fn signal(&self, signal: Signal) {
        // After a wait the process id may belong to another process.
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
    const NAME: &str = "tower-lock-testkit-";

    /// Makes a folder for servers of other users, too.
    pub fn create() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let parent = std::env::temp_dir();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        if number == 0 {
            Self::sweep(&parent);
        }
        // The path is short: the path of a socket inside has at most 107 bytes.
        let path = parent.join(format!("{}{}-{number}", Self::NAME, std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).expect("a temporary folder");
        Self(path)
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Removes the folders of killed processes.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reserved_port_is_taken_except_for_its_server() {
        let port = ReservedPort::new();
        let socket = |reuse: bool| {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.set_reuseaddr(reuse).expect("an option");
            socket.bind(local(port.number())).and_then(|()| socket.listen(1))
        };
        socket(false).expect_err("another one would get it");
        let server = socket(true).expect("a server");
        socket(true).expect_err("one server");
        drop(server);
        socket(true).expect("a server that restarts");
    }
}
