//! Four processes, one Redis, ten thousand requests: nobody overlaps, everybody is answered, nothing is left.
//!
//! `SEED=<number> cargo test -p tower-lock-storm --test storm` throws the same dice again. What they hit depends on who comes first.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::time::{sleep, timeout};
use tower_lock_faults::{Chaos, Direction, Proxy, RedisServer, skipped};
use tower_lock_storm::{Farewell, Seen, Service, Site, Summary};

const REQUESTS: u64 = 10_000;
const KEYS: u64 = 50;
const AT_ONCE: usize = 200;
const SERVICES: usize = 4;

struct World {
    redis: RedisServer,
    proxy: Proxy,
    site: Site,
    services: Vec<Service>,
    seed: u64,
}

/// What the clients saw, and what the referee did.
#[derive(Debug)]
struct Outcome {
    seen: Vec<(u64, Seen)>,
    mishaps: u64,
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
        let names = ["a", "b", "c", "d"];
        let url = proxy.url();
        let services = names.map(|name| site.service(&[name, "1"], Some(&url))).into();
        Some(Self { redis, proxy, site, services, seed })
    }

    /// Sends all requests. One in a hundred leaves before it has waited for long.
    async fn storm(&self) -> Vec<(u64, Seen)> {
        let mut die = fastrand::Rng::with_seed(self.seed);
        let requests = stream::iter(0..REQUESTS).map(|number| {
            let leaves = (die.u8(0..100) == 0).then(|| Duration::from_micros(die.u64(0..20_000)));
            let path = format!("/{}/{}", if waits(number) { "wait" } else { "refuse" }, die.u64(0..KEYS));
            let instance = self.services[die.usize(0..SERVICES)].instances()[0];
            async move { (number, self.site.ask(instance, &path, &format!("r{number}"), leaves).await) }
        });
        requests.buffer_unordered(AT_ONCE).collect().await
    }

    /// Nothing is left behind: not in Redis while the services run, and nothing at all when they have ended in order.
    async fn end(self, seen: Vec<(u64, Seen)>) -> Outcome {
        let Self { redis, proxy, site, services, .. } = self;
        let left = async || {
            let keys = redis.command(&["KEYS", "*"]).await;
            keys.texts().into_iter().filter(|key| *key != "tower-lock:f").map(str::to_owned).collect::<Vec<_>>()
        };
        eventually("free keys leave nothing", async || left().await.is_empty()).await;
        for service in services {
            let Farewell { holding, tasks } = service.terminate().await;
            assert!(holding == 0 && tasks <= 1, "{holding} held, {tasks} tasks");
        }
        assert_eq!(redis.command(&["PUBSUB", "CHANNELS"]).await.texts(), [""; 0]);
        eventually("only the one who asks is connected", async || {
            redis.command(&["CLIENT", "LIST"]).await.text().expect("text").lines().count() == 1
        })
        .await;
        assert_eq!(proxy.connections(), [0; 0]);
        Outcome { seen, mishaps: proxy.mishaps(), summary: site.finish().await }
    }
}

// === impl Outcome ===

impl Outcome {
    fn count(&self, is_it: impl Fn(bool, &Seen) -> bool) -> usize {
        self.seen.iter().filter(|(number, seen)| is_it(waits(*number), seen)).count()
    }

    /// What no weather excuses.
    fn check(&self) {
        let Self { seen, mishaps, summary } = self;
        println!("{mishaps} mishaps, {}", serde_json::to_string(summary).expect("plain data"));
        assert!(summary.violations.is_empty(), "{summary:#?}");
        assert_eq!((summary.late, summary.left_open, summary.refused), (0, 0, 0), "{summary:#?}");
        assert_eq!((summary.asked, seen.len()), (REQUESTS, usize::try_from(REQUESTS).expect("a few")));
        assert_eq!(summary.answered.values().sum::<u64>() + summary.gone, REQUESTS, "everybody hears something");
        assert_eq!(self.count(|_, seen| *seen == Seen::Broken), 0, "by HTTP");
        // Every section is one of a request that was answered so, or of one whose client had left.
        let ran = summary.answers(200);
        assert!((ran..=ran + summary.gone).contains(&summary.sections), "{summary:#?}");
        let left = self.count(|_, seen| *seen == Seen::Left);
        assert!((10..=200).contains(&left), "{left} of a hundred, more or less");
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
    timeout(Duration::from_secs(20), wait).await.unwrap_or_else(|_| panic!("never happened: {what}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_to_four_processes_overlap_nowhere_and_leave_nothing() {
    let Some(world) = World::new("the storm, in good weather").await else { return };
    let seen = world.storm().await;
    let outcome = world.end(seen).await;
    outcome.check();
    assert_eq!(outcome.mishaps, 0);
    let all = |waits, is_it: &dyn Fn(&Seen) -> bool| {
        assert_eq!(outcome.count(|waited, seen| waited == waits && !is_it(seen) && *seen != Seen::Left), 0);
    };
    all(true, &|seen| ran(seen));
    all(false, &|seen| ran(seen) || is(seen, 409, "held"));
    assert!(outcome.count(|waits, seen| !waits && ran(seen)) > 0 && outcome.summary.answers(409) > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_overlap_nowhere_and_leave_nothing_while_the_network_fails() {
    let Some(world) = World::new("the storm, in bad weather").await else { return };
    let ms = Duration::from_millis;
    let chaos = Chaos::new(world.seed).cut(1).double(20).late(20, ms(20)).drop_pushes(20).double_pushes(20);
    world.proxy.chaos(Some(chaos));
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
    let seen = tokio::select! {
        seen = world.storm() => seen,
        () = gusts => unreachable!("it blows for ever"),
    };
    world.proxy.chaos(None);
    world.proxy.all().heal();
    let outcome = world.end(seen).await;
    outcome.check();
    assert!(outcome.mishaps > 100, "{} mishaps: is this the weather?", outcome.mishaps);
    let excuses = |seen: &Seen| is(seen, 503, "store-unavailable") || *seen == Seen::Left;
    let unheard = outcome.count(|waits, seen| !(ran(seen) || excuses(seen) || !waits && is(seen, 409, "held")));
    assert_eq!(unheard, 0, "{:#?}", outcome.summary);
    let most = outcome.count(|_, seen| !excuses(seen));
    assert!(most > outcome.seen.len() / 2, "{most}: {:#?}", outcome.summary);
}
