//! A storm: services, what is between them and their Redis, and thousands of clients at once.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::Duration,
};

use futures_util::{StreamExt, future::join_all, stream};
use tokio::time::{Instant, sleep, timeout};
use tower_lock_faults::{Proxy, RedisServer};

use crate::{
    checker::Summary,
    client::{Observed, Request},
    cluster::{Cluster, Residue, Service, ShutdownReport},
    workload::{Patience, Workload},
};

/// Where a storm takes place.
#[derive(Debug)]
pub struct Environment {
    /// `None`: one process, and its memory.
    pub redis: Option<RedisServer>,
    /// Between the services and their Redis.
    pub proxy: Option<Proxy>,
    /// The services, in the order of their names.
    pub services: Vec<Service>,
    /// Which of them are sent nothing any more.
    pub leaving: Vec<AtomicBool>,
    /// What is thrown.
    pub seed: u64,
    cluster: Cluster,
}

/// What the clients saw, and how long the longest of them took.
#[derive(Debug)]
pub struct Storm {
    observed: Vec<(Workload, Observed)>,
    longest: Duration,
}

/// What the clients saw, and what the checker did.
#[derive(Debug)]
pub struct Outcome {
    /// What was asked, and what came of it.
    pub observed: Vec<(Workload, Observed)>,
    /// How long the longest took.
    pub longest: Duration,
    /// What went wrong between the services and their Redis.
    pub faults: u64,
    /// How many connections were made there.
    pub arrived: u64,
    /// What the checker says.
    pub summary: Summary,
}

/// Requests at a time.
const CONCURRENCY: usize = 200;

/// So long nobody has a key after a section that was broken off: long enough to be observed, and short enough for a storm.
const LOCK_DELAY: &str = "--lock-delay-ms=100";

const LEASE: Duration = Duration::from_secs(30);

/// The seed of this run: `SEED`, else another one each time. Printed, for whoever wants to see it again.
///
/// # Panics
///
/// `SEED` is no number.
#[must_use]
pub fn seed() -> u64 {
    let seed = std::env::var("SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().expect("a number"));
    println!("SEED={seed}");
    seed
}

/// # Panics
///
/// It is not so within a minute.
async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
    let wait = async {
        while !is_so().await {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("never happened: {what}"));
}

// === impl World ===

impl Environment {
    /// With this Redis behind a proxy, or one that remembers for itself; with so many processes (one, without Redis), each with this flag.
    ///
    /// # Panics
    ///
    /// Something does not start.
    pub async fn new(
        (checker, service): (&str, &'static str),
        redis: Option<RedisServer>,
        processes: usize,
        flag: &str,
        seed: u64,
    ) -> Self {
        let proxy = match &redis {
            Some(redis) => Some(Proxy::start(redis.address()).await),
            None => None,
        };
        assert!(proxy.is_some() || processes == 1, "nobody shares the memory of another process");
        let cluster = Cluster::start(checker, service, &[]).await;
        let url = proxy.as_ref().map(Proxy::url);
        let names = ["a", "b", "c", "d"][..processes].iter();
        let start = async |name: &&str| cluster.service(&[name, "1", LOCK_DELAY, flag], url.as_deref()).await;
        let services = join_all(names.map(start)).await;
        let leaving = services.iter().map(|_| AtomicBool::new(false)).collect();
        Self { redis, proxy, services, leaving, seed, cluster }
    }

    /// Its Redis.
    ///
    /// # Panics
    ///
    /// It has none.
    pub fn redis(&self) -> &RedisServer {
        self.redis.as_ref().expect("a environment with a Redis")
    }

    /// What is before its Redis.
    ///
    /// # Panics
    ///
    /// It has none.
    pub fn proxy(&self) -> &Proxy {
        self.proxy.as_ref().expect("a environment with a Redis")
    }

    /// Sends so many requests.
    ///
    /// # Panics
    ///
    /// Nobody is left to be asked, or somebody has no answer for two minutes, or no turn for one.
    pub async fn storm(&self, requests: u64) -> Storm {
        let requests = stream::iter(Workload::generate(self.seed, requests)).map(|workload| {
            let services = self.services.iter().zip(&self.leaving);
            let alive = services
                .filter(|(service, leaving)| !leaving.load(SeqCst) && service.process().ended().is_none())
                .map(|(service, _)| service);
            let alive: Vec<_> = alive.collect();
            let instance = alive[workload.instance % alive.len()].instances()[0];
            async move {
                let asked = Instant::now();
                let observed = self.cluster.send(instance, &Request::from(&workload)).await;
                // At once: with a key that nobody gives back it would be one after the other.
                assert!(!wait_timed_out(&workload, &observed), "a minute was not enough for {workload:?}");
                (workload, observed, asked.elapsed())
            }
        });
        let observed: Vec<_> = requests.buffer_unordered(CONCURRENCY).collect().await;
        let longest = observed.iter().map(|(_, _, took)| *took).max().unwrap_or_default();
        Storm { observed: observed.into_iter().map(|(workload, observed, _)| (workload, observed)).collect(), longest }
    }

    /// Nothing is left behind: no handler, no key and nobody who waits while the services run, and nothing at all when they have ended in order.
    ///
    /// # Panics
    ///
    /// Something is.
    pub async fn end(self, storm: Storm) -> Outcome {
        let Self { redis, proxy, cluster, services, .. } = self;
        // But for those that were killed.
        let living = || services.iter().filter(|service| service.process().ended().is_none());
        eventually("a service with nothing left to do", async || {
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
            eventually("free keys leave nothing", async || left().await.is_empty()).await;
        }
        for service in services.into_iter().filter(|service| service.process().ended().is_none_or(|end| end.success()))
        {
            assert_eq!(service.terminate().await, ShutdownReport::default());
        }
        if let (Some(redis), Some(proxy)) = (&redis, &proxy) {
            assert_eq!(redis.command(&["PUBSUB", "CHANNELS"]).await.texts(), [""; 0]);
            eventually("only the one who asks is connected", async || {
                redis.command(&["CLIENT", "LIST"]).await.text().expect("text").lines().count() == 1
            })
            .await;
            // It may still be connecting for somebody who has gone.
            eventually("nobody is connected", async || proxy.connections().is_empty()).await;
        }
        let (faults, arrived) = proxy.map_or((0, 0), |proxy| (proxy.fault_count(), proxy.arrived()));
        Outcome { observed: storm.observed, longest: storm.longest, faults, arrived, summary: cluster.finish().await }
    }
}

// === impl Outcome ===

impl Outcome {
    /// How many it was so for.
    #[must_use]
    pub fn count(&self, is_it: impl Fn(&Workload, &Observed) -> bool) -> usize {
        self.observed.iter().filter(|(workload, observed)| is_it(workload, observed)).count()
    }

    /// What no weather excuses, but for these violations.
    ///
    /// # Panics
    ///
    /// Something of it was.
    pub fn check(&self, excused: &[&str]) {
        let Self { observed, longest, faults, arrived, summary } = self;
        let mut problems = BTreeMap::<_, u64>::new();
        for (_, observed) in observed {
            if let Observed::Answer { kind: Some(kind), .. } = observed {
                *problems.entry(kind).or_default() += 1;
            }
        }
        println!(
            "{faults} faults on {arrived} connections, the longest took {longest:?}, {problems:?}, {}",
            serde_json::to_string(summary).expect("plain data")
        );
        let Summary { violations, first, .. } = summary;
        assert!(violations.keys().all(|name| excused.contains(&&**name)), "{violations:?}: {first:#?}");
        assert_eq!(summary.asked, number(observed.len()));
        let heard = summary.answered.values().sum::<u64>() + summary.left + summary.broken;
        assert_eq!(heard, summary.asked, "everybody hears something");
        // Nothing was started but what was answered so, or may have been.
        let unknown = summary.left + summary.broken + [412, 500, 503].map(|is| summary.answers(is)).iter().sum::<u64>();
        let ran = summary.answers(200);
        assert!((ran..=ran + unknown).contains(&summary.sections), "{summary:#?}");
        let left = self.count(|_, observed| *observed == Observed::Left);
        assert!(
            (observed.len() / 1_000..=observed.len() / 50).contains(&left),
            "{left} of {}: a hundredth or so",
            observed.len()
        );
        let strangers: Vec<_> =
            observed.iter().filter(|(workload, observed)| !is_expected(workload, observed)).collect();
        assert!(strangers.is_empty(), "nobody answers so: {strangers:?}");
    }

    /// And nobody was broken off, came too late, or waited for the end of a lease.
    ///
    /// # Panics
    ///
    /// Somebody was.
    pub fn check_nothing_aborted(&self) {
        let Self { summary, longest, .. } = self;
        assert!(*longest < LEASE, "{longest:?}: whose lease did it wait for?");
        // What was broken off may have had a write on its way; nobody else came too late.
        assert_eq!((summary.late, summary.left_open, summary.answers(412)), (0, 0, 0), "{summary:#?}");
        assert!(summary.refused <= summary.aborted, "{summary:#?}");
        let is_well = |observed: &Observed| {
            // That `lost`, `max-hold` and `shutting-down` are not among them is the point.
            let is_well = [200, 409, 500].iter().any(|status| has_status(observed, *status));
            let is_told = is(observed, 503, "store-unavailable") || is(observed, 503, "line-full");
            is_well || is_told || matches!(observed, Observed::Left | Observed::Broken)
        };
        let unwell: Vec<_> = self.observed.iter().filter(|(_, observed)| !is_well(observed)).collect();
        assert!(unwell.is_empty(), "{unwell:?}, {summary:#?}");
        let was_to_finish =
            |workload: &Workload| runs_to_end(workload) && summary.left_inside.contains(&workload.name());
        let broken_off: Vec<_> = self.observed.iter().filter(|(workload, _)| was_to_finish(workload)).collect();
        assert!(broken_off.is_empty(), "they were to finish without their clients: {broken_off:?}");
    }

    /// Nor did a connection break, or a stream of one, but for a handler that panicked on it.
    ///
    /// # Panics
    ///
    /// One did.
    pub fn check_connections(&self) {
        let is_alone =
            |workload: &Workload, observed: &Observed| *observed == Observed::Broken && !breaks_connection(workload);
        let alone: Vec<_> = self.observed.iter().filter(|(workload, observed)| is_alone(workload, observed)).collect();
        assert!(alone.is_empty(), "{alone:?}");
        assert_eq!(self.summary.broken_before, 0, "{:#?}", self.summary);
    }

    /// All that storms are made of was there.
    ///
    /// # Panics
    ///
    /// Something was not.
    pub fn check_coverage(&self) {
        let Summary { left: gone, left_before: gone_before, left_inside: gone_inside, broken, aborted: fallen, .. } =
            &self.summary;
        let finished = gone - gone_before - number(gone_inside.len());
        assert!(*gone_before > 0, "some left before their turn: {:#?}", self.summary);
        assert!(
            !gone_inside.is_empty() && finished > 0,
            "some handlers were dropped, some finished: {:#?}",
            self.summary
        );
        assert!(*broken > 0 && fallen >= broken, "some handlers panicked: {:#?}", self.summary);
        let some = |is_it: fn(&Workload, &Observed) -> bool| self.count(is_it) > 0;
        assert!(some(|workload, observed| workload.patience == Patience::FailFast && has_status(observed, 200)));
        assert!(some(|_, observed| is(observed, 409, "held")) && some(|_, observed| is(observed, 409, "timed-out")));
        assert!(
            some(|_, observed| has_status(observed, 500))
                && some(|workload, observed| workload.work.frames > 0 && has_status(observed, 200))
        );
    }
}

/// It was answered with this type of problem.
#[must_use]
pub fn is(observed: &Observed, status: u16, kind: &str) -> bool {
    matches!(observed, Observed::Answer { status: is, kind: Some(of), .. } if (*is, of.as_str()) == (status, kind))
}

fn has_status(observed: &Observed, status: u16) -> bool {
    matches!(observed, Observed::Answer { status: is, .. } if *is == status)
}

/// Everybody who waits for as long as it takes has a turn.
fn wait_timed_out(workload: &Workload, observed: &Observed) -> bool {
    workload.patience == Patience::Wait && is(observed, 409, "timed-out")
}

/// Once it has begun, it comes to its end, whatever its client does. (A stream that nobody reads does not.)
fn runs_to_end(workload: &Workload) -> bool {
    !workload.lock_path.is_dropped && workload.work.frames == 0 && workload.work.panics.is_none()
}

/// Its panic reaches hyper, which has nothing to say any more: nobody catches it, or the head may have been sent.
fn breaks_connection(workload: &Workload) -> bool {
    workload.work.panics.is_some() && (!workload.lock_path.is_caught || workload.work.frames > 0)
}

/// Nobody hears what nobody says to such a request, whatever the weather.
fn is_expected(workload: &Workload, observed: &Observed) -> bool {
    let panics = workload.work.panics.is_some();
    match observed {
        Observed::Left => workload.leaves.is_some(),
        Observed::Broken => true,
        Observed::Answer { status: 200, .. } => !panics,
        Observed::Answer { status: 412, .. } => workload.work.frames == 0 && !panics,
        Observed::Answer { status: 500, .. } => panics && workload.lock_path.is_caught,
        Observed::Answer { status: 409, .. } => match workload.patience {
            Patience::FailFast => is(observed, 409, "held"),
            Patience::Briefly | Patience::Wait => is(observed, 409, "timed-out"),
        },
        Observed::Answer { status: 503, kind, outcome } => {
            let has_run = matches!(kind.as_deref(), Some("lost" | "max-hold"));
            kind.is_some() && outcome.as_deref() == Some(if has_run { "unknown" } else { "not-started" })
        }
        Observed::Answer { .. } => false,
    }
}

fn number(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
