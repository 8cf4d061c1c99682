use std::{
    fs::{self, File},
    os::unix::fs::chown,
    path::PathBuf,
    process::Stdio,
    time::Duration,
};

use tokio::{
    io::AsyncReadExt,
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::process::{Process, TIMEOUT, TempFolder, find, free_port, local};

/// A `mariadbd` process with empty databases. The root user needs no password.
///
/// The environment variable `MARIADBD=/path` selects another program.
#[derive(Debug)]
pub struct MariaDb {
    process: Process,
    port: u16,
    _folder: TempFolder,
}

/// The data need not survive a power failure: nothing waits for the disk, which other tests use.
const UNSYNCED: [&str; 3] = ["--innodb-flush-log-at-trx-commit=0", "--innodb-flush-method=nosync", "--debug-no-sync"];

/// The user that the server runs as: it refuses to run as root.
struct User {
    uid: u32,
    gid: u32,
}

impl MariaDb {
    /// Returns whether `mariadbd` and its installer exist on this machine.
    #[must_use]
    pub fn is_available() -> bool {
        Self::program().is_some() && Self::installer().is_some()
    }

    /// Starts a server with these databases and waits until it accepts connections.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start or does not respond.
    pub async fn start(databases: &[&str]) -> Self {
        let (program, installer) = Self::program().zip(Self::installer()).expect("check `MariaDb::is_available` first");
        let folder = TempFolder::new();
        let (data, log) = (folder.path().join("data"), folder.path().join("log"));
        let create: String =
            databases.iter().map(|name| format!("CREATE DATABASE IF NOT EXISTS `{name}`;\n")).collect();
        let init = folder.path().join("init.sql");
        fs::write(&init, create).expect("a file");
        fs::create_dir(&data).expect("a folder");
        let user = rustix::process::geteuid().is_root().then(User::for_mariadb);
        if let Some(user) = &user {
            for path in [folder.path(), &data, &init] {
                chown(path, Some(user.uid), Some(user.gid)).expect("root may");
            }
        }
        let privileges = user.map(|user| user.privileges()).unwrap_or_default();
        let file = || File::options().create(true).append(true).open(&log).expect("a log");
        let said = || fs::read_to_string(&log).unwrap_or_default();

        let mut command = Process::command_as(installer, &privileges);
        command
            .args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"])
            .args(UNSYNCED)
            .arg(format!("--datadir={}", data.display()))
            .current_dir(folder.path())
            // The server removes files that look temporary at its start, including files of other
            // processes.
            .env("TMPDIR", folder.path())
            .stdin(Stdio::null())
            .stdout(file())
            .stderr(file());
        let installed = Process::start(command).expect("it starts").end().await;
        assert!(installed.success(), "mariadb-install-db: {}", said());

        for _ in 0..20 {
            let port = free_port();
            let mut command = Process::command_as(&program, &privileges);
            command
                .args(["--no-defaults", "--bind-address=127.0.0.1", "--skip-name-resolve", "--skip-log-bin"])
                .arg(format!("--port={port}"))
                .arg(format!("--datadir={}", data.display()))
                .arg(format!("--socket={}", folder.path().join("socket").display()))
                .arg(format!("--pid-file={}", folder.path().join("pid").display()))
                .arg(format!("--init-file={}", init.display()))
                .args(UNSYNCED)
                .args(["--innodb-buffer-pool-size=32M", "--max-connections=500"])
                .current_dir(folder.path())
                .env("TMPDIR", folder.path())
                .stdin(Stdio::null())
                .stdout(file())
                .stderr(file());
            let process = Process::start(command).expect("it starts");
            let up = async {
                loop {
                    if process.ended().is_some() {
                        return false;
                    }
                    // The server sends the first packet.
                    if let Ok(mut stream) = TcpStream::connect(local(port)).await
                        && stream.read_u8().await.is_ok()
                    {
                        return true;
                    }
                    sleep(Duration::from_millis(10)).await;
                }
            };
            match timeout(TIMEOUT, up).await {
                Ok(true) => return Self { process, port, _folder: folder },
                Ok(false) => {
                    let said = said();
                    assert!(said.contains("Address already in use"), "mariadbd does not start:\n{said}");
                    fs::write(&log, "").expect("a log");
                }
                Err(_) => panic!("mariadbd does not respond:\n{}", said()),
            }
        }
        panic!("no port stays free for long enough");
    }

    /// The URL of one of the databases.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("mysql://root@127.0.0.1:{}/{database}", self.port)
    }

    /// The port of the server.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id of the server.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn program() -> Option<PathBuf> {
        find(Some("MARIADBD"), "mariadbd")
    }

    fn installer() -> Option<PathBuf> {
        let sibling = Self::program()?.parent()?.join("mariadb-install-db");
        if sibling.is_file() { Some(sibling) } else { find(None, "mariadb-install-db") }
    }
}

impl User {
    fn for_mariadb() -> Self {
        let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let of = |name: &str| {
            let mut fields = users.lines().find(|line| line.split(':').next() == Some(name))?.split(':').skip(2);
            Some(Self { uid: fields.next()?.parse().ok()?, gid: fields.next()?.parse().ok()? })
        };
        of("mysql").or_else(|| of("nobody")).expect("a user to run it as")
    }

    fn privileges(&self) -> Vec<String> {
        let Self { uid, gid } = self;
        vec![format!("--reuid={uid}"), format!("--regid={gid}"), "--clear-groups".to_owned()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::skipped;

    #[tokio::test]
    async fn mariadb_starts_with_its_databases_and_stops_on_drop() {
        if !MariaDb::is_available() {
            return skipped("mariadbd itself", "mariadbd");
        }
        let mariadb = MariaDb::start(&["shop", "rewards"]).await;
        assert_eq!(mariadb.url("shop"), format!("mysql://root@127.0.0.1:{}/shop", mariadb.port()));
        for name in ["shop", "rewards"] {
            assert!(mariadb._folder.path().join("data").join(name).is_dir(), "{name}");
        }
        let (pid, port) = (mariadb.pid(), mariadb.port());
        drop(mariadb);
        assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
        assert!(TcpStream::connect(local(port)).await.is_err());
    }
}
