use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use rustix::process::Signal;
use tokio::{
    sync::OnceCell,
    time::{sleep, timeout},
};

use crate::{
    process::{Process, ReservedPort, TIMEOUT, TempFolder, find},
    wait::{until, until_blocking},
};

/// A `postgres` process with an empty database, on a free port, in a folder of its own.
///
/// The superuser `postgres` needs no password. The environment variable `POSTGRES=/path` selects
/// another program.
#[derive(Debug)]
pub struct PostgresServer {
    process: Mutex<Process>,
    arguments: Vec<String>,
    privileges: Vec<String>,
    port: ReservedPort,
    folder: TempFolder,
}

impl PostgresServer {
    /// Returns whether `postgres` and `initdb` exist on this machine.
    #[must_use]
    pub fn is_available() -> bool {
        Self::program("initdb").is_some()
    }

    /// Starts a server with these settings, such as `max_connections=20`, and waits until it
    /// accepts connections.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start or does not respond.
    pub async fn start(settings: &[&str]) -> Self {
        static EMPTY: OnceCell<TempFolder> = OnceCell::const_new();
        let empty = EMPTY.get_or_init(Self::initdb).await;
        let (folder, privileges) = Self::copy(empty).await;
        let arguments = settings.iter().flat_map(|setting| ["-c".to_owned(), (*setting).to_owned()]).collect();
        Self::start_in(folder, arguments, privileges).await
    }

    /// An empty database. Each server of this process gets a copy, because a new one takes a second
    /// to make.
    async fn initdb() -> TempFolder {
        let folder = TempFolder::create();
        let initdb = Self::program("initdb").expect("check `PostgresServer::is_available` first");
        let mut command = Process::command_as(initdb, &privileges_in(&folder, "postgres"));
        command.arg("-D").arg(folder.path().join("data")).args([
            "--no-sync",
            "--auth=trust",
            "--username=postgres",
            "--encoding=UTF8",
            "--locale=C",
        ]);
        Self::complete(command, "initdb", &folder).await;
        folder
    }

    /// A folder with the same data, and the privileges of a server there.
    async fn copy(folder: &TempFolder) -> (TempFolder, Vec<String>) {
        let copy = TempFolder::create();
        let privileges = privileges_in(&copy, "postgres");
        let mut command = Process::command_as("cp", &privileges);
        command.arg("-R").arg(folder.path().join("data")).arg(copy.path());
        Self::complete(command, "cp", &copy).await;
        (copy, privileges)
    }

    async fn complete(mut command: Command, name: &str, folder: &TempFolder) {
        to_log(&mut command, folder);
        let status = Process::start(command).expect("it starts").end().await;
        assert!(status.success(), "{name}: {}", log(folder));
    }

    async fn start_in(folder: TempFolder, arguments: Vec<String>, privileges: Vec<String>) -> Self {
        let command = |port| Self::command(&folder, port, &arguments, &privileges);
        let is_up = async |_| Self::is_up(&folder);
        let (process, port) = start_on_free_port("postgres", &folder, command, is_up).await;
        Self { process: Mutex::new(process), arguments, privileges, port, folder }
    }

    fn command(folder: &TempFolder, port: u16, arguments: &[String], privileges: &[String]) -> Command {
        // A server that is killed leaves its shared memory behind.
        let mut command = Process::command_ended_by("QUIT", Self::program("postgres").expect("found"), privileges);
        command
            .arg("-D")
            .arg(folder.path().join("data"))
            .arg("-k")
            .arg(folder.path())
            .args(["-p", &port.to_string(), "-c", "listen_addresses=127.0.0.1", "-c", "shared_buffers=16MB"])
            // What a process has written survives its crash without a wait for the disk, which the
            // servers of all tests would share.
            .args(["-c", "fsync=off"])
            .args(arguments);
        let _ = fs::remove_file(Self::state(folder));
        command
    }

    fn state(folder: &TempFolder) -> PathBuf {
        folder.path().join("data/postmaster.pid")
    }

    /// Whether it accepts connections: the last line of its state.
    fn is_up(folder: &TempFolder) -> bool {
        let state = fs::read_to_string(Self::state(folder)).unwrap_or_default();
        ["ready", "standby"].iter().any(|up| state.trim_end().ends_with(up))
    }

    /// The URL of the database, as the superuser.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// The URL of the database, as this user.
    #[must_use]
    pub fn url_of(&self, user: &str) -> String {
        format!("postgres://{user}@127.0.0.1:{}/postgres", self.port.number())
    }

    /// The folder of its data.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// The process that starts those of the sessions.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process().pid()
    }

    /// The folder of the server.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The port of the server.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The text that the server has logged.
    #[must_use]
    pub fn log(&self) -> String {
        log(&self.folder)
    }

    /// Stops the server without a shutdown of its data, as a crash of it does.
    pub async fn crash(&self) {
        self.process().signal(Signal::QUIT);
        until("its end", async || self.process().ended().is_some()).await;
    }

    /// Starts the server again, on the same port and with the same data.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub async fn restart(&self) {
        let command = Self::command(&self.folder, self.port(), &self.arguments, &self.privileges);
        *self.process() = start_again("postgres", &self.folder, command, async || Self::is_up(&self.folder)).await;
    }

    /// Starts the server again as a standby, which receives nothing from a primary server.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub async fn restart_as_standby(&self) {
        self.crash().await;
        fs::write(self.folder.path().join("data/standby.signal"), "").expect("a file");
        self.restart().await;
    }

    /// Restarts the server, and starts a standby, which receives each commit of it from now on. The
    /// application name of its connection is `standby`.
    ///
    /// # Panics
    ///
    /// Panics if one of them does not start.
    pub async fn start_standby(&self) -> Self {
        self.crash().await;
        let (folder, privileges) = Self::copy(&self.folder).await;
        self.restart().await;
        let data = folder.path().join("data");
        let primary = format!("host=127.0.0.1 port={} user=postgres application_name=standby", self.port.number());
        // A setting of the command line could not be changed.
        let mut settings = File::options().append(true).open(data.join("postgresql.auto.conf")).expect("a file");
        writeln!(settings, "primary_conninfo = '{primary}'").expect("written");
        fs::write(data.join("standby.signal"), "").expect("a file");
        Self::start_in(folder, self.arguments.clone(), privileges).await
    }

    /// The major version, such as 15.
    #[must_use]
    pub fn version(&self) -> u32 {
        let version = fs::read_to_string(self.folder.path().join("data/PG_VERSION")).expect("a file");
        version.trim().parse().expect("a number")
    }

    /// The query for the number of waits of all processes for the disk, or `None` if this version
    /// does not count them as they happen.
    #[must_use]
    pub fn disk_waits(&self) -> Option<&'static str> {
        match self.version() {
            ..15 => None,
            15..18 => Some("SELECT wal_sync FROM pg_stat_wal"),
            18.. => Some("SELECT sum(fsyncs)::int8 FROM pg_stat_io WHERE object = 'wal'"),
        }
    }

    fn process(&self) -> std::sync::MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program beside `postgres`, or of the newest version in the folder of the packages.
    fn program(name: &str) -> Option<PathBuf> {
        let beside = |postgres: PathBuf| {
            // A link in `/usr/local/bin` has no `initdb` beside it.
            let program = fs::canonicalize(postgres).ok()?.parent()?.join(name);
            program.is_file().then_some(program)
        };
        let packaged = || {
            let versions = fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
            let version = |path: &PathBuf| path.file_name()?.to_str()?.parse::<u32>().ok();
            let newest = versions.map(|entry| entry.path()).max_by_key(version)?;
            beside(newest.join("bin/postgres"))
        };
        find(Some("POSTGRES"), "postgres").and_then(beside).or_else(packaged)
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        let process = self.process();
        process.signal(Signal::QUIT);
        // It may be stopped.
        process.thaw();
        // If it does not end, the end of `Process` kills it.
        until_blocking(|| process.ended().is_some());
    }
}

/// The arguments of `setpriv` for the processes in a folder. The servers refuse to run as root,
/// which therefore gives the folder to another user: to this one, if there is one.
pub(crate) fn privileges_in(folder: &TempFolder, user: &str) -> Vec<String> {
    if !rustix::process::geteuid().is_root() {
        return vec![];
    }
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let of = |name: &str| {
        let mut fields = users.lines().find(|line| line.split(':').next() == Some(name))?.split(':').skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    let (uid, gid): (u32, u32) = of(user).or_else(|| of("nobody")).expect("a user to run it as");
    chown(folder.path(), Some(uid), Some(gid)).expect("root may");
    vec![format!("--reuid={uid}"), format!("--regid={gid}"), "--clear-groups".to_owned()]
}

/// Starts a server on a port that no other process has, and waits until it is up.
pub(crate) async fn start_on_free_port(
    name: &str,
    folder: &TempFolder,
    command: impl Fn(u16) -> Command,
    is_up: impl AsyncFn(u16) -> bool,
) -> (Process, ReservedPort) {
    for _ in 0..20 {
        let port = ReservedPort::new();
        let number = port.number();
        if let Some(process) = start_and_wait(name, folder, command(number), async || is_up(number).await).await {
            return (process, port);
        }
    }
    panic!("no port stays free for long enough");
}

/// Starts a server again on its port, and waits until it is up.
pub(crate) async fn start_again(
    name: &str,
    folder: &TempFolder,
    command: Command,
    is_up: impl AsyncFn() -> bool,
) -> Process {
    start_and_wait(name, folder, command, is_up).await.expect("its port is reserved")
}

/// `None`: the port is taken.
async fn start_and_wait(
    name: &str,
    folder: &TempFolder,
    mut command: Command,
    is_up: impl AsyncFn() -> bool,
) -> Option<Process> {
    to_log(&mut command, folder);
    let process = Process::start(command).expect("it starts");
    let up = async {
        while process.ended().is_none() {
            if is_up().await {
                return true;
            }
            sleep(Duration::from_millis(10)).await;
        }
        false
    };
    match timeout(TIMEOUT, up).await {
        Ok(true) => return Some(process),
        Ok(false) => assert!(log(folder).contains("in use"), "{name} does not start:\n{}", log(folder)),
        Err(_) => panic!("{name} does not respond:\n{}", log(folder)),
    }
    None
}

/// Runs a command in a folder, and appends its output to the log there.
fn to_log(command: &mut Command, folder: &TempFolder) {
    let file = || File::options().create(true).append(true).open(folder.path().join("log")).expect("a log");
    command.current_dir(folder.path()).stdin(Stdio::null()).stdout(file()).stderr(file());
}

/// The text that the processes in a folder have logged.
pub(crate) fn log(folder: &TempFolder) -> String {
    fs::read_to_string(folder.path().join("log")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::skipped;

    #[tokio::test]
    async fn postgres_starts_crashes_and_starts_again() {
        if !PostgresServer::is_available() {
            return skipped("postgres itself", "postgres");
        }
        let server = PostgresServer::start(&["max_connections=10"]).await;
        server.crash().await;
        server.restart().await;
        assert!(server.log().contains("automatic recovery in progress"), "{}", server.log());
        let pid = server.process().pid();
        drop(server);
        assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
    }
}
