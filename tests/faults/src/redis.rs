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
    process::{Process, TIMEOUT, TempFolder, find, free_port, local},
    resp::{Connection, Reply},
};

/// A `redis-server` of its own: on a free port of this machine, with a folder of its own, keeping nothing on disk.
///
/// `REDIS_SERVER=/path` chooses another one, of another version perhaps.
#[derive(Debug)]
pub struct RedisServer {
    options: RedisOptions,
    process: Process,
    port: u16,
    folder: TempFolder,
}

/// A [`RedisServer`] that is to be told something.
#[derive(Clone, Debug, Default)]
#[must_use = "options start nothing"]
pub struct RedisOptions {
    arguments: Vec<String>,
    password: Option<String>,
}

enum Start {
    Up(Process),
    PortTaken,
}

// === impl RedisOptions ===

impl RedisOptions {
    /// One directive of `redis.conf`, after the usual ones: the last one counts.
    pub fn set(mut self, directive: &str, value: &str) -> Self {
        if directive == "requirepass" {
            self.password = Some(value.to_owned());
        }
        self.arguments.extend([format!("--{directive}"), value.to_owned()]);
        self
    }

    /// Any arguments.
    pub fn args<'a>(mut self, arguments: impl IntoIterator<Item = &'a str>) -> Self {
        self.arguments.extend(arguments.into_iter().map(str::to_owned));
        self
    }

    /// Starts it, and waits until it answers.
    ///
    /// # Panics
    ///
    /// It does not start, or does not answer.
    pub async fn start(self) -> RedisServer {
        let folder = TempFolder::new();
        for _ in 0..20 {
            let port = free_port();
            if let Start::Up(process) = self.launch(port, folder.path()).await {
                return RedisServer { options: self, process, port, folder };
            }
        }
        panic!("no port stays free for long enough");
    }

    async fn launch(&self, port: u16, folder: &Path) -> Start {
        let program = RedisServer::program().expect("redis-server is there: ask `RedisServer::is_available` first");
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
                // Whoever answers on this port need not be ours.
                if process.ended().is_some() {
                    let said = std::fs::read_to_string(&log).unwrap_or_default();
                    assert!(said.contains("Address already in use"), "it does not start:\n{said}");
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
            Err(_) => panic!("{} does not answer on port {port}", program.display()),
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
            connection.command(&["AUTH", password]).await?;
        }
        Ok(connection)
    }
}

// === impl RedisServer ===

impl RedisServer {
    /// Whether there is a `redis-server` on this machine.
    #[must_use]
    pub fn is_available() -> bool {
        Self::program().is_some()
    }

    /// One that is to be told something.
    pub fn options() -> RedisOptions {
        RedisOptions::default()
    }

    /// Starts one, and waits until it answers.
    ///
    /// # Panics
    ///
    /// It does not start, or does not answer.
    pub async fn start() -> Self {
        Self::options().start().await
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        local(self.port)
    }

    /// Where it listens, as clients are told.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_at(self.address())
    }

    /// The same by another address: that of a proxy.
    #[must_use]
    pub fn url_at(&self, address: SocketAddr) -> String {
        match &self.options.password {
            Some(password) => format!("redis://:{password}@{address}"),
            None => format!("redis://{address}"),
        }
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The number of its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What it has written to its log.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Stops it where it stands: connections stay open, new ones are taken by the kernel, and nobody answers.
    pub fn freeze(&self) {
        self.process.freeze();
    }

    /// Lets it go on: what was sent to it meanwhile is done now.
    pub fn thaw(&self) {
        self.process.thaw();
    }

    /// Kills it, and waits for that.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// A new one on the same port, that knows nothing of what the old one kept.
    ///
    /// # Panics
    ///
    /// Somebody else has the port now, or it does not answer.
    pub async fn restart_empty(&mut self) {
        self.kill();
        self.folder = TempFolder::new();
        self.restart().await;
    }

    /// The same again on the same port and in the same folder, with what it has kept on disk.
    ///
    /// # Panics
    ///
    /// Somebody else has the port now, or it does not answer.
    pub async fn restart(&mut self) {
        self.kill();
        for _ in 0..100 {
            if let Start::Up(process) = self.options.launch(self.port, self.folder.path()).await {
                self.process = process;
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
        panic!("somebody else has port {} now", self.port);
    }

    /// A connection of its own, with the password given.
    ///
    /// # Panics
    ///
    /// It does not listen.
    pub async fn connect(&self) -> Connection {
        self.options.connect(self.address()).await.expect("it listens")
    }

    /// Asks it on a new connection, which `CLIENT LIST` shows, too.
    ///
    /// # Panics
    ///
    /// It does not answer.
    pub async fn command(&self, parts: &[&str]) -> Reply {
        self.connect().await.command(parts).await.unwrap_or_else(|error| panic!("{parts:?}: {error}"))
    }

    fn program() -> Option<PathBuf> {
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
        let mut stranger = Connection::open(redis.address()).await.expect("it listens");
        let refused = stranger.command(&["PING"]).await.expect("an answer");
        assert!(refused.text().is_some_and(|text| text.starts_with("NOAUTH")), "{refused:?}");

        redis.freeze();
        let mut connection = Connection::open(redis.address()).await.expect("the kernel takes it");
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
        // It answers while it reads what it has kept.
        let kept = async {
            loop {
                let reply = redis.command(&["GET", "a"]).await;
                if !reply.text().is_some_and(|text| text.starts_with("LOADING")) {
                    return reply;
                }
                sleep(Duration::from_millis(2)).await;
            }
        };
        assert_eq!(timeout(TIMEOUT, kept).await.expect("it has read").integer(), Some(1));
        redis.restart_empty().await;
        assert_eq!(redis.command(&["GET", "a"]).await, Reply::Nil);
        let folder = redis.folder().to_owned();
        let (address, pid) = (redis.address(), redis.pid());
        drop(redis);
        assert!(!folder.exists() && !Path::new(&format!("/proc/{pid}")).exists());
        assert!(Connection::open(address).await.is_err());
    }

    /// The thread of a test ends with it, and the kernel takes that for the death of a parent.
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
