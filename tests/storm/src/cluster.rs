//! What a storm is made of: a referee, services, and clients that tell the referee what they ask and what they hear.

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
    client::{Ask, Clients, Seen},
    report::{Answer, Report},
    reporter::Reporter,
};

/// Longer than anything takes here, on a machine that does something else as well.
const AT_MOST: Duration = Duration::from_secs(120);

/// The referee, and clients that report to it.
#[derive(Debug)]
pub struct Site {
    referee: Printing,
    address: SocketAddr,
    service: &'static str,
    reporter: Reporter,
    clients: Clients,
}

/// A process of the service.
#[derive(Debug)]
pub struct Service {
    process: Printing,
    instances: Vec<SocketAddr>,
}

/// What an instance has at a moment: all zeros when nobody wants anything of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
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
pub struct Farewell {
    /// Keys that were still held when its patience was at its end.
    pub holding: usize,
    /// Tasks that were still there when it had nothing left to do.
    pub tasks: usize,
    /// Panics that nobody had planned.
    pub panics: usize,
}

/// A process whose lines are read as they come.
#[derive(Debug)]
struct Printing {
    process: Process,
    lines: mpsc::UnboundedReceiver<String>,
}

// === impl Site ===

impl Site {
    /// Starts a referee, with these arguments. `service` is the program that is to be refereed.
    ///
    /// # Panics
    ///
    /// It does not start.
    pub async fn start(referee: &str, service: &'static str, arguments: &[&str]) -> Self {
        let mut referee = Printing::start(referee, arguments, &HashMap::new());
        let address = referee.listening().await;
        let reporter = Reporter::connect(address).await.expect("it listens");
        Self { referee, address, service, reporter, clients: Clients::new() }
    }

    /// Starts a service, with these arguments, on this Redis or in its own memory.
    ///
    /// # Panics
    ///
    /// It does not start.
    pub async fn service(&self, arguments: &[&str], redis_url: Option<&str>) -> Service {
        let mut environment = HashMap::from([("REFEREE", self.address.to_string())]);
        environment.extend(redis_url.map(|url| ("REDIS_URL", url.to_owned())));
        let mut process = Printing::start(self.service, arguments, &environment);
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
    pub async fn ask(&self, instance: SocketAddr, ask: &Ask) -> Seen {
        let request = ask.name.clone();
        self.reporter.report(Report::Ask { request: request.clone() }).await;
        let seen = timeout(AT_MOST, self.clients.ask(instance, ask)).await;
        let seen = seen.unwrap_or_else(|_| panic!("{ask:?} at {instance}: no answer"));
        let report = match &seen {
            Seen::Answer { status, outcome, .. } => {
                Report::Answer { request, status: *status, outcome: outcome.as_deref().unwrap_or("-").to_owned() }
            }
            Seen::Left => Report::Gone { request },
            Seen::Broken => Report::Broken { request },
        };
        self.reporter.report(report).await;
        seen
    }

    /// The referee's word, and whether its exit says the same.
    ///
    /// # Panics
    ///
    /// It does not.
    pub async fn finish(mut self) -> Summary {
        let Answer::Summary(json) = self.reporter.report(Report::Finish).await else { panic!("no summary") };
        let summary: Summary = serde_json::from_str(&json).expect("a summary");
        let code = self.referee.process.end().await.code();
        assert_eq!(code, Some(i32::from(!summary.violations.is_empty())), "{summary:#?}");
        let mut printed = String::new();
        while let Some(line) = self.referee.lines.recv().await {
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
    pub async fn left(&self) -> Left {
        let mut all = Left::default();
        for instance in &self.instances {
            let json = timeout(AT_MOST, get(*instance, "/left")).await.expect("an answer").expect("it listens");
            let Left { inside, held, known, waiting, kept } = serde_json::from_str(&json).expect("JSON");
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
    pub async fn terminate(mut self) -> Farewell {
        self.process.process.terminate();
        let status: ExitStatus = self.process.process.end().await;
        let farewell = self.process.line().await;
        assert!(status.success(), "{status}, {farewell}");
        serde_json::from_str(&farewell).expect("JSON")
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

impl Printing {
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
        timeout(AT_MOST, self.lines.recv()).await.expect("it says something").expect("it lives")
    }

    async fn listening(&mut self) -> SocketAddr {
        let line = self.line().await;
        let address = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("not where it listens: {line}"));
        address.parse().expect("an address")
    }
}
