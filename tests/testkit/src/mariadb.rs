use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
};

use tokio::{io::AsyncReadExt, net::TcpStream};

use crate::{
    postgres::{privileges_in, start_on_free_port},
    process::{Process, ReservedPort, TempFolder, find, local},
};

/// A `mariadbd` process with empty databases. The root user needs no password.
///
/// The environment variable `MARIADBD=/path` selects another program.
#[derive(Debug)]
pub struct MariaDb {
    process: Process,
    port: ReservedPort,
    _folder: TempFolder,
}

/// The settings of a server that starts in an empty folder, without the tables of an installation:
/// every user may do everything. The data need not survive a power failure: nothing waits for the
/// disk, which other tests use.
const SETTINGS: [&str; 14] = [
    "--no-defaults",
    "--skip-grant-tables",
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--skip-log-bin",
    "--max-connections=500",
    "--innodb-stats-persistent=OFF",
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=8M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-flush-method=nosync",
    "--debug-no-sync",
    "--socket=socket",
    "--pid-file=pid",
];

impl MariaDb {
    /// Returns whether `mariadbd` exists on this machine.
    #[must_use]
    pub fn is_available() -> bool {
        Self::program().is_some()
    }

    /// Starts a server with these databases and waits until it accepts connections.
    ///
    /// # Panics
    ///
    /// Panics if the server does not start or does not respond.
    pub async fn start(databases: &[&str]) -> Self {
        let program = Self::program().expect("check `MariaDb::is_available` first");
        let folder = TempFolder::new();
        let privileges = privileges_in(&folder, "mysql");
        let create: String =
            databases.iter().map(|name| format!("CREATE DATABASE IF NOT EXISTS `{name}`;\n")).collect();
        let (data, init) = (folder.path().join("data"), folder.path().join("init.sql"));
        fs::write(&init, create).expect("a file");
        fs::create_dir(&data).expect("a folder");
        fs::set_permissions(&data, Permissions::from_mode(0o777)).expect("its owner may");
        let command = |port| {
            let mut command = Process::command_as(&program, &privileges);
            command
                .args(SETTINGS)
                .arg(format!("--port={port}"))
                .arg(format!("--datadir={}", data.display()))
                .arg(format!("--init-file={}", init.display()))
                // The server removes files that look temporary at its start, including files of
                // other processes.
                .env("TMPDIR", folder.path());
            command
        };
        // The server sends the first packet.
        let is_up = async |port| match TcpStream::connect(local(port)).await {
            Ok(mut stream) => stream.read_u8().await.is_ok(),
            Err(_) => false,
        };
        let (process, port) = start_on_free_port("mariadbd", &folder, command, is_up).await;
        Self { process, port, _folder: folder }
    }

    /// The URL of one of the databases.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("mysql://root@127.0.0.1:{}/{database}", self.port())
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
            assert!(mariadb._folder.path().join("data").join(name).is_dir(), "{name}");
        }
        let (pid, port) = (mariadb.pid(), mariadb.port());
        drop(mariadb);
        assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
        assert!(TcpStream::connect(local(port)).await.is_err());
    }
}
