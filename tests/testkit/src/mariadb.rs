use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::{io::AsyncReadExt, net::TcpStream};

use crate::{
    postgres::{privileges_in, start_again, start_on_free_port},
    process::{Process, ReservedPort, TempFolder, find, local},
    wait::until,
};

/// A `mariadbd` process with empty databases. The root user needs no password.
///
/// The environment variable `MARIADBD=/path` selects another program. `MYSQLD=/path` selects a
/// `mysqld` for servers that are installed.
#[derive(Debug)]
pub struct MariaDb {
    process: Mutex<Process>,
    program: PathBuf,
    settings: Vec<String>,
    port: ReservedPort,
    folder: TempFolder,
}

/// The settings of a server. The data need not survive a power failure: nothing waits for the disk,
/// which other tests use.
const SETTINGS: [&str; 9] = [
    "--no-defaults",
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--skip-log-bin",
    "--max-connections=500",
    "--innodb-buffer-pool-size=32M",
    "--innodb-flush-log-at-trx-commit=0",
    "--socket=socket",
    "--pid-file=pid",
];
/// Those that only one of the two programs has.
const OF_MARIADB: [&str; 4] =
    ["--innodb-stats-persistent=OFF", "--innodb-log-file-size=8M", "--innodb-flush-method=nosync", "--debug-no-sync"];
const OF_MYSQL: [&str; 5] = [
    "--mysqlx=OFF",
    "--performance-schema=OFF",
    "--secure-file-priv=",
    "--innodb-redo-log-capacity=8M",
    "--innodb-flush-method=nosync",
];

impl MariaDb {
    /// Returns whether `mariadbd` exists on this machine, or `MYSQLD` names a server.
    #[must_use]
    pub fn is_available() -> bool {
        Self::program().is_some() || std::env::var_os("MYSQLD").is_some()
    }

    /// Starts a server with these databases and waits until it accepts connections. The server has
    /// no tables of an installation: every user may do everything, and there are no procedures.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start or does not respond.
    pub async fn start(databases: &[&str]) -> Self {
        let program = Self::program().expect("check `MariaDb::is_available` first");
        Self::start_in(TempFolder::create(), program, databases, "", &["--skip-grant-tables"]).await
    }

    /// The same with the tables of an installation, and these settings.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start or does not respond.
    pub async fn installed(databases: &[&str], settings: &[&str]) -> Self {
        let folder = TempFolder::create();
        let (program, install, arguments) = match std::env::var_os("MYSQLD").map(PathBuf::from) {
            Some(mysqld) => (mysqld.clone(), mysqld, vec!["--no-defaults", "--initialize-insecure", "--mysqlx=OFF"]),
            None => {
                let program = Self::program().expect("check `MariaDb::is_available` first");
                let install = find(None, "mariadb-install-db").expect("a part of the server");
                let root = "--auth-root-authentication-method=normal";
                let log = "--innodb-log-file-size=8M";
                (program, install, vec!["--no-defaults", root, "--skip-test-db", log, "--skip-log-bin"])
            }
        };
        let mut install = Process::command_as(install, &privileges_in(&folder, "mysql"));
        install.args(arguments).env("TMPDIR", folder.path());
        let output = install.arg(format!("--datadir={}", folder.path().join("data").display())).output();
        let output = output.expect("it starts");
        let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        assert!(output.status.success(), "{texts:?}");
        let root =
            "CREATE USER IF NOT EXISTS root@'127.0.0.1';\nGRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n";
        Self::start_in(folder, program, databases, root, settings).await
    }

    async fn start_in(folder: TempFolder, program: PathBuf, databases: &[&str], init: &str, settings: &[&str]) -> Self {
        let create: String =
            databases.iter().map(|name| format!("CREATE DATABASE IF NOT EXISTS `{name}`;\n")).collect();
        let data = folder.path().join("data");
        fs::write(folder.path().join("init.sql"), init.to_owned() + &create).expect("a file");
        if !data.exists() {
            fs::create_dir(&data).expect("a folder");
            fs::set_permissions(&data, Permissions::from_mode(0o777)).expect("its owner may");
        }
        let settings: Vec<_> = settings.iter().map(ToString::to_string).collect();
        let command = |port| Self::command(&folder, &program, port, &settings);
        let (process, port) = start_on_free_port("mariadbd", &folder, command, Self::is_up).await;
        Self { process: Mutex::new(process), program, settings, port, folder }
    }

    /// The server sends the first packet.
    async fn is_up(port: u16) -> bool {
        match TcpStream::connect(local(port)).await {
            Ok(mut stream) => stream.read_u8().await.is_ok(),
            Err(_) => false,
        }
    }

    fn command(folder: &TempFolder, program: &PathBuf, port: u16, settings: &[String]) -> Command {
        let is_mysql = program.file_name().is_some_and(|name| name.to_string_lossy().contains("mysqld"));
        let mut command = Process::command_as(program, &privileges_in(folder, "mysql"));
        command
            .args(SETTINGS)
            .args(if is_mysql { &OF_MYSQL[..] } else { &OF_MARIADB[..] })
            .args(settings)
            .arg(format!("--port={port}"))
            .arg(format!("--datadir={}", folder.path().join("data").display()))
            .arg(format!("--init-file={}", folder.path().join("init.sql").display()))
            // The server removes files that look temporary at its start, including files of other
            // processes.
            .env("TMPDIR", folder.path());
        command
    }

    /// Kills the server, as a crash of it does.
    pub async fn crash(&self) {
        self.process().kill();
        until("its end", async || self.process().ended().is_some()).await;
    }

    /// Starts the server again, on the same port and with the same data.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub async fn restart(&self) {
        let port = self.port();
        let command = Self::command(&self.folder, &self.program, port, &self.settings);
        *self.process() = start_again("mariadbd", &self.folder, command, async || Self::is_up(port).await).await;
    }

    /// The URL of one of the databases.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("mysql://root@127.0.0.1:{}/{database}", self.port())
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

    /// The process id of the server.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process().pid()
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn program() -> Option<PathBuf> {
        find(Some("MARIADBD"), "mariadbd")
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
            assert!(mariadb.folder.path().join("data").join(name).is_dir(), "{name}");
        }
        let (pid, port) = (mariadb.pid(), mariadb.port());
        drop(mariadb);
        assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
        assert!(TcpStream::connect(local(port)).await.is_err());
    }
}
