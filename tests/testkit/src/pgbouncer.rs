use std::{fs, path::PathBuf};

use tokio::net::TcpStream;

use crate::{
    postgres::{PostgresServer, log, privileges_in, start_on_free_port},
    process::{Process, ReservedPort, TempFolder, find, local},
};

/// A `pgbouncer` process in front of a [`PostgresServer`]: transactions of all clients share a few
/// connections to the server.
///
/// The environment variable `PGBOUNCER=/path` selects another program.
#[derive(Debug)]
pub struct PgBouncer {
    process: Process,
    port: ReservedPort,
    folder: TempFolder,
}

impl PgBouncer {
    /// Fewer than the connections of the stores of a test: they share.
    const SERVER_CONNECTIONS: u32 = 4;

    /// Returns whether `pgbouncer` exists on this machine.
    #[must_use]
    pub fn is_available() -> bool {
        Self::program().is_some()
    }

    /// Starts a pooler, and waits until it accepts connections.
    ///
    /// # Panics
    ///
    /// Panics if the pooler does not start or does not respond.
    pub async fn start(server: &PostgresServer) -> Self {
        let program = Self::program().expect("check `PgBouncer::is_available` first");
        let folder = TempFolder::create();
        let privileges = privileges_in(&folder, "postgres");
        let settings = folder.path().join("settings");
        let command = |port| {
            fs::write(&settings, Self::settings(server.port(), port)).expect("a file");
            let mut command = Process::command_as(&program, &privileges);
            command.arg(&settings);
            command
        };
        let is_up = async |port| TcpStream::connect(local(port)).await.is_ok();
        let (process, port) = start_on_free_port("pgbouncer", &folder, command, is_up).await;
        Self { process, port, folder }
    }

    fn settings(server: u16, port: u16) -> String {
        let connections = Self::SERVER_CONNECTIONS;
        format!(
            "[databases]\n\
             postgres = host=127.0.0.1 port={server} user=postgres\n\
             [pgbouncer]\n\
             listen_addr = 127.0.0.1\n\
             listen_port = {port}\n\
             unix_socket_dir =\n\
             auth_type = any\n\
             pool_mode = transaction\n\
             default_pool_size = {connections}\n\
             max_client_conn = 1000\n\
             server_login_retry = 0.1\n"
        )
    }

    /// The URL of the database, as the superuser.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port.number())
    }

    /// The text that the pooler has logged.
    #[must_use]
    pub fn log(&self) -> String {
        log(&self.folder)
    }

    /// The process id of the pooler.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn program() -> Option<PathBuf> {
        find(Some("PGBOUNCER"), "pgbouncer")
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::process::skipped;

    #[tokio::test]
    async fn pgbouncer_serves_its_database_and_stops_on_drop() {
        if !PostgresServer::is_available() || !PgBouncer::is_available() {
            return skipped("pgbouncer itself", "postgres or pgbouncer");
        }
        let server = PostgresServer::start(&[]).await;
        let pooler = PgBouncer::start(&server).await;
        let mut stream = TcpStream::connect(local(pooler.port.number())).await.expect("it listens");
        // The length of the message, version 3, and the parameters of the session.
        let startup = b"\0\0\0\x29\0\x03\0\0user\0postgres\0database\0postgres\0\0";
        stream.write_all(startup).await.expect("a connection");
        assert_eq!(stream.read_u8().await.expect("a reply"), b'R', "authenticated: {}", pooler.log());
        let pid = pooler.pid();
        drop(pooler);
        assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
    }
}
