//! The examples as processes, and their databases.

use std::{
    env,
    path::PathBuf,
    process::{ExitStatus, Stdio},
};

use axum::{
    body::Body,
    http::{Method, Request},
};
use futures_util::future::join_all;
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;
use sqlx::{AnyConnection, Connection};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::OnceCell,
};
use tower_lock_testkit::{MariaDb, PostgresServer, skipped, wait::soon};

/// The example, built as the tests are.
pub(crate) async fn example(name: &str) -> Command {
    static BUILT: OnceCell<PathBuf> = OnceCell::const_new();
    let folder = BUILT
        .get_or_init(|| async {
            if let Some(built) = env::var_os("EXAMPLES") {
                return built.into();
            }
            let features = [
                ("console", cfg!(feature = "console")),
                ("mysql", cfg!(feature = "mysql")),
                ("postgres", cfg!(feature = "postgres")),
                ("redis", cfg!(feature = "redis")),
                ("sessions", cfg!(feature = "sessions")),
            ];
            let enabled: Vec<_> = features.iter().filter(|feature| feature.1).map(|feature| feature.0).collect();
            // As the tests are built: other features would rebuild all dependencies.
            let selection = if enabled.len() == features.len() {
                vec!["--workspace".into(), "--all-features".into()]
            } else {
                vec![format!("--features={}", enabled.join(","))]
            };
            let mut build = Command::new(env!("CARGO"));
            // Cargo sets them for this test. They would rebuild `ring`, and all that depends on it.
            for (variable, _) in env::vars_os() {
                if variable
                    .to_str()
                    .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"))
                {
                    build.env_remove(variable);
                }
            }
            let built = build
                .args(["build", "--quiet"])
                .arg("--examples")
                .args(selection)
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .status()
                .await
                .expect("cargo runs");
            assert!(built.success(), "the examples do not build");
            let tests = env::current_exe().expect("a path");
            let target = tests.ancestors().nth(3).expect("target/debug/deps/it");
            target.join("debug/examples")
        })
        .await;
    let mut command = Command::new(folder.join(name));
    for variable in ["DATABASE_URL", "LOCK_URL", "REDIS_URL", "MAIL_SERVER"] {
        command.env_remove(variable);
    }
    command.env("PORT", "0").kill_on_drop(true);
    command
}

pub(crate) struct Service {
    child: Child,
    url: String,
    client: Client<HttpConnector, Body>,
}

impl Service {
    pub(crate) async fn start(mut command: Command) -> Self {
        let mut child = command.arg("--serve").stdout(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = soon("a first line", lines.next_line()).await.expect("text").expect("a line");
        let url = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("no address: {line}")).to_owned();
        // Later output is read and discarded: a full pipe would block it.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Self { child, url, client: Client::builder(TokioExecutor::new()).build_http() }
    }

    /// Host and port.
    pub(crate) fn address(&self) -> &str {
        self.url.trim_start_matches("http://")
    }

    pub(crate) async fn request(&self, method: Method, path: &str, body: Value) -> (u16, Value) {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url))
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))
            .expect("a request");
        let response = soon("a response", self.client.request(request)).await.expect("it serves");
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    pub(crate) async fn at_once(&self, times: usize, path: &str, body: Value) -> Vec<u16> {
        let mut statuses: Vec<_> = join_all((0..times).map(|_| self.request(Method::POST, path, body.clone())))
            .await
            .into_iter()
            .map(|(status, _)| status)
            .collect();
        statuses.sort_unstable();
        statuses
    }

    pub(crate) async fn terminate(self) -> ExitStatus {
        self.signal("TERM").await;
        self.exit().await
    }

    pub(crate) async fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id().expect("it runs"));
        assert!(Command::new("sh").args(["-c", &kill]).status().await.expect("sh runs").success());
    }

    pub(crate) async fn exit(mut self) -> ExitStatus {
        soon("its end", self.child.wait()).await.expect("it ends")
    }
}

/// A SQLite file, removed on drop.
pub(crate) struct File(PathBuf);

impl File {
    pub(crate) fn new(name: &str) -> Self {
        sqlx::any::install_default_drivers();
        Self(env::temp_dir().join(format!("tower-lock-{name}-{}.db", std::process::id())))
    }

    pub(crate) fn url(&self) -> String {
        format!("sqlite://{}", self.0.display())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        for ending in ["", "-wal", "-shm"] {
            drop(std::fs::remove_file(format!("{}{ending}", self.0.display())));
        }
    }
}

/// An empty database of each kind that the examples support, on servers of all tests.
pub(crate) struct Databases {
    file: File,
    mariadb: Option<String>,
    postgres: Option<String>,
}

impl Databases {
    pub(crate) async fn new(test: &str) -> Self {
        static MARIADB: OnceCell<MariaDb> = OnceCell::const_new();
        static POSTGRES: OnceCell<PostgresServer> = OnceCell::const_new();
        let has = |server: &str, has_feature: bool, is_available: bool| {
            if !(has_feature && is_available) {
                skipped(&format!("{test} on {server}"), if has_feature { server } else { "the feature for it" });
            }
            has_feature && is_available
        };
        let execute = async |url: &str, statement: String| {
            let mut connection = AnyConnection::connect(url).await.expect(url);
            sqlx::raw_sql(&statement).execute(&mut connection).await.expect(&statement);
            connection.close().await.expect(url);
        };
        let mut databases = Self { file: File::new(test), mariadb: None, postgres: None };
        if has("MariaDB", cfg!(feature = "mysql"), MariaDb::is_available()) {
            let server = MARIADB.get_or_init(|| MariaDb::installed(&["any"], &[])).await;
            execute(&server.url("any"), format!("CREATE DATABASE `{test}`")).await;
            databases.mariadb = Some(server.url(test));
        }
        if has("PostgreSQL", cfg!(feature = "postgres"), PostgresServer::is_available()) {
            let server = POSTGRES.get_or_init(|| PostgresServer::start(&["max_connections=300"])).await;
            // A user finds the tables in the schema with its name.
            let user = format!("CREATE ROLE \"{test}\" LOGIN SUPERUSER; CREATE SCHEMA AUTHORIZATION \"{test}\"");
            execute(&server.url(), user).await;
            databases.postgres = Some(server.url_of(test));
        }
        databases
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        [Some(self.file.url()), self.mariadb.clone(), self.postgres.clone()].into_iter().flatten().collect()
    }

    /// The database in MariaDB.
    pub(crate) fn mysql(&self) -> Option<&str> {
        self.mariadb.as_deref()
    }

    /// The database in PostgreSQL.
    pub(crate) fn postgres(&self) -> Option<&str> {
        self.postgres.as_deref()
    }
}
