//! What a storm is made of: a checker, services, and clients that tell the checker what they ask and what they hear.

use std::{
    collections::HashMap,
    io::{self, BufRead, BufReader},
    net::SocketAddr,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
    time::timeout,
};
use tower_lock_faults::Process;

use crate::{
    checker::Summary,
    client::{Clients, Observed, Request},
    report::{Reply, Report},
    reporter::Reporter,
};

/// Longer than anything takes here, on a machine that does something else as well.
const TIMEOUT: Duration = Duration::from_secs(120);

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

/// What an instance has at a moment: all zeros when nobody wants anything of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Residue {
    /// Handlers and bodies of theirs that are there still, whoever drives them.
    pub inside: usize,
    /// Keys it holds.
    pub held: usize,
    /// Keys it knows something of.
    pub known: usize,
    /// Calls that wait.
    pub waiting: usize,
    /// Keys that something is kept of in the memory of its process.
    pub kept: usize,
}

/// What a service leaves behind: all zeros, if it ends in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShutdownReport {
    /// Keys that were still held when its patience was at its end.
    pub holding: usize,
    /// Tasks that were still there when it had nothing left to do.
    pub tasks: usize,
    /// Panics that nobody had planned.
    pub panics: usize,
}

/// A process whose lines are read as they come.
#[derive(Debug)]
struct ChildOutput {
    process: Process,
    lines: mpsc::UnboundedReceiver<String>,
}

// === impl Site ===

impl Cluster {
    /// Starts a checker, with these arguments. `service` is the program that is to be refereed.
    ///
    /// # Panics
    ///
    /// It does not start.
    pub async fn start(checker: &str, service: &'static str, arguments: &[&str]) -> Self {
        let mut checker = ChildOutput::start(checker, arguments, &HashMap::new());
        let address = checker.listening().await;
        let reporter = Reporter::connect(address).await.expect("it listens");
        Self { checker: checker, address, service, reporter, clients: Clients::new() }
    }

    /// Starts a service, with these arguments, on this Redis or in its own memory.
    ///
    /// # Panics
    ///
    /// It does not start.
    pub async fn service(&self, arguments: &[&str], redis_url: Option<&str>) -> Service {
        let mut environment = HashMap::from([("CHECKER", self.address.to_string())]);
        environment.extend(redis_url.map(|url| ("REDIS_URL", url.to_owned())));
        let mut process = ChildOutput::start(self.service, arguments, &environment);
        let number = arguments.get(1).and_then(|number| number.parse().ok()).unwrap_or(1);
        let mut instances = Vec::new();
        for _ in 0..number {
            instances.push(process.listening().await);
        }
        Service { process, instances }
    }

    /// Sends a request and waits for its answer, or leaves before.
    ///
    /// # Panics
    ///
    /// There is no answer for two minutes: somebody hangs.
    pub async fn send(&self, instance: SocketAddr, ask: &Request) -> Observed {
        let request = ask.name.clone();
        self.reporter.report(Report::Request { request: request.clone() }).await;
        let observed = timeout(TIMEOUT, self.clients.send(instance, ask)).await;
        let observed = observed.unwrap_or_else(|_| panic!("{ask:?} at {instance}: no answer"));
        let report = match &observed {
            Observed::Answer { status, outcome, .. } => {
                Report::Response { request, status: *status, outcome: outcome.as_deref().unwrap_or("-").to_owned() }
            }
            Observed::Left => Report::Left { request },
            Observed::Broken => Report::Broken { request },
        };
        self.reporter.report(report).await;
        observed
    }

    /// The checker's word, and whether its exit says the same.
    ///
    /// # Panics
    ///
    /// It does not.
    pub async fn finish(mut self) -> Summary {
        let Reply::Summary(json) = self.reporter.report(Report::Finish).await else { panic!("no summary") };
        let summary: Summary = serde_json::from_str(&json).expect("a summary");
        let code = self.checker.process.end().await.code();
        assert_eq!(code, Some(i32::from(!summary.violations.is_empty())), "{summary:#?}");
        let mut printed = String::new();
        while let Some(line) = self.checker.lines.recv().await {
            printed.push_str(&line);
        }
        assert_eq!(serde_json::from_str::<Summary>(&printed).expect("a summary"), summary, "what it printed");
        summary
    }
}

// === impl Service ===

impl Service {
    /// Where its instances listen.
    #[must_use]
    pub fn instances(&self) -> &[SocketAddr] {
        &self.instances
    }

    /// Its process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process.process
    }

    /// What its instances have now, all together; those that share a store count it once each.
    ///
    /// # Panics
    ///
    /// It does not say.
    pub async fn residue(&self) -> Residue {
        let mut all = Residue::default();
        for instance in &self.instances {
            let json = timeout(TIMEOUT, get(*instance, "/left")).await.expect("an answer").expect("it listens");
            let Residue { inside, held, known, waiting, kept } = serde_json::from_str(&json).expect("JSON");
            all.inside += inside;
            all.held += held;
            all.known += known;
            all.waiting += waiting;
            all.kept += kept;
        }
        all
    }

    /// Ends it in order.
    ///
    /// # Panics
    ///
    /// It does not end, or not well.
    pub async fn terminate(mut self) -> ShutdownReport {
        self.process.process.terminate();
        let status: ExitStatus = self.process.process.end().await;
        let report = self.process.line().await;
        assert!(status.success(), "{status}, {report}");
        serde_json::from_str(&report).expect("JSON")
    }
}

/// What is answered, on a connection that nobody else needs.
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
        command.args(arguments).env_remove("REDIS_URL").envs(environment).stdin(Stdio::null()).stdout(Stdio::piped());
        let process = Process::start(command).unwrap_or_else(|error| panic!("{program}: {error}"));
        let stdout = BufReader::new(process.take_stdout().expect("piped"));
        let (lines, read) = mpsc::unbounded_channel();
        let read_all = move || stdout.lines().map_while(Result::ok).try_for_each(|line| lines.send(line));
        std::thread::spawn(read_all);
        Self { process, lines: read }
    }

    async fn line(&mut self) -> String {
        timeout(TIMEOUT, self.lines.recv()).await.expect("it says something").expect("it lives")
    }

    async fn listening(&mut self) -> SocketAddr {
        let line = self.line().await;
        let address = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("not where it listens: {line}"));
        address.parse().expect("an address")
    }
}
