//! A contender of one raw key: it prints the start and the end of each section, in microseconds of
//! the time of day, until its input ends. `redisson/Contenders.java` is the same for Redisson.

use std::{
    env,
    io::{Read, Write, stdin, stdout},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::{runtime::Builder, time::sleep};
use tower_lock::{LockKey, LockManager, RedisStore};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Arguments: address, instance, name of the lock, milliseconds of a section and after it.
fn main() -> Result<(), Failure> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let [address, instance, name, time] = &arguments[..] else { return Err("four arguments".into()) };
    let (key, time) = (LockKey::raw(name.as_str())?, Duration::from_millis(time.parse()?));
    let is_stopped = Arc::<AtomicBool>::default();
    thread::spawn({
        let is_stopped = Arc::clone(&is_stopped);
        move || {
            let _ = stdin().read_to_end(&mut Vec::new());
            is_stopped.store(true, Ordering::Relaxed);
        }
    });
    Builder::new_current_thread().enable_all().build()?.block_on(async {
        let locks =
            LockManager::builder(RedisStore::connect(address.as_str()).await?).instance(instance.as_str()).build();
        while !is_stopped.load(Ordering::Relaxed) {
            let guard = locks.lock(key.clone()).await?;
            let start = now()?;
            sleep(time).await;
            // Before the call: another contender may start while the reply is on its way.
            let end = now()?;
            guard.release().await?;
            sleep(time).await;
            let mut output = stdout().lock();
            writeln!(output, "{start} {end}")?;
            output.flush()?;
        }
        println!("end");
        Ok(())
    })
}

#[expect(clippy::disallowed_methods, reason = "the clock of the machine is the one that Java reads, too")]
fn now() -> Result<u128, Failure> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros())
}
