//! A storm: services, a proxy in front of their Redis, and thousands of concurrent clients.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    time::Duration,
};

use futures_util::{Stream, StreamExt, future::join_all, stream};
use tokio::{
    sync::{Semaphore, SemaphorePermit, oneshot},
    time::{Instant, interval, sleep},
};
use tower_lock_testkit::{Proxy, RedisServer, wait::until};

use crate::{
    checker::Summary,
    client::{Observed, Request},
    cluster::{Cluster, Residue, Service, ShutdownReport},
    database::Database,
    workload::{Patience, Workload},
};

/// The environment of a storm.
#[derive(Debug)]
pub struct Environment {
    /// `None`: a store in memory, or elsewhere.
    pub redis: Option<RedisServer>,
    /// Between the services and their Redis.
    pub proxy: Option<Proxy>,
    /// The database of the services.
    pub database: Option<Database>,
    /// The services, in the order of their names.
    pub services: Vec<Service>,
    /// Whether a service gets no more requests.
    pub leaving: Vec<AtomicBool>,
    /// The seed of the storm.
    pub seed: u64,
    /// The requests with a response of 200 so far.
    served: AtomicU64,
    pub(crate) cluster: Cluster,
}

/// What the clients observed, and the duration of the longest request.
#[derive(Debug, Default)]
pub struct Storm {
    observed: Vec<(Workload, Observed)>,
    longest: Duration,
    /// The responses of 200, in their order.
    served: Vec<Served>,
}

#[derive(Clone, Copy, Debug)]
struct Served {
    subject: u64,
    asked: Instant,
    answered: Instant,
}

/// The observations of the clients and the summary of the checker.
#[derive(Debug)]
pub struct Outcome {
    /// The requests and their observations.
    pub observed: Vec<(Workload, Observed)>,
    /// The duration of the longest request.
    pub longest: Duration,
    /// The number of faults between the services and their Redis.
    pub faults: u64,
    /// The number of connections there.
    pub connections: u64,
    /// The summary of the checker.
    pub summary: Summary,
}

/// The number of concurrent requests.
const CONCURRENCY: usize = 200;

/// A short storm sends this many requests at once, and then pauses: its processes compete for keys,
/// and not for the cores. A long one sends as many as the services reply to.
const BURST: usize = 40;
const PAUSE: Duration = Duration::from_millis(100);

/// Long enough to be observable, and short enough for a storm.
const LOCK_DELAY: &str = "--lock-delay-ms=100";

const LEASE: Duration = Duration::from_secs(30);

/// How many times as many requests and faults a storm has, compared to a short one: `SCALE`, or 1.
///
/// # Panics
///
/// Panics if `SCALE` is not a number.
#[must_use]
pub fn scale() -> u64 {
    std::env::var("SCALE").map_or(1, |scale| scale.parse().expect("a number"))
}

/// The turn of a storm: two short ones run at a time, and one long one. More would only compete for
/// the cores.
///
/// # Panics
///
/// Never: the semaphore stays open.
pub async fn turn() -> SemaphorePermit<'static> {
    static TURNS: Semaphore = Semaphore::const_new(2);
    TURNS.acquire_many(if scale() == 1 { 1 } else { 2 }).await.expect("open")
}

/// The seed of this run, printed to repeat it: `SEED`, or a random one.
///
/// # Panics
///
/// Panics if `SEED` is not a number.
#[must_use]
pub fn seed() -> u64 {
    let seed = std::env::var("SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().expect("a number"));
    println!("SEED={seed}");
    seed
}

// === impl Environment ===

impl Environment {
    /// Starts processes with these flags: on a Redis behind a proxy, or one process with so many
    /// instances, which share a store in memory.
    ///
    /// # Panics
    ///
    /// Panics if a process does not start.
    pub async fn new(
        (checker, service): (&str, &'static str),
        redis: Option<RedisServer>,
        processes: usize,
        flags: &[&str],
        seed: u64,
    ) -> Self {
        let proxy = match &redis {
            Some(redis) => Some(Proxy::start(redis.address()).await),
            None => None,
        };
        let cluster = Cluster::start(checker, service, &[]).await;
        let url = proxy.as_ref().map(Proxy::url);
        let services = start(&cluster, url.as_deref(), processes, flags).await;
        let leaving = services.iter().map(|_| AtomicBool::new(false)).collect();
        Self { redis, proxy, database: None, services, leaving, seed, served: AtomicU64::new(0), cluster }
    }

    /// Starts four processes with these flags, whose store has this URL.
    ///
    /// # Panics
    ///
    /// Panics if a process does not start.
    pub async fn at((checker, service): (&str, &'static str), url: &str, flags: &[&str], seed: u64) -> Self {
        Self::of_processes((checker, service), url, 4, flags, seed).await
    }

    /// Starts processes with these flags on this database.
    ///
    /// # Panics
    ///
    /// Panics if a process does not start.
    pub async fn on(
        database: Database,
        programs: (&str, &'static str),
        processes: usize,
        flags: &[&str],
        seed: u64,
    ) -> Self {
        let environment = Self::of_processes(programs, &database.url(), processes, flags, seed).await;
        Self { database: Some(database), ..environment }
    }

    async fn of_processes(
        (checker, service): (&str, &'static str),
        url: &str,
        processes: usize,
        flags: &[&str],
        seed: u64,
    ) -> Self {
        let cluster = Cluster::start(checker, service, &[]).await;
        let services = start(&cluster, Some(url), processes, flags).await;
        let leaving = services.iter().map(|_| AtomicBool::new(false)).collect();
        let (redis, proxy, database, served) = (None, None, None, AtomicU64::new(0));
        Self { redis, proxy, database, services, leaving, seed, served, cluster }
    }

    /// Its Redis.
    ///
    /// # Panics
    ///
    /// Panics without one.
    pub fn redis(&self) -> &RedisServer {
        self.redis.as_ref().expect("an environment with a Redis")
    }

    /// Its database.
    ///
    /// # Panics
    ///
    /// Panics without one.
    pub fn database(&self) -> &Database {
        self.database.as_ref().expect("an environment with a database")
    }

    /// The proxy in front of its Redis.
    ///
    /// # Panics
    ///
    /// Panics without one.
    pub fn proxy(&self) -> &Proxy {
        self.proxy.as_ref().expect("an environment with a Redis")
    }

    /// Sends this many requests, times [`scale`].
    ///
    /// # Panics
    ///
    /// Panics if no service is left, a request has no response for two minutes, or a waiter no
    /// grant for one.
    pub async fn storm(&self, requests: u64) -> Storm {
        self.send(stream::iter(Workload::generate(self.seed, requests * scale()))).await
    }

    /// Sends requests until `end` is ready, each changed by this function.
    ///
    /// # Panics
    ///
    /// As [`storm`](Self::storm).
    pub async fn storm_until(&self, change: fn(Workload) -> Workload, end: impl Future<Output = ()>) -> Storm {
        let workloads = Workload::generate(self.seed, u64::MAX).map(change);
        let (ended, end_of_requests) = oneshot::channel::<()>();
        let requests = self.send(stream::iter(workloads).take_until(end_of_requests));
        // Beside the requests: their stream is not polled while all of them wait.
        let end = async {
            end.await;
            drop(ended);
        };
        tokio::join!(requests, end).0
    }

    /// For a storm with slow handlers and four processes: kills one at which requests wait, and
    /// stops another one for longer than leases of three seconds.
    pub async fn kill_and_stop(&self) {
        // By then handlers of seconds hold a key in six: their waiters are still there at the kill.
        sleep(Duration::from_secs(2)).await;
        until("requests wait at a process", async || self.services[3].residue().await.waiting >= 5).await;
        self.leaving[3].store(true, SeqCst);
        self.services[3].process().kill();
        self.services[1].process().freeze();
        sleep(Duration::from_secs(5)).await;
        self.services[1].process().thaw();
    }

    /// The number of requests with a response of 200 so far.
    pub fn served(&self) -> u64 {
        self.served.load(SeqCst)
    }

    async fn send(&self, workloads: impl Stream<Item = Workload>) -> Storm {
        let ticks = stream::unfold(interval(PAUSE), async |mut ticks| {
            ticks.tick().await;
            Some((BURST, ticks))
        });
        let bursts = if scale() == 1 { ticks.left_stream() } else { stream::repeat(BURST).right_stream() };
        let pace = bursts.flat_map(|burst| stream::iter(0..burst));
        let requests = workloads.zip(pace).map(|(workload, _)| {
            let services = self.services.iter().zip(&self.leaving);
            let alive = services
                .filter(|(service, leaving)| !leaving.load(SeqCst) && service.process().ended().is_none())
                .map(|(service, _)| service);
            let alive: Vec<_> = alive.collect();
            let instance = alive[workload.instance % alive.len()].instances()[0];
            async move {
                let asked = Instant::now();
                let observed = self.cluster.send(instance, &Request::from(&workload)).await;
                // Fails at once: with a key that is never released each waiter would take a minute.
                assert!(!wait_timed_out(&workload, &observed), "a minute was not enough for {workload:?}");
                self.served.fetch_add(u64::from(has_status(&observed, 200)), SeqCst);
                (workload, observed, asked, Instant::now())
            }
        });
        let observed: Vec<_> = requests.buffer_unordered(CONCURRENCY).collect().await;
        let longest = observed.iter().map(|(_, _, asked, answered)| *answered - *asked).max().unwrap_or_default();
        let responses = observed.iter().filter(|(_, observed, ..)| has_status(observed, 200));
        let mut served: Vec<_> = responses
            .map(|(Workload { subject, .. }, _, asked, answered)| Served {
                subject: *subject,
                asked: *asked,
                answered: *answered,
            })
            .collect();
        served.sort_unstable_by_key(|served| served.answered);
        let observed = observed.into_iter().map(|(workload, observed, ..)| (workload, observed)).collect();
        Storm { observed, longest, served }
    }

    /// Checks that nothing is left: no handlers, keys and waiters while the services run, and
    /// nothing at all after their graceful shutdown.
    ///
    /// # Panics
    ///
    /// Panics if anything is left.
    pub async fn end(self, storm: Storm) -> Outcome {
        let Self { redis, proxy, database, cluster, services, .. } = self;
        // Except for killed services.
        let living = || services.iter().filter(|service| service.process().ended().is_none());
        until("a service with nothing left to do", async || {
            join_all(living().map(Service::residue)).await.iter().all(|left| *left == Residue::default())
        })
        .await;
        if let Some(redis) = &redis {
            let left = async || {
                let keys = redis.command(&["KEYS", "*"]).await;
                keys.texts()
                    .into_iter()
                    .filter(|key| *key != "tower-lock:lock:f")
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            };
            until("free keys leave nothing", async || left().await.is_empty()).await;
        }
        if let Some(database) = &database {
            database.is_left_clean().await;
        }
        for service in services.into_iter().filter(|service| service.process().ended().is_none_or(|end| end.success()))
        {
            assert_eq!(service.terminate().await, ShutdownReport::default());
        }
        if let (Some(redis), Some(proxy)) = (&redis, &proxy) {
            assert_eq!(redis.command(&["PUBSUB", "CHANNELS"]).await.texts(), [""; 0]);
            until("only this connection is left", async || {
                redis.command(&["CLIENT", "LIST"]).await.text().expect("text").lines().count() == 1
            })
            .await;
            // A connection of an ended process may still be opening.
            until("no connection is left", async || proxy.connections().is_empty()).await;
        }
        let (faults, connections) = proxy.map_or((0, 0), |proxy| (proxy.fault_count(), proxy.arrived()));
        if let Some(database) = &database {
            database.has_no_sessions().await;
        }
        Outcome {
            observed: storm.observed,
            longest: storm.longest,
            faults,
            connections,
            summary: cluster.finish().await,
        }
    }
}

async fn start(cluster: &Cluster, url: Option<&str>, processes: usize, flags: &[&str]) -> Vec<Service> {
    // Processes do not share memory.
    let (processes, instances) = if url.is_some() { (processes, 1) } else { (1, processes) };
    let (names, instances) = (["a", "b", "c", "d"][..processes].iter(), instances.to_string());
    join_all(names.map(async |name| {
        let arguments: Vec<_> = [name, &*instances, LOCK_DELAY].into_iter().chain(flags.iter().copied()).collect();
        cluster.service(&arguments, url).await
    }))
    .await
}

// === impl Storm ===

impl Storm {
    /// The longest time without a response for a subject, while the next one was waited for.
    ///
    /// # Panics
    ///
    /// Panics if none was served.
    #[must_use]
    pub fn longest_gap(&self, subject: u64) -> Duration {
        let served: Vec<_> = self.served.iter().filter(|served| served.subject == subject).collect();
        let gaps = served.windows(2).map(|pair| pair[1].answered - pair[0].answered.max(pair[1].asked));
        gaps.max().expect("some were served")
    }
}

// === impl Outcome ===

impl Outcome {
    /// The number of requests that match.
    #[must_use]
    pub fn count(&self, matches: impl Fn(&Workload, &Observed) -> bool) -> usize {
        self.observed.iter().filter(|(workload, observed)| matches(workload, observed)).count()
    }

    /// Checks what must hold under any faults, except for these violations.
    ///
    /// # Panics
    ///
    /// Panics if a check fails.
    pub fn check(&self, excused: &[&str]) {
        let Self { observed, longest, faults, connections, summary } = self;
        let mut problems = BTreeMap::<_, u64>::new();
        for (_, observed) in observed {
            if let Observed::Response { kind: Some(kind), .. } = observed {
                *problems.entry(kind).or_default() += 1;
            }
        }
        println!(
            "{faults} faults on {connections} connections, the longest took {longest:?}, {problems:?}, {}",
            serde_json::to_string(summary).expect("plain data")
        );
        let Summary { violations, first, .. } = summary;
        assert!(violations.keys().all(|name| excused.contains(&&**name)), "{violations:?}: {first:#?}");
        assert_eq!(summary.asked, number(observed.len()));
        let heard = summary.answered.values().sum::<u64>() + summary.left + summary.broken;
        assert_eq!(heard, summary.asked, "every request has an outcome");
        // Sections belong to successful requests, or to those with an unknown outcome.
        let unknown = summary.left + summary.broken + [412, 500, 503].map(|is| summary.answers(is)).iter().sum::<u64>();
        let ran = summary.answers(200);
        assert!((ran..=ran + unknown).contains(&summary.sections), "{summary:#?}");
        let unexpected: Vec<_> =
            observed.iter().filter(|(workload, observed)| !is_expected(workload, observed)).collect();
        assert!(unexpected.is_empty(), "unexpected responses: {unexpected:?}");
    }

    /// Checks that no section was aborted or late, and none waited for the end of a lease.
    ///
    /// # Panics
    ///
    /// Panics if a check fails.
    pub fn check_nothing_aborted(&self) {
        let Self { summary, longest, .. } = self;
        assert!(*longest < LEASE, "{longest:?}: a request waited for the end of a lease");
        // An aborted section may have a write in flight; no other write is late.
        assert_eq!((summary.late, summary.left_open, summary.answers(412)), (0, 0, 0), "{summary:#?}");
        assert!(summary.refused <= summary.aborted, "{summary:#?}");
        let is_well = |observed: &Observed| {
            // `lost`, `hold-limit-reached` and `shutting-down` must not occur.
            let is_well = [200, 409, 500].iter().any(|status| has_status(observed, *status));
            let is_rejected = is(observed, 503, "store-unavailable") || is(observed, 503, "queue-full");
            is_well || is_rejected || matches!(observed, Observed::Left | Observed::Broken)
        };
        let unwell: Vec<_> = self.observed.iter().filter(|(_, observed)| !is_well(observed)).collect();
        assert!(unwell.is_empty(), "{unwell:?}, {summary:#?}");
        let was_to_finish =
            |workload: &Workload| runs_to_end(workload) && summary.left_inside.contains(&workload.name());
        let aborted: Vec<_> = self.observed.iter().filter(|(workload, _)| was_to_finish(workload)).collect();
        assert!(aborted.is_empty(), "handlers finish without their clients: {aborted:?}");
    }

    /// Checks that no connection or stream broke, except by a panicking handler.
    ///
    /// # Panics
    ///
    /// Panics if one did.
    pub fn check_connections(&self) {
        let is_alone =
            |workload: &Workload, observed: &Observed| *observed == Observed::Broken && !breaks_connection(workload);
        let alone: Vec<_> = self.observed.iter().filter(|(workload, observed)| is_alone(workload, observed)).collect();
        assert!(alone.is_empty(), "{alone:?}");
        assert_eq!(self.summary.broken_before, 0, "{:#?}", self.summary);
    }

    /// Checks that every kind of event occurred.
    ///
    /// # Panics
    ///
    /// Panics if one did not.
    pub fn check_coverage(&self) {
        let Summary { left: disconnected, left_before: before_start, left_inside: inside, broken, aborted, .. } =
            &self.summary;
        let finished = disconnected - before_start - number(inside.len());
        assert!(*before_start > 0, "some clients disconnected while they waited: {:#?}", self.summary);
        assert!(!inside.is_empty() && finished > 0, "some handlers were dropped, some finished: {:#?}", self.summary);
        assert!(*broken > 0 && aborted >= broken, "some handlers panicked: {:#?}", self.summary);
        let some = |matches: fn(&Workload, &Observed) -> bool| self.count(matches) > 0;
        assert!(some(|workload, observed| workload.patience == Patience::FailFast && has_status(observed, 200)));
        assert!(some(|_, observed| is(observed, 409, "locked")) && some(|_, observed| is(observed, 409, "timed-out")));
        assert!(
            some(|_, observed| has_status(observed, 500))
                && some(|workload, observed| workload.work.frames > 0 && has_status(observed, 200))
        );
    }
}

/// Whether the response is a problem of this type.
#[must_use]
pub fn is(observed: &Observed, status: u16, kind: &str) -> bool {
    matches!(observed, Observed::Response { status: is, kind: Some(of), .. } if (*is, of.as_str()) == (status, kind))
}

fn has_status(observed: &Observed, status: u16) -> bool {
    matches!(observed, Observed::Response { status: is, .. } if *is == status)
}

/// A waiter without a limit always gets a grant.
fn wait_timed_out(workload: &Workload, observed: &Observed) -> bool {
    workload.patience == Patience::Wait && is(observed, 409, "timed-out")
}

/// Whether its handler runs to its end after a disconnect. (An unread stream does not.)
fn runs_to_end(workload: &Workload) -> bool {
    !workload.lock_path.is_dropped && workload.work.frames == 0 && workload.work.panics.is_none()
}

/// Whether its panic ends the connection in hyper: it is not caught, or after the response head.
fn breaks_connection(workload: &Workload) -> bool {
    workload.work.panics.is_some() && (!workload.lock_path.is_caught || workload.work.frames > 0)
}

/// Whether a request can have this outcome under any faults.
fn is_expected(workload: &Workload, observed: &Observed) -> bool {
    let panics = workload.work.panics.is_some();
    match observed {
        Observed::Left => workload.disconnect.is_some(),
        Observed::Broken => true,
        Observed::Response { status: 200, .. } => !panics,
        Observed::Response { status: 412, .. } => workload.work.frames == 0 && !panics,
        Observed::Response { status: 500, .. } => panics && workload.lock_path.is_caught,
        Observed::Response { status: 409, .. } => match workload.patience {
            Patience::FailFast => is(observed, 409, "locked"),
            Patience::Briefly | Patience::Wait => is(observed, 409, "timed-out"),
        },
        Observed::Response { status: 503, kind, outcome } => {
            let has_run = matches!(kind.as_deref(), Some("lost" | "hold-limit-reached"));
            kind.is_some() && outcome.as_deref() == Some(if has_run { "unknown" } else { "not-started" })
        }
        Observed::Response { .. } => false,
    }
}

fn number(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
