//! Bursts of requests for one key, of which the newest one runs and the others are replaced.

use std::time::Duration;

use fastrand::Rng;
use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use tokio::time::Instant;
use tower_lock_testkit::wait::until;

use crate::{
    client::{Observed, Request},
    cluster::Service,
    storm::{Environment, Outcome, Storm, scale},
};

/// The requests of a burst that come at the same time, before the last one.
const AT_ONCE: usize = 9;

/// The work of the last request. The others would take an hour.
const WORK: Duration = Duration::from_millis(20);

impl Environment {
    /// Sends this many bursts of ten, times [`scale`]: nine requests, and a last one when one of
    /// them runs and the others have ended. The last one runs to its end, and each other one is
    /// replaced. No sections overlap, and nothing is left.
    ///
    /// # Panics
    ///
    /// Panics if a check fails.
    pub async fn end_bursts_with_the_newest(self, bursts: u64) {
        let mut rng = Rng::with_seed(self.seed);
        let mut starts = Vec::new();
        for burst in 0..bursts * scale() {
            starts.push(self.burst(burst, rng.fork()).await);
        }
        starts.sort_unstable();
        let p99 = starts[starts.len() * 99 / 100];
        println!("the last request of {} bursts has started after {p99:?} (p99)", starts.len());
        // A short storm has no cores of its own.
        assert!(scale() == 1 || p99 < Duration::from_millis(200), "{p99:?}");
        let Outcome { summary, .. } = self.end(Storm::default()).await;
        assert!(summary.violations.is_empty(), "{summary:#?}");
        println!("{} sections of {} requests", summary.sections, summary.asked);
    }

    /// Returns after how long the last request has started.
    async fn burst(&self, burst: u64, mut rng: Rng) -> Duration {
        let mut send = |n: usize, work: Duration| {
            let path = format!("/newest/{burst}?work_ms={}", work.as_millis());
            let request = Request::new(&format!("r{burst}-{n}"), &path);
            let instances: Vec<_> = self.services.iter().flat_map(Service::instances).collect();
            let instance = *instances[rng.usize(0..instances.len())];
            async move { self.cluster.send(instance, &request).await }
        };
        let hour = Duration::from_secs(3_600);
        let mut others: FuturesUnordered<_> = (0..AT_ONCE).map(|n| send(n, hour)).collect();
        let mut replaced = Vec::new();
        while replaced.len() < AT_ONCE - 1 {
            replaced.extend(others.next().await);
        }
        // The newest of the nine runs: the store has seen it before the last one.
        until("a request that runs", async || {
            let left = join_all(self.services.iter().map(Service::residue)).await;
            left.iter().map(|left| left.inside).sum::<usize>() == 1 && left.iter().all(|left| left.waiting == 0)
        })
        .await;
        let last = send(AT_ONCE, WORK);
        let sent = Instant::now();
        let (last, rest) = tokio::join!(last, others.collect::<Vec<_>>());
        let started = sent.elapsed().saturating_sub(WORK);
        assert!(matches!(last, Observed::Response { status: 200, .. }), "burst {burst}: {last:?}");
        for other in replaced.into_iter().chain(rest) {
            let Observed::Response { status: 409, kind: Some(kind), .. } = &other else {
                panic!("burst {burst}: {other:?}")
            };
            assert_eq!(kind, "superseded", "burst {burst}");
        }
        started
    }
}
