//! The commands of the guide for operators, run by a shell.

use std::process::Command;

use tower_lock::LockKey;
use tower_lock_testkit::wait::{soon, until};

use crate::support::{environment, served};

const GUIDE: &str = include_str!("../../../docs/guide/redis-in-production.md");

/// The shell commands of the guide, one text for each block.
fn blocks() -> [&'static str; 4] {
    let blocks: Vec<_> = GUIDE.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    blocks.try_into().expect("permissions, state, time, revocation")
}

fn shell(script: &str) -> String {
    let output = Command::new("sh").args(["-euc", script]).output().expect("sh runs");
    assert!(output.status.success() && output.stderr.is_empty(), "{script}\n{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_of_the_guide_show_and_free_a_lock() {
    let Some(environment) = environment().await else { return };
    if Command::new("redis-cli").arg("--version").output().is_err() {
        return tower_lock_testkit::skipped("the commands of the guide", "redis-cli");
    }
    let run =
        |script: &str| shell(&script.replace("redis-cli ", &format!("redis-cli -p {} ", environment.redis.port())));
    let [permissions, state, time, revocation] = blocks();
    let key = || LockKey::from(("reward", 7, "daily"));
    let (one, two) =
        (environment.instance_without_renewals("api-7f3").await, environment.direct_instance("api-9c1").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("queued", async || one.inspect(key()).await.expect("a reply").waiting == 1).await;

    assert_eq!(run(permissions), "OK\n");
    let shown = run(state);
    let lines: Vec<_> = shown.lines().collect();
    // No permits: an empty list.
    let ["lock:reward:7:daily", holder, fence, "", ttl, "1", waiter, inboxes @ ..] = &lines[..] else {
        panic!("{shown}")
    };
    let (inbox, _) = holder.rsplit_once(':').expect("instance:random:number");
    assert!(inbox.starts_with("api-7f3:") && waiter.starts_with("api-9c1:"), "{shown}");
    assert!((1..=601_000).contains(&ttl.parse::<u64>().expect("a number")), "{shown}");
    assert_eq!(inboxes.len(), 2, "{shown}");
    assert!(inboxes.contains(&&*format!("tower-lock:lock:in:{inbox}")), "{shown}");

    assert!(time.contains("1795282512345678"), "{time}");
    assert!(!run(&time.replace("1795282512345678", fence)).is_empty());

    let (example, example_inbox) = ("api-7f3:9c1e44d07b2a51f0:184467", "api-7f3:9c1e44d07b2a51f0");
    assert!(revocation.contains(example), "{revocation}");
    let revocation = revocation.replace(example, holder).replace(example_inbox, inbox);
    assert_eq!(run(&revocation), "1\n1\n", "one key, one receiver");
    soon("it is notified", guard.held_lock().lost()).await;
    served(waiting).await;
}
