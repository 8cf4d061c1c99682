//! Storms on a ZooKeeper of three: members are killed and stopped, processes are killed and
//! stopped, and the network carries nothing for longer than a session.
//!
//! `SCALE=<number>` multiplies the faults of a storm, and `SEED=<number>` repeats its requests.

use tokio::time::sleep;
use tower_lock_storm::{Environment, Workload, scale, seed, turn};
use tower_lock_testkit::{Direction, Proxy, ZooKeeper, skipped, wait::ms};

const PROGRAMS: (&str, &str) = (env!("CARGO_BIN_EXE_checker"), env!("CARGO_BIN_EXE_service"));
const FLAGS: [&str; 2] = ["--correct", "--lease-ms=3000"];
/// The lease, the lock-delay, and four seconds.
const ROOT: &str = "/storm?session=8s";

/// Returns `None`, with a note on stderr, if there is no server.
async fn servers(storm: &str) -> Option<ZooKeeper> {
    if !ZooKeeper::is_available() {
        skipped(storm, "java or `ZOOKEEPER_JARS`");
        return None;
    }
    Some(ZooKeeper::start(3).await)
}

async fn environment(addresses: &str) -> Environment {
    Environment::at(PROGRAMS, &format!("zookeeper://{addresses}{ROOT}"), &FLAGS, seed()).await
}

/// With `--servers`.
mod long {
    use super::*;

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_a_zookeeper_whose_members_fail() {
        let _turn = turn().await;
        let Some(servers) = servers("the storm with members that fail").await else { return };
        let environment = environment(&servers.addresses()).await;
        let faults = async {
            for n in 0..4 * scale() {
                sleep(ms(1_500)).await;
                let leader = servers.leader().await;
                let member = if n % 2 == 0 { leader } else { (leader + 1) % 3 };
                if n % 4 < 2 {
                    servers.kill(member);
                    sleep(ms(2_000)).await;
                    servers.restart(member).await;
                } else {
                    servers.freeze(member);
                    // Also for longer than a session.
                    sleep(ms(if n % 2 == 0 { 9_000 } else { 2_000 })).await;
                    servers.thaw(member);
                }
            }
        };
        let storm = environment.storm_until(Workload::with_slow_handlers, faults).await;
        let outcome = environment.end(storm).await;
        outcome.check(&[]);
        assert!(outcome.summary.answers(200) > 0, "{:#?}", outcome.summary);
    }

    /// Guarantee: G2.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_zookeeper_with_killed_and_stopped_processes() {
        let _turn = turn().await;
        let Some(servers) = servers("the storm with killed processes").await else { return };
        let environment = environment(&servers.addresses()).await;
        let storm = environment.storm_until(Workload::with_slow_handlers, environment.kill_and_stop()).await;
        let outcome = environment.end(storm).await;
        outcome.check(&[]);
        assert!(outcome.summary.broken_before > 0, "{:#?}", outcome.summary);
    }

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_a_zookeeper_that_cannot_be_reached() {
        let _turn = turn().await;
        let Some(servers) = servers("the storm with an interrupted network").await else { return };
        let proxies = [0, 1, 2].map(|n| Proxy::start_raw(servers.address(n)));
        let proxies = futures_util::future::join_all(proxies).await;
        let addresses: Vec<_> = proxies.iter().map(|proxy| proxy.address().to_string()).collect();
        let environment = environment(&addresses.join(",")).await;
        let faults = async {
            for n in 0..4 * scale() {
                sleep(ms(1_500)).await;
                let direction =
                    [Direction::Both, Direction::Up, Direction::Down][usize::try_from(n % 3).expect("small")];
                proxies.iter().for_each(|proxy| proxy.all().swallow(direction));
                sleep(ms(if n % 2 == 0 { 1_000 } else { 10_000 })).await;
                // What was swallowed is lost: a stream would go on in its middle.
                proxies.iter().for_each(|proxy| proxy.all().cut());
                proxies.iter().for_each(|proxy| proxy.all().heal());
            }
        };
        let storm = environment.storm_until(Workload::with_slow_handlers, faults).await;
        let outcome = environment.end(storm).await;
        outcome.check(&[]);
        assert!(outcome.summary.answers(200) > 0, "{:#?}", outcome.summary);
    }
}
