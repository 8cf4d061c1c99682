//! The checker, the services, and clients that report what they send and observe.

use std::{
    collections::HashMap,
    io::{self, BufRead, BufReader},
    net::SocketAddr,
    process::{ExitStatus, Stdio},
};

use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
};
use tower_lock_testkit::{Process, wait::soon};

use crate::{
    checker::Summary,
    client::{Clients, Observed, Request},
    report::{Reply, Report},
    reporter::Reporter,
};

/// The checker, and clients that report to it.
#[derive(Debug)]
pub struct Cluster {
    checker: ChildOutput,
    address: SocketAddr,
    service: &'static str,
    reporter: Reporter,
    clients: Clients,
}

/// A process of the service.
#[derive(Debug)]
pub struct Service {
    process: ChildOutput,
    instances: Vec<SocketAddr>,
}

/// The state of an instance: all zeros when it is idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Residue {
    /// Handlers and bodies that still exist.
    pub inside: usize,
    /// Keys that it holds.
    pub held: usize,
    /// Keys that it tracks.
    pub known: usize,
    /// Waiting calls.
    pub waiting: usize,
    /// Keys with data in the memory of its process.
    pub kept: usize,
}

/// The data that remains at the end of a service: all zeros after a graceful shutdown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShutdownReport {
    /// Keys still held at the end of the shutdown.
    pub holding: usize,
    /// Unplanned panics.
    pub panics: usize,
}

/// A process whose output is read line by line.
#[derive(Debug)]
struct ChildOutput {
    process: Process,
    lines: mpsc::UnboundedReceiver<String>,
}

// === impl Site ===

impl Cluster {
    /// Starts a checker with these arguments. `service` is the program under test.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub async fn start(checker: &str, service: &'static str, arguments: &[&str]) -> Self {
        let mut checker = ChildOutput::start(checker, arguments, &HashMap::new());
        let address = checker.listening().await;
        let reporter = Reporter::connect(address).await.expect("it listens");
        Self { checker, address, service, reporter, clients: Clients::new() }
    }

    /// Starts a service with these arguments, on the store of this URL or in its own memory.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub async fn service(&self, arguments: &[&str], store: Option<&str>) -> Service {
        let mut environment = HashMap::from([("CHECKER", self.address.to_string())]);
        environment.extend(store.map(|url| ("LOCK_URL", url.to_owned())));
        let number = arguments.get(1).and_then(|number| number.parse().ok()).unwrap_or(1);
        Service::start(self.service, arguments, &environment, number).await
    }

    /// Sends a request and waits for its response, or disconnects before it.
    ///
    /// # Panics
    ///
    /// Panics if there is no response for two minutes.
    pub async fn send(&self, instance: SocketAddr, request: &Request) -> Observed {
        let name = request.name.clone();
        self.reporter.report(Report::Request { request: name.clone() }).await;
        let what = format!("the end of {request:?} at {instance}");
        let observed = soon(&what, self.clients.send(instance, request)).await;
        let report = match &observed {
            Observed::Response { status, outcome, .. } => Report::Response {
                request: name,
                status: *status,
                outcome: outcome.as_deref().unwrap_or("-").to_owned(),
            },
            Observed::Left => Report::Left { request: name },
            Observed::Broken => Report::Broken { request: name },
        };
        self.reporter.report(report).await;
        observed
    }

    /// The summary of the checker, compared with its exit code.
    ///
    /// # Panics
    ///
    /// Panics if they differ.
    pub async fn finish(mut self) -> Summary {
        let Reply::Summary(json) = self.reporter.report(Report::Finish).await else { panic!("no summary") };
        let summary: Summary = serde_json::from_str(&json).expect("a summary");
        let code = self.checker.process.end().await.code();
        assert_eq!(code, Some(i32::from(!summary.violations.is_empty())), "{summary:#?}");
        let mut printed = String::new();
        while let Some(line) = self.checker.lines.recv().await {
            printed.push_str(&line);
        }
        assert_eq!(serde_json::from_str::<Summary>(&printed).expect("a summary"), summary, "its output");
        summary
    }
}

// === impl Service ===

impl Service {
    /// Starts a program that prints the addresses of this many instances.
    ///
    /// # Panics
    ///
    /// Panics if it does not start.
    pub(crate) async fn start(
        program: &str,
        arguments: &[&str],
        environment: &HashMap<&str, String>,
        number: usize,
    ) -> Self {
        let mut process = ChildOutput::start(program, arguments, environment);
        let mut instances = Vec::new();
        for _ in 0..number {
            instances.push(process.listening().await);
        }
        Self { process, instances }
    }

    /// The addresses of its instances.
    #[must_use]
    pub fn instances(&self) -> &[SocketAddr] {
        &self.instances
    }

    /// Its process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process.process
    }

    /// The sum over its instances; instances with a shared store count it once each.
    ///
    /// # Panics
    ///
    /// Panics without a response.
    pub async fn residue(&self) -> Residue {
        let mut all = Residue::default();
        for instance in &self.instances {
            let json = soon("a response", get(*instance, "/left")).await.expect("it listens");
            let Residue { inside, held, known, waiting, kept } = serde_json::from_str(&json).expect("JSON");
            all.inside += inside;
            all.held += held;
            all.known += known;
            all.waiting += waiting;
            all.kept += kept;
        }
        all
    }

    /// Ends it gracefully.
    ///
    /// # Panics
    ///
    /// Panics if it does not end, or with an error.
    pub async fn terminate(mut self) -> ShutdownReport {
        self.process.process.terminate();
        let status: ExitStatus = self.process.process.end().await;
        let report = self.process.line().await;
        assert!(status.success(), "{status}, {report}");
        serde_json::from_str(&report).expect("JSON")
    }
}

/// The response on a connection of its own.
async fn get(from: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(from).await?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}

// === impl Printing ===

impl ChildOutput {
    fn start(program: &str, arguments: &[&str], environment: &HashMap<&str, String>) -> Self {
        let mut command = Process::command(program);
        command.args(arguments).env_remove("LOCK_URL").envs(environment).stdin(Stdio::null()).stdout(Stdio::piped());
        let process = Process::start(command).unwrap_or_else(|error| panic!("{program}: {error}"));
        let stdout = BufReader::new(process.take_stdout().expect("piped"));
        let (lines, read) = mpsc::unbounded_channel();
        let read_all = move || stdout.lines().map_while(Result::ok).try_for_each(|line| lines.send(line));
        std::thread::spawn(read_all);
        Self { process, lines: read }
    }

    async fn line(&mut self) -> String {
        soon("a line", self.lines.recv()).await.expect("its output is open")
    }

    async fn listening(&mut self) -> SocketAddr {
        let line = self.line().await;
        let address = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("no address: {line}"));
        address.parse().expect("an address")
    }
}
