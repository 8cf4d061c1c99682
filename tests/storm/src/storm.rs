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
    client::{Ask, Seen},
    cluster::{Farewell, Left, Service, Site},
    workload::{Patience, Plan},
};

/// Where a storm takes place.
#[derive(Debug)]
pub struct World {
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
    site: Site,
}

/// What the clients saw, and how long the longest of them took.
#[derive(Debug)]
pub struct Storm {
    seen: Vec<(Plan, Seen)>,
    longest: Duration,
}

/// What the clients saw, and what the referee did.
#[derive(Debug)]
pub struct Outcome {
    /// What was asked, and what came of it.
    pub seen: Vec<(Plan, Seen)>,
    /// How long the longest took.
    pub longest: Duration,
    /// What went wrong between the services and their Redis.
    pub mishaps: u64,
    /// How many connections were made there.
    pub arrived: u64,
    /// What the referee says.
    pub summary: Summary,
}

/// Requests at a time.
const AT_ONCE: usize = 200;

/// So long nobody has a key after a section that was broken off: long enough to be seen, and short enough for a storm.
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

impl World {
    /// With this Redis behind a proxy, or one that remembers for itself; with so many processes (one, without Redis), each with this flag.
    ///
    /// # Panics
    ///
    /// Something does not start.
    pub async fn new(
        (referee, service): (&str, &'static str),
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
        let site = Site::start(referee, service, &[]).await;
        let url = proxy.as_ref().map(Proxy::url);
        let names = ["a", "b", "c", "d"][..processes].iter();
        let start = async |name: &&str| site.service(&[name, "1", LOCK_DELAY, flag], url.as_deref()).await;
        let services = join_all(names.map(start)).await;
        let leaving = services.iter().map(|_| AtomicBool::new(false)).collect();
        Self { redis, proxy, services, leaving, seed, site }
    }

    /// Its Redis.
    ///
    /// # Panics
    ///
    /// It has none.
    pub fn redis(&self) -> &RedisServer {
        self.redis.as_ref().expect("a world with a Redis")
    }

    /// What is before its Redis.
    ///
    /// # Panics
    ///
    /// It has none.
    pub fn proxy(&self) -> &Proxy {
        self.proxy.as_ref().expect("a world with a Redis")
    }

    /// Sends so many requests.
    ///
    /// # Panics
    ///
    /// Nobody is left to be asked, or somebody has no answer for two minutes, or no turn for one.
    pub async fn storm(&self, requests: u64) -> Storm {
        let requests = stream::iter(Plan::of(self.seed, requests)).map(|plan| {
            let services = self.services.iter().zip(&self.leaving);
            let alive = services
                .filter(|(service, leaving)| !leaving.load(SeqCst) && service.process().ended().is_none())
                .map(|(service, _)| service);
            let alive: Vec<_> = alive.collect();
            let instance = alive[plan.instance % alive.len()].instances()[0];
            async move {
                let asked = Instant::now();
                let seen = self.site.ask(instance, &Ask::from(&plan)).await;
                // At once: with a key that nobody gives back it would be one after the other.
                assert!(!waited_in_vain(&plan, &seen), "a minute was not enough for {plan:?}");
                (plan, seen, asked.elapsed())
            }
        });
        let seen: Vec<_> = requests.buffer_unordered(AT_ONCE).collect().await;
        let longest = seen.iter().map(|(_, _, took)| *took).max().unwrap_or_default();
        Storm { seen: seen.into_iter().map(|(plan, seen, _)| (plan, seen)).collect(), longest }
    }

    /// Nothing is left behind: no handler, no key and nobody who waits while the services run, and nothing at all when they have ended in order.
    ///
    /// # Panics
    ///
    /// Something is.
    pub async fn end(self, storm: Storm) -> Outcome {
        let Self { redis, proxy, site, services, .. } = self;
        // But for those that were killed.
        let living = || services.iter().filter(|service| service.process().ended().is_none());
        eventually("a service with nothing left to do", async || {
            join_all(living().map(Service::left)).await.iter().all(|left| *left == Left::default())
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
            assert_eq!(service.terminate().await, Farewell::default());
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
        let (mishaps, arrived) = proxy.map_or((0, 0), |proxy| (proxy.mishaps(), proxy.arrived()));
        Outcome { seen: storm.seen, longest: storm.longest, mishaps, arrived, summary: site.finish().await }
    }
}

// === impl Outcome ===

impl Outcome {
    /// How many it was so for.
    #[must_use]
    pub fn count(&self, is_it: impl Fn(&Plan, &Seen) -> bool) -> usize {
        self.seen.iter().filter(|(plan, seen)| is_it(plan, seen)).count()
    }

    /// What no weather excuses, but for these violations.
    ///
    /// # Panics
    ///
    /// Something of it was.
    pub fn check(&self, excused: &[&str]) {
        let Self { seen, longest, mishaps, arrived, summary } = self;
        let mut problems = BTreeMap::<_, u64>::new();
        for (_, seen) in seen {
            if let Seen::Answer { kind: Some(kind), .. } = seen {
                *problems.entry(kind).or_default() += 1;
            }
        }
        println!(
            "{mishaps} mishaps on {arrived} connections, the longest took {longest:?}, {problems:?}, {}",
            serde_json::to_string(summary).expect("plain data")
        );
        let Summary { violations, first, .. } = summary;
        assert!(violations.keys().all(|name| excused.contains(&&**name)), "{violations:?}: {first:#?}");
        assert_eq!(summary.asked, number(seen.len()));
        let heard = summary.answered.values().sum::<u64>() + summary.gone + summary.broken;
        assert_eq!(heard, summary.asked, "everybody hears something");
        // Nothing was started but what was answered so, or may have been.
        let unknown = summary.gone + summary.broken + [412, 500, 503].map(|is| summary.answers(is)).iter().sum::<u64>();
        let ran = summary.answers(200);
        assert!((ran..=ran + unknown).contains(&summary.sections), "{summary:#?}");
        let left = self.count(|_, seen| *seen == Seen::Left);
        assert!((seen.len() / 1_000..=seen.len() / 50).contains(&left), "{left} of {}: a hundredth or so", seen.len());
        let strangers: Vec<_> = seen.iter().filter(|(plan, seen)| !is_of_ours(plan, seen)).collect();
        assert!(strangers.is_empty(), "nobody answers so: {strangers:?}");
    }

    /// And nobody was broken off, came too late, or waited for the end of a lease.
    ///
    /// # Panics
    ///
    /// Somebody was.
    pub fn check_all_lived(&self) {
        let Self { summary, longest, .. } = self;
        assert!(*longest < LEASE, "{longest:?}: whose lease did it wait for?");
        // What was broken off may have had a write on its way; nobody else came too late.
        assert_eq!((summary.late, summary.left_open, summary.answers(412)), (0, 0, 0), "{summary:#?}");
        assert!(summary.refused <= summary.fallen, "{summary:#?}");
        let is_well = |seen: &Seen| {
            // That `lost`, `max-hold` and `shutting-down` are not among them is the point.
            let is_well = [200, 409, 500].iter().any(|status| has_status(seen, *status));
            let is_told = is(seen, 503, "store-unavailable") || is(seen, 503, "line-full");
            is_well || is_told || matches!(seen, Seen::Left | Seen::Broken)
        };
        let unwell: Vec<_> = self.seen.iter().filter(|(_, seen)| !is_well(seen)).collect();
        assert!(unwell.is_empty(), "{unwell:?}, {summary:#?}");
        let was_to_finish = |plan: &Plan| finishes(plan) && summary.gone_inside.contains(&plan.name());
        let broken_off: Vec<_> = self.seen.iter().filter(|(plan, _)| was_to_finish(plan)).collect();
        assert!(broken_off.is_empty(), "they were to finish without their clients: {broken_off:?}");
    }

    /// Nor did a connection break, or a stream of one, but for a handler that panicked on it.
    ///
    /// # Panics
    ///
    /// One did.
    pub fn check_all_connected(&self) {
        let is_alone = |plan: &Plan, seen: &Seen| *seen == Seen::Broken && !breaks(plan);
        let alone: Vec<_> = self.seen.iter().filter(|(plan, seen)| is_alone(plan, seen)).collect();
        assert!(alone.is_empty(), "{alone:?}");
        assert_eq!(self.summary.broken_before, 0, "{:#?}", self.summary);
    }

    /// All that storms are made of was there.
    ///
    /// # Panics
    ///
    /// Something was not.
    pub fn check_it_was_one(&self) {
        let Summary { gone, gone_before, gone_inside, broken, fallen, .. } = &self.summary;
        let finished = gone - gone_before - number(gone_inside.len());
        assert!(*gone_before > 0, "some left before their turn: {:#?}", self.summary);
        assert!(
            !gone_inside.is_empty() && finished > 0,
            "some handlers were dropped, some finished: {:#?}",
            self.summary
        );
        assert!(*broken > 0 && fallen >= broken, "some handlers panicked: {:#?}", self.summary);
        let some = |is_it: fn(&Plan, &Seen) -> bool| self.count(is_it) > 0;
        assert!(some(|plan, seen| plan.patience == Patience::Refuse && has_status(seen, 200)));
        assert!(some(|_, seen| is(seen, 409, "held")) && some(|_, seen| is(seen, 409, "timed-out")));
        assert!(
            some(|_, seen| has_status(seen, 500)) && some(|plan, seen| plan.work.frames > 0 && has_status(seen, 200))
        );
    }
}

/// It was answered with this type of problem.
#[must_use]
pub fn is(seen: &Seen, status: u16, kind: &str) -> bool {
    matches!(seen, Seen::Answer { status: is, kind: Some(of), .. } if (*is, of.as_str()) == (status, kind))
}

fn has_status(seen: &Seen, status: u16) -> bool {
    matches!(seen, Seen::Answer { status: is, .. } if *is == status)
}

/// Everybody who waits for as long as it takes has a turn.
fn waited_in_vain(plan: &Plan, seen: &Seen) -> bool {
    plan.patience == Patience::Wait && is(seen, 409, "timed-out")
}

/// Once it has begun, it comes to its end, whatever its client does. (A stream that nobody reads does not.)
fn finishes(plan: &Plan) -> bool {
    !plan.way.is_dropped && plan.work.frames == 0 && plan.work.panics.is_none()
}

/// Its panic reaches hyper, which has nothing to say any more: nobody catches it, or the head may have been sent.
fn breaks(plan: &Plan) -> bool {
    plan.work.panics.is_some() && (!plan.way.is_caught || plan.work.frames > 0)
}

/// Nobody hears what nobody says to such a request, whatever the weather.
fn is_of_ours(plan: &Plan, seen: &Seen) -> bool {
    let panics = plan.work.panics.is_some();
    match seen {
        Seen::Left => plan.leaves.is_some(),
        Seen::Broken => true,
        Seen::Answer { status: 200, .. } => !panics,
        Seen::Answer { status: 412, .. } => plan.work.frames == 0 && !panics,
        Seen::Answer { status: 500, .. } => panics && plan.way.is_caught,
        Seen::Answer { status: 409, .. } => match plan.patience {
            Patience::Refuse => is(seen, 409, "held"),
            Patience::Briefly | Patience::Wait => is(seen, 409, "timed-out"),
        },
        Seen::Answer { status: 503, kind, outcome } => {
            let has_run = matches!(kind.as_deref(), Some("lost" | "max-hold"));
            kind.is_some() && outcome.as_deref() == Some(if has_run { "unknown" } else { "not-started" })
        }
        Seen::Answer { .. } => false,
    }
}

fn number(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
