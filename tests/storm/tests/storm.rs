//! Four processes, one Redis, ten thousand requests: nobody overlaps, everybody is answered, nothing is left.
//!
//! `SEED=<number> cargo test -p tower-lock-storm --test storm` throws the same dice again. What they hit depends on who comes first.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::{
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::Duration,
};

use futures_util::{StreamExt, future::join_all, stream};
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};
use tower_lock_faults::{Chaos, Direction, Proxy, RedisServer, skipped};
use tower_lock_storm::{Farewell, Seen, Service, Site, Summary};

const REQUESTS: u64 = 10_000;
const KEYS: u64 = 50;
const AT_ONCE: usize = 200;
const LEASE: Duration = Duration::from_secs(30);

/// Two at once would only take each other's time.
static ONE_AT_A_TIME: Semaphore = Semaphore::const_new(1);

struct World {
    redis: RedisServer,
    proxy: Proxy,
    site: Site,
    services: Vec<Service>,
    /// Those that are sent nothing any more.
    leaving: [AtomicBool; 4],
    seed: u64,
}

/// What the clients saw, each under the number of its request, and how long the longest of them took.
#[derive(Debug)]
struct Storm {
    seen: Vec<(u64, Seen)>,
    longest: Duration,
}

/// What the clients saw, and what the referee did.
#[derive(Debug)]
struct Outcome {
    seen: Vec<(u64, Seen)>,
    longest: Duration,
    mishaps: u64,
    /// How many connections were made.
    arrived: u64,
    summary: Summary,
}

// === impl World ===

impl World {
    /// `None`, said past the harness: there is no server.
    async fn new(test: &str) -> Option<Self> {
        if !RedisServer::is_available() {
            skipped(test, "redis-server");
            return None;
        }
        let seed = std::env::var("SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().expect("a number"));
        println!("SEED={seed}");
        let redis = RedisServer::start().await;
        let proxy = Proxy::start(redis.address()).await;
        let site = Site::start(env!("CARGO_BIN_EXE_referee"), env!("CARGO_BIN_EXE_service"), &[]).await;
        let url = proxy.url();
        let start = async |name| site.service(&[name, "1"], Some(&url)).await;
        let services = join_all(["a", "b", "c", "d"].map(start)).await;
        Some(Self { redis, proxy, site, services, leaving: Default::default(), seed })
    }

    /// Sends so many requests. One in a hundred leaves before it has waited for long.
    async fn storm(&self, requests: u64) -> Storm {
        let mut die = fastrand::Rng::with_seed(self.seed);
        let requests = stream::iter(0..requests).map(|number| {
            let leaves = (die.u8(0..100) == 0).then(|| Duration::from_micros(die.u64(0..20_000)));
            let path = format!("/{}/{}", if waits(number) { "wait" } else { "refuse" }, die.u64(0..KEYS));
            let alive = self
                .services
                .iter()
                .zip(&self.leaving)
                .filter(|(service, leaving)| !leaving.load(SeqCst) && service.process().ended().is_none());
            let alive: Vec<_> = alive.map(|(service, _)| service).collect();
            let instance = alive[die.usize(0..alive.len())].instances()[0];
            async move {
                let asked = Instant::now();
                let seen = self.site.ask(instance, &path, &format!("r{number}"), leaves).await;
                (number, seen, asked.elapsed())
            }
        });
        let seen: Vec<_> = requests.buffer_unordered(AT_ONCE).collect().await;
        let longest = seen.iter().map(|(_, _, took)| *took).max().unwrap_or_default();
        Storm { seen: seen.into_iter().map(|(number, seen, _)| (number, seen)).collect(), longest }
    }

    /// Nothing is left behind: not in Redis while the services run, and nothing at all when they have ended in order.
    async fn end(self, storm: Storm) -> Outcome {
        let Self { redis, proxy, site, services, .. } = self;
        let left = async || {
            let keys = redis.command(&["KEYS", "*"]).await;
            keys.texts().into_iter().filter(|key| *key != "tower-lock:f").map(str::to_owned).collect::<Vec<_>>()
        };
        eventually("free keys leave nothing", async || left().await.is_empty()).await;
        // But for those that were killed.
        for service in services.into_iter().filter(|service| service.process().ended().is_none_or(|end| end.success()))
        {
            let Farewell { holding, tasks } = service.terminate().await;
            assert!(holding == 0 && tasks == 0, "{holding} held, {tasks} tasks");
        }
        assert_eq!(redis.command(&["PUBSUB", "CHANNELS"]).await.texts(), [""; 0]);
        eventually("only the one who asks is connected", async || {
            redis.command(&["CLIENT", "LIST"]).await.text().expect("text").lines().count() == 1
        })
        .await;
        // It may still be connecting for somebody who has gone.
        eventually("nobody is connected", async || proxy.connections().is_empty()).await;
        let (mishaps, arrived) = (proxy.mishaps(), proxy.arrived());
        println!("{arrived} connections");
        Outcome { seen: storm.seen, longest: storm.longest, mishaps, arrived, summary: site.finish().await }
    }
}

// === impl Outcome ===

impl Outcome {
    fn count(&self, is_it: impl Fn(bool, &Seen) -> bool) -> usize {
        self.seen.iter().filter(|(number, seen)| is_it(waits(*number), seen)).count()
    }

    /// What no weather excuses, but for these violations.
    fn check(&self, excused: &[&str]) {
        let Self { seen, longest, mishaps, summary, .. } = self;
        println!(
            "{mishaps} mishaps, the longest took {longest:?}, {}",
            serde_json::to_string(summary).expect("plain data")
        );
        assert!(summary.violations.keys().all(|name| excused.contains(&&**name)), "{summary:#?}");
        assert_eq!(summary.asked, u64::try_from(seen.len()).expect("a few"));
        assert_eq!(summary.answered.values().sum::<u64>() + summary.gone, summary.asked, "everybody hears something");
        // Nothing was started but what was answered so, or may have been.
        let (ran, unknown) = (summary.answers(200), summary.gone + summary.answers(412) + summary.answers(503));
        assert!((ran..=ran + unknown).contains(&summary.sections), "{summary:#?}");
        let left = self.count(|_, seen| *seen == Seen::Left);
        assert!((seen.len() / 1_000..=seen.len() / 50).contains(&left), "{left} of {}: a hundredth or so", seen.len());
    }

    /// And nobody was broken off, came too late, or waited for the end of a lease.
    fn check_all_lived(&self) {
        let Self { summary, longest, .. } = self;
        assert!(*longest < LEASE, "{longest:?}: whose lease did it wait for?");
        assert_eq!((summary.late, summary.left_open, summary.refused), (0, 0, 0), "{summary:#?}");
        let is_well = |waits: bool, seen: &Seen| match seen {
            Seen::Answer { .. } if is(seen, 409, "held") => !waits,
            Seen::Answer { .. } => ran(seen) || is(seen, 503, "store-unavailable"),
            Seen::Left | Seen::Broken => true,
        };
        assert_eq!(self.count(|waits, seen| !is_well(waits, seen)), 0, "{summary:#?}");
    }

    /// Nor did a connection of a client break.
    fn check_all_connected(&self) {
        assert_eq!(self.count(|_, seen| *seen == Seen::Broken), 0);
    }
}

fn waits(number: u64) -> bool {
    number.is_multiple_of(2)
}

fn is(seen: &Seen, status: u16, kind: &str) -> bool {
    matches!(seen, Seen::Answer { status: is, kind: Some(of), .. } if (*is, of.as_str()) == (status, kind))
}

fn ran(seen: &Seen) -> bool {
    matches!(seen, Seen::Answer { status: 200, .. })
}

async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
    let wait = async {
        while !is_so().await {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("never happened: {what}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_to_four_processes_overlap_nowhere_and_leave_nothing() {
    let _turn = ONE_AT_A_TIME.acquire().await;
    let Some(world) = World::new("the storm, in good weather").await else { return };
    let storm = world.storm(REQUESTS).await;
    let outcome = world.end(storm).await;
    outcome.check(&[]);
    outcome.check_all_lived();
    outcome.check_all_connected();
    // But for a machine that had no time for any of them.
    assert!(outcome.mishaps == 0 && outcome.summary.answers(503) < REQUESTS / 10, "everybody who waits has a turn");
    assert!(outcome.count(|waits, seen| !waits && ran(seen)) > 0 && outcome.summary.answers(409) > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_overlap_nowhere_and_leave_nothing_while_the_network_fails() {
    let _turn = ONE_AT_A_TIME.acquire().await;
    let Some(world) = World::new("the storm, in bad weather").await else { return };
    // What comes again comes when nobody counts on it any more: half a second after it was asked, nothing is granted.
    let chaos = Chaos::new(world.seed).cut(1).double(20).late(20, ms(20)).again(20, ms(1_000)..ms(3_000));
    // On its way when the connection broke: it comes in its time, or after it.
    let chaos = chaos.orphaned(3, ms(1)..ms(900));
    world.proxy.chaos(Some(chaos.drop_pushes(20).double_pushes(20)));
    // And now and then it fails for all at once.
    let mut die = fastrand::Rng::with_seed(!world.seed);
    let gusts = async {
        loop {
            sleep(ms(die.u64(300..900))).await;
            let all = world.proxy.all();
            match die.u8(0..5) {
                0 => all.cut(),
                1 => all.hold(Direction::Up),
                2 => all.hold(Direction::Down),
                3 => all.swallow(Direction::Both),
                _ => all.delay(Direction::Both, ms(10)),
            }
            sleep(ms(die.u64(20..200))).await;
            all.heal();
        }
    };
    let storm = meanwhile(gusts, world.storm(REQUESTS)).await;
    world.proxy.chaos(None);
    world.proxy.all().heal();
    let outcome = world.end(storm).await;
    outcome.check(&[]);
    outcome.check_all_lived();
    outcome.check_all_connected();
    assert!(outcome.mishaps > 100, "{} mishaps: is this the weather?", outcome.mishaps);
    let most = outcome.summary.asked - outcome.summary.answers(503);
    assert!(most > outcome.summary.asked / 2, "{:#?}", outcome.summary);
}

/// Longer than anybody is asked to wait for a store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_stands_still_requests_are_told_that_nothing_was_started_and_then_all_goes_on() {
    let _turn = ONE_AT_A_TIME.acquire().await;
    let Some(world) = World::new("the storm, on a Redis that stands still").await else { return };
    let stands_still = async {
        loop {
            sleep(ms(600)).await;
            world.redis.freeze();
            sleep(ms(2_500)).await;
            world.redis.thaw();
        }
    };
    let storm = meanwhile(stands_still, world.storm(REQUESTS / 2)).await;
    world.redis.thaw();
    let outcome = world.end(storm).await;
    outcome.check(&[]);
    outcome.check_all_lived();
    outcome.check_all_connected();
    // Twelve that work, and ten tries a second of each while nobody answers.
    assert!(outcome.arrived < 400, "{} connections", outcome.arrived);
    let not_started = |seen: &Seen| matches!(seen, Seen::Answer { status: 503, outcome: Some(outcome), .. } if outcome == "not-started");
    let told = outcome.count(|_, seen| not_started(seen));
    assert!(told > 0, "did it stand still? {:#?}", outcome.summary);
    assert_eq!(outcome.summary.answers(503), u64::try_from(told).expect("a few"));
    assert!(outcome.summary.answers(200) > 0);
}

/// A Redis that forgets lets two in. What is written is safe all the same, because the fence is ahead of what was forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_forgets_lets_no_stale_write_through_and_leaves_nobody_without_an_answer() {
    let _turn = ONE_AT_A_TIME.acquire().await;
    let Some(mut world) = World::new("the storm, on a Redis that forgets").await else { return };
    let mut redis = std::mem::replace(&mut world.redis, RedisServer::start().await);
    let forgets = async {
        loop {
            sleep(ms(500)).await;
            redis.restart_empty().await;
        }
    };
    let storm = meanwhile(forgets, world.storm(REQUESTS / 2)).await;
    // The storm may have ended while nobody was there.
    redis.restart_empty().await;
    world.redis = redis;
    let outcome = world.end(storm).await;
    outcome.check(&["overlap", "fence-not-increasing"]);
    assert!(outcome.summary.answers(200) > 0, "{:#?}", outcome.summary);
}

/// One is killed, one stands still for longer than its leases last. Who waits for a key of theirs has it when the lease is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_die_or_stand_still_past_their_leases_let_nobody_in_too_early_and_nobody_wait_for_ever() {
    let Some(world) = World::new("the storm, with processes that die").await else { return };
    let dying = async {
        sleep(ms(500)).await;
        world.services[1].process().freeze();
        world.services[3].process().kill();
        sleep(Duration::from_secs(34)).await;
        world.services[1].process().thaw();
        std::future::pending::<()>().await;
    };
    let storm = meanwhile(dying, world.storm(REQUESTS / 4)).await;
    let outcome = world.end(storm).await;
    // A write that was on its way may come after that of the next one: it is refused.
    outcome.check(&[]);
    assert!(outcome.count(|_, seen| *seen == Seen::Broken) > 0, "{:#?}", outcome.summary);
    let turned_away = outcome.count(|waits, seen| waits && matches!(seen, Seen::Answer { status: 409, .. }));
    assert_eq!(turned_away, 0, "everybody who waits has a turn: {:#?}", outcome.summary);
}

/// As in a deploy: whoever is with them has his turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_end_in_order_take_no_key_with_them() {
    let _turn = ONE_AT_A_TIME.acquire().await;
    let Some(world) = World::new("the storm, with processes that end").await else { return };
    let ending = async {
        for number in [1, 3] {
            sleep(ms(400)).await;
            world.leaving[number].store(true, SeqCst);
            world.services[number].process().terminate();
        }
        std::future::pending::<()>().await;
    };
    let storm = meanwhile(ending, world.storm(REQUESTS / 2)).await;
    assert!(world.leaving[3].load(SeqCst), "in the middle of it");
    let outcome = world.end(storm).await;
    outcome.check(&[]);
    outcome.check_all_lived();
}

async fn meanwhile<T>(for_ever: impl Future<Output = ()>, storm: impl Future<Output = T>) -> T {
    tokio::select! {
        seen = storm => seen,
        () = for_ever => unreachable!("it has no end"),
    }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
