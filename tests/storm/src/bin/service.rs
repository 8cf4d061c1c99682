//! A service whose handlers tell the referee what they do.
//!
//! ```text
//! REFEREE=address [REDIS_URL=url] service NAME [INSTANCES] [--right | --frees-anybody | --loses-track-of-time]
//! ```
//!
//! Each instance has `Locks` of its own in the one store, and prints where it listens. Without `REDIS_URL` the store is this process'
//! memory. It ends in order on SIGTERM, and prints what it leaves behind.

use std::{
    error::Error,
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    routing::post,
};
use futures_util::future::join_all;
use serde::Deserialize;
use tokio::{
    net::TcpListener,
    runtime::Handle,
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{sleep, timeout},
};
use tower_lock::{HeldLock, Lease, LockLayer, LockStore, Locks, MemoryStore, RedisConnectError, RedisStore, by};
use tower_lock_storm::{Answer, Farewell, FreesAnybody, LosesTrackOfTime, Report, Reporter, now};

type Failure = Box<dyn Error + Send + Sync>;

/// How a handler spends its time, if not as all do.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Work {
    /// Others run meanwhile.
    work_ms: Option<u64>,
    /// Nobody does on this thread, and nobody can break it off: a pause between the last look at the lock and the write.
    block_ms: Option<u64>,
}

struct Site {
    process: String,
    reporter: Reporter,
    sections: AtomicU64,
}

/// A section. It says that it is over when it is, however it ends.
struct Inside {
    reporter: Reporter,
    section: String,
    is_over: bool,
}

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let (mut words, mut flag) = (Vec::new(), None);
    for argument in std::env::args().skip(1) {
        if argument.starts_with("--") { flag = Some(argument) } else { words.push(argument) }
    }
    let name = words.first().ok_or("service NAME [INSTANCES]")?.clone();
    let instances: usize = words.get(1).map_or(Ok(1), |number| number.parse())?;
    let store: Arc<dyn LockStore> = match RedisStore::from_env().await {
        Err(RedisConnectError::NoUrl) => Arc::new(MemoryStore::new()),
        store => Arc::new(store?),
    };
    let store: Arc<dyn LockStore> = match flag.as_deref() {
        None | Some("--right") => store,
        Some("--frees-anybody") => Arc::new(FreesAnybody(store)),
        Some("--loses-track-of-time") => Arc::new(LosesTrackOfTime(store)),
        Some(other) => return Err(format!("not known: {other}").into()),
    };
    let reporter = Reporter::connect(std::env::var("REFEREE")?.parse()?).await?;
    let (stop, stopped) = watch::channel(false);
    let mut running = Vec::new();
    for number in 0..instances {
        let process = format!("{name}.{number}");
        let locks = Locks::builder(Arc::clone(&store)).instance(&process).build();
        let site = Site { process, reporter: reporter.clone(), sections: AtomicU64::new(0) };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        println!("listening on {}", listener.local_addr()?);
        running.push(serve(listener, locks, site, stopped.clone()));
    }
    drop(store);
    let end_of_term = async {
        signal(SignalKind::terminate())?.recv().await;
        stop.send_replace(true);
        Ok::<_, Failure>(())
    };
    let (ended, terminated) = tokio::join!(join_all(running), end_of_term);
    terminated?;
    let holding = ended.into_iter().sum::<Result<usize, Failure>>()?;
    reporter.report(Report::Flush).await;
    drop(reporter);
    // Whatever was begun ends by itself when nobody needs it any more.
    let alive = || Handle::current().metrics().num_alive_tasks();
    let _ = timeout(Duration::from_secs(5), async {
        while alive() > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    println!("{}", serde_json::to_string(&Farewell { holding, tasks: alive() })?);
    Ok(())
}

async fn serve(
    listener: TcpListener,
    locks: Locks,
    site: Site,
    mut stopped: watch::Receiver<bool>,
) -> Result<usize, Failure> {
    let layer = || LockLayer::new(&locks, by(|Path(id): Path<u64>| ("subject", id)));
    let patience = Duration::from_secs(60);
    let fixed = Lease::Fixed(Duration::from_millis(400));
    let app = Router::new()
        .route("/refuse/{id}", post(visit).route_layer(layer()))
        .route("/wait/{id}", post(visit).route_layer(layer().wait(patience)))
        .route("/fixed/{id}", post(visit).route_layer(layer().wait(patience).lease(fixed).lock_delay(Duration::ZERO)))
        .with_state(Arc::new(site));
    let stop = async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    Ok(locks.shutdown(Duration::from_secs(10)).await)
}

async fn visit(
    lock: HeldLock,
    State(site): State<Arc<Site>>,
    Query(work): Query<Work>,
    headers: HeaderMap,
) -> Result<String, StatusCode> {
    let request = headers.get("x-request").and_then(|name| name.to_str().ok()).ok_or(StatusCode::BAD_REQUEST)?;
    let inside = site.enter(&lock, request).await;
    match work {
        Work { block_ms: Some(ms), .. } => {
            // Others of this process go on: it is this handler alone that stands still.
            #[expect(clippy::disallowed_methods, reason = "what a handler must not do")]
            tokio::task::block_in_place(|| std::thread::sleep(Duration::from_millis(ms)));
        }
        Work { work_ms: Some(ms), .. } => sleep(Duration::from_millis(ms)).await,
        _ => match fastrand::u64(0..4) {
            0 => {}
            ms => sleep(Duration::from_millis(ms)).await,
        },
    }
    let token = lock.fencing_token();
    // Sent before anything is awaited: nothing can break it off now.
    let written = site.reporter.report(Report::Write { key: lock.key().to_string(), token: token.as_u64() });
    let written = written.await;
    inside.exit().await;
    if written == Answer::Accepted { Ok(token.to_string()) } else { Err(StatusCode::PRECONDITION_FAILED) }
}

// === impl Site ===

impl Site {
    async fn enter(&self, lock: &HeldLock, request: &str) -> Inside {
        let section = format!("{}-{}", self.process, self.sections.fetch_add(1, Ordering::Relaxed));
        // In this order: a moment between the two makes the claim smaller.
        let at = now();
        let remaining = lock.remaining();
        let entered = self.reporter.report(Report::Enter {
            section: section.clone(),
            key: lock.key().to_string(),
            token: lock.fencing_token().as_u64(),
            process: self.process.clone(),
            request: request.to_owned(),
            at,
            deadline: at.saturating_add(u64::try_from(remaining.as_nanos()).unwrap_or(u64::MAX)),
        });
        let inside = Inside { reporter: self.reporter.clone(), section, is_over: false };
        entered.await;
        inside
    }
}

// === impl Inside ===

impl Inside {
    async fn exit(mut self) {
        self.over().await;
    }

    fn over(&mut self) -> impl Future<Output = Answer> + use<> {
        self.is_over = true;
        self.reporter.report(Report::Exit { section: self.section.clone(), at: now() })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if !self.is_over {
            drop(self.over());
        }
    }
}
