use std::{
    fs,
    fs::File,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
};

use crate::{
    process::{Process, ReservedPort, TempFolder, local},
    redis::{RedisOptions, RedisServer},
    redis_cluster::until,
    resp::{Connection, Reply},
};

/// A master, its replicas, and three sentinels, each a process.
#[derive(Debug)]
pub struct SentinelGroup {
    servers: Vec<RedisServer>,
    sentinels: Vec<Sentinel>,
}

#[derive(Debug)]
struct Sentinel {
    process: Process,
    port: ReservedPort,
    tls_port: ReservedPort,
    password: Option<String>,
    _folder: TempFolder,
}

/// Builder for a [`SentinelGroup`] with non-default settings.
#[derive(Clone, Debug, Default)]
#[must_use = "options start nothing"]
pub struct SentinelOptions {
    sentinel_password: Option<String>,
    certificate: Option<PathBuf>,
}

/// The name of the master.
const NAME: &str = "mymaster";
/// The user and the password of the sentinels at the servers.
const USER: &str = "watcher";
const USER_PASSWORD: &str = "of-watchers";
const SENTINELS: usize = 3;

impl SentinelOptions {
    /// Sets the password of the sentinels.
    pub fn sentinel_password(self, password: &str) -> Self {
        Self { sentinel_password: Some(password.to_owned()), ..self }
    }

    /// Lets the sentinels also listen with TLS, for clients with a certificate. The folder has the
    /// files `crt` and `key`.
    pub fn tls(self, folder: &Path) -> Self {
        Self { certificate: Some(folder.to_owned()), ..self }
    }

    /// Starts the processes, and waits until a failover is possible.
    pub async fn start(self, replicas: usize) -> SentinelGroup {
        let master = server().start().await;
        let mut servers = vec![master];
        for _ in 0..replicas {
            let master = servers[0].port().to_string();
            let replica = server().args(["--replicaof", "127.0.0.1", &master]).start().await;
            servers.push(replica);
        }
        for replica in &servers[1..] {
            follows(replica).await;
        }
        let mut sentinels = Vec::new();
        for _ in 0..SENTINELS {
            sentinels.push(Sentinel::start(&self, servers[0].port()).await);
        }
        let group = SentinelGroup { servers, sentinels };
        for sentinel in &group.sentinels {
            let tuned = ["SENTINEL", "DEBUG", "info-period", "100", "publish-period", "100", "ask-period", "100"];
            sentinel.command(&tuned).await.expect("it listens");
            let ready = [("num-slaves", replicas), ("num-other-sentinels", SENTINELS - 1)];
            until("the sentinels know each other", async || {
                let reply = sentinel.command(&["SENTINEL", "MASTER", NAME]).await.expect("it listens");
                ready.iter().all(|(name, count)| field(&reply, name) == Some(&*count.to_string()))
            })
            .await;
        }
        group
    }
}

fn server() -> RedisOptions {
    let user = ["--user", USER, "on", &format!(">{USER_PASSWORD}"), "allkeys", "allchannels", "+@all"];
    RedisServer::options()
        .set("repl-diskless-sync-delay", "0")
        .set("repl-ping-replica-period", "1")
        .set("requirepass", SentinelGroup::PASSWORD)
        .set("masterauth", SentinelGroup::PASSWORD)
        .args(user)
}

impl SentinelGroup {
    /// The password of the servers.
    pub const PASSWORD: &str = "of-servers";

    /// A builder for non-default settings.
    pub fn options() -> SentinelOptions {
        SentinelOptions::default()
    }

    /// Starts a master with this number of replicas.
    pub async fn start(replicas: usize) -> Self {
        Self::options().start(replicas).await
    }

    /// The URL for clients, with the password of the servers.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis+sentinel://:{}@{}/{NAME}", Self::PASSWORD, self.sentinel_addresses().join(","))
    }

    /// The addresses of the sentinels.
    #[must_use]
    pub fn sentinel_addresses(&self) -> Vec<String> {
        self.sentinels.iter().map(|sentinel| sentinel.address().to_string()).collect()
    }

    /// The addresses of the sentinels with [TLS](SentinelOptions::tls).
    #[must_use]
    pub fn sentinel_tls_addresses(&self) -> Vec<String> {
        self.sentinels.iter().map(|sentinel| local(sentinel.tls_port.number()).to_string()).collect()
    }

    /// Lets the sentinels name this port as another master.
    pub async fn monitor(&self, name: &str, port: u16) {
        for sentinel in &self.sentinels {
            let reply = sentinel.command(&["SENTINEL", "MONITOR", name, "127.0.0.1", &port.to_string(), "2"]).await;
            assert_eq!(reply.expect("it listens").text(), Some("OK"));
        }
    }

    /// The servers. The first one was the master at the start.
    #[must_use]
    pub fn servers(&self) -> &[RedisServer] {
        &self.servers
    }

    /// The server that a majority of the sentinels names. `None`: they do not agree.
    pub async fn master(&self) -> Option<&RedisServer> {
        let mut named = Vec::new();
        for sentinel in &self.sentinels {
            let reply = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]).await.expect("it listens");
            named.push(reply.items().get(1)?.text()?.parse::<u16>().ok()?);
        }
        named.sort_unstable();
        let middle = named[SENTINELS / 2];
        let agree = named.iter().filter(|port| **port == middle).count();
        self.servers.iter().find(|server| agree > SENTINELS / 2 && server.port() == middle)
    }

    /// Waits until another server than this one is the master for most sentinels, and accepts
    /// writes.
    pub async fn promoted(&self, former: &RedisServer) -> &RedisServer {
        until("a failover", async || match self.master().await {
            Some(master) if master.port() != former.port() => {
                let role = master.try_command(&["ROLE"]).await;
                role.is_ok_and(|role| role.items().first().and_then(Reply::text) == Some("master"))
            }
            _ => false,
        })
        .await;
        self.master().await.expect("they agree")
    }

    /// The number of the master.
    pub async fn master_number(&self) -> usize {
        until("the sentinels agree", async || self.master().await.is_some()).await;
        let port = self.master().await.expect("they agree").port();
        self.servers.iter().position(|server| server.port() == port).expect("one of the group")
    }

    /// Restarts a killed server without data, and waits until it can be promoted.
    pub async fn restart_as_replica(&mut self, number: usize) {
        self.servers[number].restart_empty().await;
        self.rejoined(number).await;
    }

    /// Waits until a former master is a replica that can be promoted.
    pub async fn rejoined(&self, number: usize) {
        follows(&self.servers[number]).await;
        // A sentinel promotes only a replica that follows the master for it.
        until("the sentinels know it", async || {
            for sentinel in &self.sentinels {
                let reply = sentinel.command(&["SENTINEL", "REPLICAS", NAME]).await.expect("it listens");
                let port = self.servers[number].port().to_string();
                let is_up = |replica: &Reply| {
                    let expected = [("port", &*port), ("flags", "slave"), ("master-link-status", "ok")];
                    expected.into_iter().all(|(name, value)| field(replica, name) == Some(value))
                };
                if !reply.items().iter().any(is_up) {
                    return false;
                }
            }
            true
        })
        .await;
    }

    /// Separates a master from the sentinels: for them it is down, and for its clients it is up.
    pub async fn isolate(master: &RedisServer) {
        master.command(&["ACL", "SETUSER", USER, "off"]).await;
        master.command(&["CLIENT", "KILL", "USER", USER]).await;
    }

    /// Ends [`isolate`](Self::isolate): the sentinels make the former master a replica.
    pub async fn reunite(former: &RedisServer) {
        former.command(&["ACL", "SETUSER", USER, "on"]).await;
        // A sentinel keeps a connection without a login for 15 seconds.
        former.command(&["CLIENT", "KILL", "TYPE", "normal"]).await;
    }

    /// Starts a failover by hand.
    pub async fn fail_over(&self) {
        // With short periods the other sentinels would undo it before they know of it.
        for sentinel in &self.sentinels {
            let defaults =
                ["SENTINEL", "DEBUG", "info-period", "10000", "publish-period", "2000", "ask-period", "1000"];
            sentinel.command(&defaults).await.expect("it listens");
        }
        let reply = self.sentinels[0].command(&["SENTINEL", "FAILOVER", NAME]).await.expect("it listens");
        assert_eq!(reply.text(), Some("OK"), "{reply:?}");
    }

    /// Runs a command at a sentinel.
    pub async fn sentinel_command(&self, number: usize, parts: &[&str]) -> Reply {
        self.sentinels[number].command(parts).await.expect("it listens")
    }

    /// Stops a sentinel with SIGSTOP.
    pub fn freeze_sentinel(&self, number: usize) {
        self.sentinels[number].process.freeze();
    }
}

impl Sentinel {
    async fn start(options: &SentinelOptions, master: u16) -> Self {
        let (folder, port, tls_port) = (TempFolder::create(), ReservedPort::new(), ReservedPort::new());
        // A shorter time would count a server as down on a busy machine.
        let mut lines = vec![
            format!("port {}", port.number()),
            "bind 127.0.0.1".to_owned(),
            "protected-mode no".to_owned(),
            format!("dir {}", folder.path().display()),
            format!("sentinel monitor {NAME} 127.0.0.1 {master} 2"),
            format!("sentinel down-after-milliseconds {NAME} 1500"),
            format!("sentinel failover-timeout {NAME} 2000"),
            format!("sentinel auth-user {NAME} {USER}"),
            format!("sentinel auth-pass {NAME} {USER_PASSWORD}"),
        ];
        if let Some(password) = &options.sentinel_password {
            lines.push(format!("requirepass {password}"));
            lines.push(format!("sentinel sentinel-pass {password}"));
        }
        if let Some(certificate) = &options.certificate {
            let file = |name: &str| certificate.join(name).display().to_string();
            lines.push(format!("tls-port {}", tls_port.number()));
            lines.push(format!("tls-cert-file {}", file("crt")));
            lines.push(format!("tls-key-file {}", file("key")));
            lines.push(format!("tls-ca-cert-file {}", file("crt")));
            lines.push("tls-auth-clients yes".to_owned());
        }
        let file = folder.path().join("sentinel.conf");
        fs::write(&file, lines.join("\n") + "\n").expect("a file");
        let mut command = Process::command(RedisServer::program().expect("check `RedisServer::is_available` first"));
        let log = File::create(folder.path().join("log")).expect("a log");
        command.arg(&file).arg("--sentinel").stdin(Stdio::null()).stdout(log).stderr(Stdio::null());
        let process = Process::start(command).expect("it starts");
        let sentinel = Self { process, port, tls_port, password: options.sentinel_password.clone(), _folder: folder };
        until("a sentinel responds", async || {
            assert!(sentinel.process.ended().is_none(), "the sentinel does not start");
            sentinel.command(&["PING"]).await.is_ok_and(|reply| reply.text() == Some("PONG"))
        })
        .await;
        sentinel
    }

    fn address(&self) -> SocketAddr {
        local(self.port.number())
    }

    async fn command(&self, parts: &[&str]) -> io::Result<Reply> {
        let mut connection = Connection::open(self.address()).await?;
        if let Some(password) = &self.password {
            connection.command(&["AUTH", password]).await?;
        }
        connection.command(parts).await
    }
}

/// Waits until a replica has the data of its master. A sentinel that changes its master closes its
/// connections.
async fn follows(replica: &RedisServer) {
    until("the replica follows", async || {
        let info = replica.try_command(&["INFO", "replication"]).await;
        info.is_ok_and(|info| info.text().is_some_and(|info| info.contains("master_link_status:up")))
    })
    .await;
}

/// A value of a list of names and values.
fn field<'a>(fields: &'a Reply, name: &str) -> Option<&'a str> {
    fields.items().chunks_exact(2).find(|pair| pair[0].text() == Some(name))?[1].text()
}
