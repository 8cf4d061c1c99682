//! ZooKeeper, one server or several that agree by a majority.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::{
    process::{Process, ReservedPort, TempFolder, find},
    wait::until,
};

/// Servers of ZooKeeper, which end on drop.
///
/// The environment variable `ZOOKEEPER_JARS` names a folder with ZooKeeper and what it needs.
#[derive(Debug)]
pub struct ZooKeeper {
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    process: Mutex<Process>,
    folder: TempFolder,
    port: ReservedPort,
    /// For the other members.
    _ports: [ReservedPort; 2],
}

impl ZooKeeper {
    /// Returns whether `java` and ZooKeeper exist on this machine.
    #[must_use]
    pub fn is_available() -> bool {
        Self::jars().is_some() && find(None, "java").is_some()
    }

    /// Starts so many servers and waits until they have a leader. Their ticks have half a second: a
    /// session lasts for a second at least.
    ///
    /// # Panics
    ///
    /// Panics if a server does not start or does not respond.
    pub async fn start(count: usize) -> Self {
        Self::start_with(count, |_| String::new()).await
    }

    /// The same with these settings of each server in addition. The function gets its folder.
    ///
    /// # Panics
    ///
    /// As [`start`](Self::start).
    pub async fn start_with(count: usize, settings: impl Fn(&Path) -> String) -> Self {
        let ports: Vec<_> = (0..count).map(|_| [(); 3].map(|()| ReservedPort::new())).collect();
        let quorum: String = ports
            .iter()
            .enumerate()
            .map(|(n, [_, peer, election])| {
                format!("server.{}=127.0.0.1:{}:{}\n", n + 1, peer.number(), election.number())
            })
            .collect();
        let quorum = if count == 1 { String::new() } else { quorum };
        let member = |(n, [port, peer, election]): (usize, [ReservedPort; 3])| {
            let folder = TempFolder::create();
            let data = folder.path().join("data");
            fs::create_dir(&data).expect("a folder");
            fs::write(data.join("myid"), (n + 1).to_string()).expect("a file");
            let settings = format!(
                "tickTime=500\ninitLimit=20\nsyncLimit=10\ndataDir={}\nclientPort={}\nclientPortAddress=127.0.0.1\n\
                 admin.enableServer=false\nmaxClientCnxns=0\nmaxSessionTimeout=700000\n4lw.commands.whitelist=srvr,wchp\n\
                 forceSync=no\n{quorum}{}",
                data.display(),
                port.number(),
                settings(folder.path())
            );
            fs::write(folder.path().join("zoo.cfg"), settings).expect("a file");
            let process = Mutex::new(Process::start(Self::command(folder.path())).expect("check `is_available` first"));
            Member { process, folder, port, _ports: [peer, election] }
        };
        let servers = Self { members: ports.into_iter().enumerate().map(member).collect() };
        for n in 0..count {
            servers.is_up(n).await;
        }
        servers
    }

    fn command(folder: &Path) -> Command {
        let jars = Self::jars().expect("check `is_available` first");
        let log = fs::OpenOptions::new().create(true).append(true).open(folder.join("log")).expect("a file");
        let mut command = Process::command(find(None, "java").expect("check `is_available` first"));
        command
            .args(["-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"])
            .arg(format!("{}/*", jars.display()))
            .args(["org.apache.zookeeper.server.quorum.QuorumPeerMain", "zoo.cfg"])
            .current_dir(folder)
            .stdout(Stdio::null())
            .stderr(log);
        command
    }

    fn jars() -> Option<PathBuf> {
        let named = std::env::var_os("ZOOKEEPER_JARS").map(PathBuf::from);
        let folder = named.unwrap_or_else(|| "/usr/share/java".into());
        let is_zookeeper = |name: &str| name.starts_with("zookeeper") && name.ends_with(".jar");
        let mut files = fs::read_dir(&folder).ok()?.flatten();
        files.any(|file| file.file_name().to_str().is_some_and(is_zookeeper)).then_some(folder)
    }

    async fn is_up(&self, n: usize) {
        until("a server with a leader", async || self.mode(n).await.is_some()).await;
    }

    /// `leader`, `follower` or `standalone`, or `None` if the server serves nothing.
    pub async fn mode(&self, n: usize) -> Option<String> {
        self.ask(n, "srvr").await?.lines().find_map(|line| line.strip_prefix("Mode: ")).map(str::to_owned)
    }

    /// The nodes of a server that are watched.
    pub async fn watched(&self, n: usize) -> String {
        self.ask(n, "wchp").await.unwrap_or_default()
    }

    async fn ask(&self, n: usize, word: &str) -> Option<String> {
        let ask = async {
            let mut stream = TcpStream::connect(self.address(n)).await?;
            stream.write_all(word.as_bytes()).await?;
            let mut reply = String::new();
            stream.read_to_string(&mut reply).await.map(|_| reply)
        };
        // A server that starts accepts a connection, and may never reply.
        timeout(Duration::from_secs(1), ask).await.ok()?.ok()
    }

    /// The number of the leader.
    ///
    /// # Panics
    ///
    /// Panics if there is none for long.
    pub async fn leader(&self) -> usize {
        let mut leader = 0;
        until("a leader", async || {
            for n in 0..self.members.len() {
                let runs = self.process(n).is_running();
                if runs && self.mode(n).await.as_deref() == Some("leader") {
                    leader = n;
                    return true;
                }
            }
            false
        })
        .await;
        leader
    }

    /// The folder of a server.
    #[must_use]
    pub fn folder(&self, n: usize) -> &Path {
        self.members[n].folder.path()
    }

    /// The address of a server.
    #[must_use]
    pub fn address(&self, n: usize) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.members[n].port.number()))
    }

    /// The addresses of all servers, with commas in between.
    #[must_use]
    pub fn addresses(&self) -> String {
        let address = |n| self.address(n).to_string();
        (0..self.members.len()).map(address).collect::<Vec<_>>().join(",")
    }

    /// Adds a line to the settings of a server, for its next start.
    ///
    /// # Panics
    ///
    /// Panics if the file cannot be written.
    pub fn set(&self, n: usize, line: &str) {
        let file = self.folder(n).join("zoo.cfg");
        let settings = fs::read_to_string(&file).expect("a file");
        fs::write(file, format!("{settings}{line}\n")).expect("a file");
    }

    /// Kills all servers, and starts them again without their data.
    ///
    /// # Panics
    ///
    /// Panics if they do not start.
    pub async fn lose_all_data(&self) {
        for n in 0..self.members.len() {
            self.kill(n);
            fs::remove_dir_all(self.members[n].folder.path().join("data/version-2")).expect("data");
        }
        for n in 0..self.members.len() {
            *self.process(n) = Process::start(Self::command(self.members[n].folder.path())).expect("it did start");
        }
        for n in 0..self.members.len() {
            self.is_up(n).await;
        }
    }

    /// Runs lines of `zkCli` in one session. Returns what it prints.
    ///
    /// # Panics
    ///
    /// Panics if there is no `java`.
    #[must_use]
    pub fn cli(&self, lines: &[&str]) -> String {
        let jars = Self::jars().expect("check `is_available` first");
        let input = self.folder(0).join("commands");
        fs::write(&input, lines.join("\n") + "\n").expect("a file");
        let cli = Command::new(find(None, "java").expect("check `is_available` first"))
            .args(["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"])
            .arg(format!("{}/*", jars.display()))
            .args(["org.apache.zookeeper.ZooKeeperMain", "-server", &self.addresses()])
            .stdin(fs::File::open(input).expect("a file"))
            .output()
            .expect("it starts");
        String::from_utf8_lossy(&cli.stdout).into_owned() + &String::from_utf8_lossy(&cli.stderr)
    }

    /// Kills a server.
    pub fn kill(&self, n: usize) {
        self.process(n).kill();
    }

    /// Starts a server again that was killed, with its data, and waits until it serves.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub async fn restart(&self, n: usize) {
        *self.process(n) = Process::start(Self::command(self.members[n].folder.path())).expect("it did start");
        self.is_up(n).await;
    }

    /// Stops a server: its sockets stay open and it does not respond.
    pub fn freeze(&self, n: usize) {
        self.process(n).freeze();
    }

    /// Continues a server.
    pub fn thaw(&self, n: usize) {
        self.process(n).thaw();
    }

    fn process(&self, n: usize) -> MutexGuard<'_, Process> {
        self.members[n].process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
