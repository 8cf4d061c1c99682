//! Instances are restarted one by one behind a balancer that honours their readiness.

use std::{cell::Cell, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, http::StatusCode, routing::get};
use futures_util::future::{join, join_all};
use tokio::{
    net::TcpListener,
    sync::{Notify, watch},
    task::JoinHandle,
    time::sleep,
};
use tower_lock::{LockLayer, LockManager, test_util::TestStore};
use tower_lock_testkit::{
    http::Http1,
    locks::one_key,
    wait::{settle, until},
};

use super::admin;

/// One instance of a service, with a readiness probe.
struct Instance {
    address: SocketAddr,
    server: JoinHandle<io::Result<()>>,
    stops: Arc<Notify>,
}

impl Instance {
    async fn start(store: &TestStore) -> Self {
        let locks = LockManager::new(store.clone());
        let ready = {
            let locks = locks.clone();
            get(async move || locks.health().await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE))
        };
        let work = get(async || sleep(Duration::from_millis(2)).await);
        let layer = LockLayer::new(&locks, one_key()).wait(Duration::from_secs(60));
        let app = Router::new().route("/ready", ready).route("/work", work.route_layer(layer));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let (address, stops) = (listener.local_addr().expect("bound"), Arc::<Notify>::default());
        let starts_to_listen = Arc::clone(&stops);
        // The signal reaches all instances of this process: one listens when it is its turn.
        let stop = async move {
            starts_to_listen.notified().await;
            let shutdown = locks.shutdown_on_signal(Duration::from_secs(60)).serve_for(Duration::from_secs(1));
            let signal = async {
                settle().await;
                admin::terminate_this_process();
            };
            join(shutdown, signal).await;
        };
        let server = tokio::spawn(async move { axum::serve(listener, app).with_graceful_shutdown(stop).await });
        Self { address, server, stops }
    }
}

async fn status_of(address: SocketAddr, path: &str) -> u16 {
    let mut wire = Http1::connect(address).await;
    wire.write(&format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await;
    wire.reply(false).await.status
}

/// The clients use the instances whose probe has passed lately, as a balancer does.
/// Guarantee: G2.
#[tokio::test]
async fn rolling_restart_rejects_no_request() {
    let _signals = admin::SIGNALS.acquire().await;
    let store = TestStore::new();
    let mut instances = Vec::new();
    for _ in 0..3 {
        instances.push(Instance::start(&store).await);
    }
    let all = |instances: &[Instance]| instances.iter().map(|instance| instance.address).collect::<Vec<_>>();
    let (known, ready) = (watch::Sender::new(all(&instances)), watch::Sender::new(all(&instances)));
    let probes = async {
        loop {
            let (mut passed, addresses) = (Vec::new(), known.borrow().clone());
            for address in addresses {
                passed.extend((status_of(address, "/ready").await == 200).then_some(address));
            }
            ready.send_replace(passed);
            sleep(Duration::from_millis(20)).await;
        }
    };
    let served = Cell::new(0);
    let client = async |number: usize| {
        loop {
            let addresses = ready.borrow().clone();
            assert_eq!(status_of(addresses[number % addresses.len()], "/work").await, 200);
            served.set(served.get() + 1);
        }
    };
    let restarts = async {
        for old in 0..3 {
            instances.push(Instance::start(&store).await);
            known.send_replace(all(&instances[old..]));
            let (before, new) = (served.get(), instances[instances.len() - 1].address);
            until("the new one is ready", async || ready.borrow().contains(&new)).await;
            instances[old].stops.notify_one();
            until("the old one is not", async || !ready.borrow().contains(&instances[old].address)).await;
            known.send_replace(all(&instances[old + 1..]));
            (&mut instances[old].server).await.expect("no panic").expect("no error");
            assert!(served.get() > before, "requests were served meanwhile");
        }
    };
    let clients = join_all((0..8).map(client));
    tokio::select! {
        () = restarts => {}
        () = probes => {}
        _ = clients => {}
    }
}
