//! A process that forks while it holds a lock on Redis. The child creates a manager of its own.

use std::{future::IntoFuture, mem, process, time::Duration};

use fork::{Fork, fork, waitpid};
use serde::Serialize;
use tokio::{
    runtime::{Builder, Runtime},
    time::{sleep, timeout},
};
use tower_lock::{LockError, LockGuard, LockManager, RedisStore, lock::ReleaseOutcome};
use tower_lock_testkit::limits;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The observations of one process.
#[derive(Default, Serialize)]
struct Observed {
    is_child: bool,
    /// The name of the process as holder of a key.
    name: String,
    /// Whether the child was rejected by the copied manager, and by its own while its parent has
    /// the key.
    refused: bool,
    tokens: Vec<u64>,
    freed: bool,
}

fn main() -> Result<(), Failure> {
    let before = runtime()?;
    let (locks, guard) = before.block_on(async {
        let locks =
            LockManager::builder(RedisStore::connect(&std::env::var("REDIS_URL")?).await?).instance("api").build();
        let guard = locks.lock(("account", 7)).await?;
        Ok::<_, Failure>((locks, guard))
    })?;
    let observed = match fork()? {
        Fork::Child => {
            // Its threads are those of the parent: a shutdown would wait for them.
            mem::forget(before);
            let observed = runtime()?.block_on(child(&locks, guard))?;
            println!("{}", serde_json::to_string(&observed)?);
            process::exit(0);
        }
        Fork::Parent(child) => {
            let observed = before.block_on(parent(&locks, guard))?;
            waitpid(child)?;
            observed
        }
    };
    println!("{}", serde_json::to_string(&observed)?);
    Ok(())
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(1).enable_all().build()
}

async fn child(locks: &LockManager, copied: LockGuard) -> Result<Observed, Failure> {
    let mut observed = Observed { is_child: true, ..Observed::default() };
    // The release of the copy does not affect the lock of the parent.
    assert_eq!(copied.release().await?, ReleaseOutcome::NotHeld);
    observed.refused = matches!(locks.try_lock(("account", 8)).await, Err(LockError::Store(_)));
    let locks = &LockManager::builder(RedisStore::connect(&std::env::var("REDIS_URL")?).await?).instance("api").build();
    observed.refused &= matches!(locks.try_lock(("account", 7)).await, Err(LockError::Busy { .. }));
    let own = locks.lock(("account", 8)).await?;
    observed.name = holder(locks, 8).await?;
    observed.tokens.push(own.fencing_token().as_u64());
    own.release().await?;
    // A message announces the grant.
    let after = timeout(limits::BROKEN, locks.lock(("account", 7)).wait(limits::BROKEN).into_future()).await??;
    observed.tokens.push(after.fencing_token().as_u64());
    observed.freed = after.release().await? == ReleaseOutcome::Released;
    Ok(observed)
}

async fn parent(locks: &LockManager, guard: LockGuard) -> Result<Observed, Failure> {
    let name = holder(locks, 7).await?;
    let tokens = vec![guard.fencing_token().as_u64()];
    timeout(limits::BROKEN, async {
        while locks.inspect(("account", 7)).await?.waiting == 0 {
            sleep(Duration::from_millis(10)).await;
        }
        Ok::<_, Failure>(())
    })
    .await??;
    Ok(Observed { name, tokens, freed: guard.release().await? != ReleaseOutcome::NotHeld, ..Observed::default() })
}

async fn holder(locks: &LockManager, account: u64) -> Result<String, Failure> {
    let state = locks.inspect(("account", account)).await?;
    Ok(state.holder().ok_or("the key has no holder")?.id.manager().to_owned())
}
