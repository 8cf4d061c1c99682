//! Runtimes that end while calls are under way. A test of this has a process of its own, which a
//! panic in a `Drop` could abort.

use std::{env, panic, process, thread, time::Duration};

use tokio::{
    runtime::{Builder, Runtime},
    task::spawn_blocking,
};
use tower_lock::{LockManager, store::LockStore};

use crate::{process::Process, wait::ms};

const URL: &str = "TOWER_LOCK_TEST_ENDS";
const ROUNDS: u64 = 15;
const TASKS: u64 = 6;

/// Less than a lease.
const WAIT: Duration = Duration::from_secs(20);

/// Runs this test again in a child process, with runtimes that end. No thread of it panics, and
/// another runtime gets each key before a lease expires.
pub async fn ends_of_runtimes_are_survived(test: &str, url: &str) {
    let mut child = Process::command(env::current_exe().expect("this test"));
    child.args(["--exact", test, "--nocapture"]).env(URL, url);
    let output = spawn_blocking(move || child.output()).await.expect("no panic").expect("it starts");
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
}

/// The child process of such a test does not return from this call. Its store has the time limits
/// of tests: a call that fails beside other load would end the process, too.
pub fn end_runtimes_in_child_process<S: LockStore>(connect: impl AsyncFnOnce(&str) -> S + Send + 'static) {
    let Ok(url) = env::var(URL) else { return };
    panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        process::abort();
    }));
    // Outside of the runtime of the test.
    thread::spawn(move || end_runtimes(async || connect(&url).await)).join().expect("no panic");
    process::exit(0);
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

fn end_runtimes<S: LockStore>(connect: impl AsyncFnOnce() -> S) {
    let lasting = runtime();
    let locks = lasting.block_on(async { LockManager::builder(connect().await).build() });
    for round in 0..ROUNDS {
        let other = runtime();
        for task in 0..TASKS {
            let locks = locks.clone();
            other.spawn(async move {
                let keys = (0..4).map(|key| ("key", task, key));
                for is_one in [true, false].into_iter().cycle() {
                    if is_one {
                        let guard = locks.lock(("key", task, 0)).wait(WAIT).await.expect("free");
                        let _ = guard.release().await;
                    } else {
                        let guards = locks.lock_all(keys.clone()).wait(WAIT).await.expect("free");
                        let _ = guards.release().await;
                    }
                }
            });
        }
        // Each round ends the runtime at another point of the calls.
        thread::sleep(ms(3 + 3 * (round % 8)));
        drop(other);
        lasting.block_on(async {
            for task in 0..TASKS {
                let guards = locks.lock_all((0..4).map(|key| ("key", task, key))).wait(WAIT).await;
                guards.expect("free before its lease expires").release().await.expect("it is up");
            }
        });
    }
}
