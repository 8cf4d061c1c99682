use std::{
    fs::File,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::time::{sleep, timeout};

use crate::{
    process::{Process, ReservedPort, TIMEOUT, TempFolder, find, local},
    resp::{Connection, Reply},
};

/// A `redis-server` process on a free port, with a folder of its own and without persistence.
///
/// The environment variable `REDIS_SERVER=/path` selects another program.
#[derive(Debug)]
pub struct RedisServer {
    pub(crate) options: RedisOptions,
    process: Process,
    port: ReservedPort,
    folder: TempFolder,
}

/// Builder for a [`RedisServer`] with non-default settings.
#[derive(Clone, Debug, Default)]
#[must_use = "options start nothing"]
pub struct RedisOptions {
    arguments: Vec<String>,
    user: Option<String>,
    password: Option<String>,
}

enum Start {
    Up(Process),
    PortTaken,
}

// === impl RedisOptions ===

impl RedisOptions {
    /// Sets one directive of `redis.conf`. It overrides the defaults.
    pub fn set(mut self, directive: &str, value: &str) -> Self {
        if directive == "requirepass" {
            self.password = Some(value.to_owned());
        }
        self.arguments.extend([format!("--{directive}"), value.to_owned()]);
        self
    }

    /// Adds a user, as which commands are run. The default user gets these rules.
    pub fn user<'a>(mut self, name: &str, password: &str, default: impl IntoIterator<Item = &'a str>) -> Self {
        (self.user, self.password) = (Some(name.to_owned()), Some(password.to_owned()));
        let password = format!(">{password}");
        self.args(["--user", name, "on", &password, "~*", "&*", "+@all", "--user", "default"]).args(default)
    }

    /// Adds command line arguments.
    pub fn args<'a>(mut self, arguments: impl IntoIterator<Item = &'a str>) -> Self {
        self.arguments.extend(arguments.into_iter().map(str::to_owned));
        self
    }

    /// Starts the server and waits until it responds.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start or does not respond.
    pub async fn start(self) -> RedisServer {
        let folder = TempFolder::create();
        for _ in 0..20 {
            let port = ReservedPort::new();
            if let Start::Up(process) = self.launch(port.number(), folder.path()).await {
                return RedisServer { options: self, process, port, folder };
            }
        }
        panic!("no port stays free for long enough");
    }

    async fn launch(&self, port: u16, folder: &Path) -> Start {
        let program = RedisServer::program().expect("check `RedisServer::is_available` first");
        let log = folder.join("log");
        let mut command = Process::command(&program);
        command
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .args(["--protected-mode", "no", "--daemonize", "no", "--enable-debug-command", "yes", "--dir"])
            .arg(folder)
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(File::create(&log).expect("a log"))
            .stderr(Stdio::null());
        let process = Process::start(command).unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        let up = async {
            loop {
                // Another process may listen on this port.
                if process.ended().is_some() {
                    let said = std::fs::read_to_string(&log).unwrap_or_default();
                    assert!(said.contains("Address already in use"), "redis-server does not start:\n{said}");
                    return false;
                }
                if self.is_up(&process, local(port)).await.unwrap_or(false) {
                    return true;
                }
                sleep(Duration::from_millis(2)).await;
            }
        };
        match timeout(TIMEOUT, up).await {
            Ok(true) => Start::Up(process),
            Ok(false) => Start::PortTaken,
            Err(_) => panic!("{} does not respond on port {port}", program.display()),
        }
    }

    async fn is_up(&self, process: &Process, address: SocketAddr) -> io::Result<bool> {
        let mut connection = self.connect(address).await?;
        let server = connection.command(&["INFO", "server"]).await?;
        Ok(server.text().is_some_and(|text| text.contains(&format!("process_id:{}\r\n", process.pid()))))
    }

    async fn connect(&self, address: SocketAddr) -> io::Result<Connection> {
        let mut connection = Connection::open(address).await?;
        if let Some(password) = &self.password {
            connection.command(&["AUTH", self.user.as_deref().unwrap_or("default"), password]).await?;
        }
        Ok(connection)
    }
}

// === impl RedisServer ===

impl RedisServer {
    /// Returns whether `redis-server` exists on this machine.
    #[must_use]
    pub fn is_available() -> bool {
        Self::program().is_some()
    }

    /// A builder for non-default settings.
    pub fn options() -> RedisOptions {
        RedisOptions::default()
    }

    /// Starts a server and waits until it responds.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start or does not respond.
    pub async fn start() -> Self {
        Self::options().start().await
    }

    /// The address that the server listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        local(self.port.number())
    }

    /// The URL for clients.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_at(self.address())
    }

    /// The URL with another address, for example of a proxy.
    #[must_use]
    pub fn url_at(&self, address: SocketAddr) -> String {
        match &self.options.password {
            Some(password) => {
                format!("redis://{}:{password}@{address}", self.options.user.as_deref().unwrap_or_default())
            }
            None => format!("redis://{address}"),
        }
    }

    /// The port of the server.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The process id of the server.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The folder of the server.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The content of its log.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Stops the process with SIGSTOP: connections stay open, the kernel accepts new ones, and no
    /// request is processed.
    pub fn freeze(&self) {
        self.process.freeze();
    }

    /// Continues the process. It then processes the requests that arrived.
    pub fn thaw(&self) {
        self.process.thaw();
    }

    /// Kills the process and waits for its end.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Whether the process was killed.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.process.ended().is_some()
    }

    /// Whether the process was neither killed nor stopped.
    pub(crate) fn is_running(&self) -> bool {
        self.process.is_running()
    }

    /// Lets no replica follow this server any more. They keep what they have, and can be promoted.
    ///
    /// # Panics
    ///
    /// Panics if the server does not respond.
    pub async fn cut_replication(&self) {
        // They wait for the start of a full synchronization. A replica that is refused would try
        // again at once, for ever.
        for (directive, value) in [("repl-diskless-sync", "yes"), ("repl-diskless-sync-delay", "86400")] {
            self.command(&["CONFIG", "SET", directive, value]).await;
        }
        assert_eq!(self.command(&["DEBUG", "CHANGE-REPL-ID"]).await.text(), Some("OK"));
        self.command(&["CLIENT", "KILL", "TYPE", "replica"]).await;
    }

    /// Replaces the server by an empty one on the same port.
    ///
    /// # Panics
    ///
    /// Panics if another process has taken the port or the server does not respond.
    pub async fn restart_empty(&mut self) {
        self.kill();
        self.folder = TempFolder::create();
        self.restart().await;
    }

    /// Restarts the server on the same port and in the same folder, with its data on disk.
    ///
    /// # Panics
    ///
    /// Panics if another process has taken the port or the server does not respond.
    pub async fn restart(&mut self) {
        self.kill();
        for _ in 0..100 {
            if let Start::Up(process) = self.options.launch(self.port.number(), self.folder.path()).await {
                self.process = process;
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
        panic!("port {} is taken", self.port.number());
    }

    /// Waits until the server has read its data. It responds before that.
    ///
    /// # Panics
    ///
    /// Panics if the server does not read its data in time.
    pub async fn loaded(&self) {
        let loaded = async {
            while !self.command(&["INFO", "persistence"]).await.text().is_some_and(|text| text.contains("\nloading:0"))
            {
                sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(TIMEOUT, loaded).await.expect("it has read");
    }

    /// Opens an authenticated connection.
    ///
    /// # Panics
    ///
    /// Panics if the server does not listen.
    pub async fn connect(&self) -> Connection {
        self.options.connect(self.address()).await.expect("it listens")
    }

    /// Runs a command on a new connection, which `CLIENT LIST` includes.
    ///
    /// # Panics
    ///
    /// Panics if the server does not respond.
    pub async fn command(&self, parts: &[&str]) -> Reply {
        self.try_command(parts).await.unwrap_or_else(|error| panic!("{parts:?}: {error}"))
    }

    /// As [`command`](Self::command), for a server that may close the connection.
    pub async fn try_command(&self, parts: &[&str]) -> io::Result<Reply> {
        self.options.connect(self.address()).await?.command(parts).await
    }

    pub(crate) fn program() -> Option<PathBuf> {
        find(Some("REDIS_SERVER"), "redis-server")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::skipped;

    fn is_there() -> bool {
        let there = RedisServer::is_available();
        if !there {
            skipped("redis-server itself", "redis-server");
        }
        there
    }

    #[tokio::test]
    async fn redis_freezes_thaws_and_restarts_empty() {
        if !is_there() {
            return;
        }
        let mut redis = RedisServer::options().set("requirepass", "secret").start().await;
        assert_eq!(redis.url(), format!("redis://:secret@127.0.0.1:{}", redis.port()));
        assert_eq!(redis.command(&["SET", "a", "1"]).await, Reply::Status("OK".to_owned()));
        assert_eq!(redis.command(&["GET", "a"]).await.integer(), Some(1));
        assert_eq!(redis.command(&["KEYS", "*"]).await.texts(), ["a"]);
        assert!(redis.command(&["NO", "such"]).await.text().is_some_and(|text| text.starts_with("ERR unknown")));
        let mut unauthenticated = Connection::open(redis.address()).await.expect("it listens");
        let refused = unauthenticated.command(&["PING"]).await.expect("a reply");
        assert!(refused.text().is_some_and(|text| text.starts_with("NOAUTH")), "{refused:?}");

        redis.freeze();
        let mut connection = Connection::open(redis.address()).await.expect("the kernel accepts it");
        let silence = timeout(Duration::from_millis(200), connection.command(&["PING"])).await;
        assert!(silence.is_err(), "{silence:?}");
        redis.thaw();
        connection.next().await.expect("it goes on");

        let before = (redis.port(), redis.pid());
        redis.restart_empty().await;
        assert_eq!((redis.port(), redis.pid() == before.1), (before.0, false));
        assert_eq!(redis.command(&["DBSIZE"]).await, Reply::Integer(0));
    }

    #[tokio::test]
    async fn data_survives_a_restart_and_its_folder_is_removed() {
        if !is_there() {
            return;
        }
        let mut redis = RedisServer::options().set("appendonly", "yes").start().await;
        redis.command(&["SET", "a", "1"]).await;
        redis.restart().await;
        redis.loaded().await;
        assert_eq!(redis.command(&["GET", "a"]).await.integer(), Some(1));
        redis.restart_empty().await;
        assert_eq!(redis.command(&["GET", "a"]).await, Reply::Nil);
        let folder = redis.folder().to_owned();
        let (address, pid) = (redis.address(), redis.pid());
        drop(redis);
        assert!(!folder.exists() && !Path::new(&format!("/proc/{pid}")).exists());
        assert!(Connection::open(address).await.is_err());
    }

    /// The thread of a test ends with the test, and the kernel treats that as the death of the
    /// parent.
    #[tokio::test]
    async fn server_outlives_the_thread_that_started_it() {
        if !is_there() {
            return;
        }
        let started = std::thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(RedisServer::start())
        });
        let redis = started.join().expect("it starts");
        sleep(Duration::from_millis(50)).await;
        assert_eq!(redis.command(&["PING"]).await.text(), Some("PONG"));
    }
}
