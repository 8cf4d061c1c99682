//! What a storm is made of: a referee, services, and clients that tell the referee what they ask and what they hear.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use axum::{
    body::Body,
    http::{Request, header},
};
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::{Deserialize, Serialize};
use tokio::{sync::mpsc, time::timeout};
use tower_lock_faults::Process;

use crate::{
    referee::Summary,
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
    client: Client<HttpConnector, Body>,
}

/// A process of the service.
#[derive(Debug)]
pub struct Service {
    process: Printing,
    instances: Vec<SocketAddr>,
}

/// What a service leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Farewell {
    /// Keys that were still held when its patience was at its end.
    pub holding: usize,
    /// Tasks that were still there when it had nothing left to do.
    pub tasks: usize,
}

/// What a client saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// An answer.
    Answer {
        /// Its status.
        status: u16,
        /// `outcome` of its problem details.
        outcome: Option<String>,
        /// The last word of their `type`.
        kind: Option<String>,
    },
    /// It left before there was one.
    Left,
    /// The connection broke.
    Broken,
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
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { referee, address, service, reporter, client }
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
    pub async fn ask(&self, instance: SocketAddr, path: &str, name: &str, leave_after: Option<Duration>) -> Seen {
        self.reporter.report(Report::Ask { request: name.to_owned() }).await;
        let request = Request::post(format!("http://{instance}{path}")).header("x-request", name).body(Body::empty());
        let answer = self.client.request(request.expect("a request"));
        let answer = async {
            let answer = answer.await.ok()?;
            let status = answer.status().as_u16();
            let is_a_problem =
                answer.headers().get(header::CONTENT_TYPE).is_some_and(|is| is == "application/problem+json");
            let body = answer.into_body().collect().await.ok()?.to_bytes();
            let field = |field| {
                let problem: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
                Some(problem.get(field)?.as_str()?.to_owned())
            };
            let (outcome, kind) = if is_a_problem { (field("outcome"), field("type")) } else { (None, None) };
            let kind = kind.and_then(|kind| Some(kind.rsplit(':').next()?.to_owned()));
            Some(Seen::Answer { status, outcome, kind })
        };
        let seen = match (timeout(leave_after.unwrap_or(AT_MOST), answer).await, leave_after) {
            (Ok(seen), _) => seen.unwrap_or(Seen::Broken),
            (Err(_), Some(_)) => Seen::Left,
            (Err(_), None) => panic!("{name}, {path} at {instance}: no answer"),
        };
        let request = name.to_owned();
        let report = match &seen {
            Seen::Answer { status, outcome, .. } => {
                Report::Answer { request, status: *status, outcome: outcome.as_deref().unwrap_or("-").to_owned() }
            }
            Seen::Left | Seen::Broken => Report::Gone { request },
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
