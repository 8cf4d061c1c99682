//! The commands of the guide for operators.

use tower_lock::{LockError, LockManager};
use tower_lock_testkit::{limits, skipped, wait::soon};

use crate::support::own_environment;

const GUIDE: &str = include_str!("../../../docs/guide/zookeeper-in-production.md");

/// The lines of each block of commands.
fn blocks() -> [Vec<&'static str>; 5] {
    let blocks: Vec<_> = GUIDE.split("```text\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    let blocks: Vec<_> = blocks.into_iter().map(|block| block.lines().collect()).collect();
    blocks.try_into().expect("rights, rights later, all nodes, one node, free")
}

/// Guarantee: G1, G8.
#[tokio::test]
async fn commands_of_the_zookeeper_guide_show_and_free_a_lock() {
    let Some(environment) = own_environment(1).await else { return };
    let servers = environment.servers();
    let [rights, later, all, stat, free] = blocks();
    let cli = |lines: &[&str]| {
        let text = servers.cli(lines);
        assert!(!text.contains("KeeperErrorCode") && !text.contains("Command failed"), "{lines:?}: {text}");
        text
    };
    if !servers.cli(&["version"]).contains("ZooKeeper CLI version") {
        return skipped("the commands of the guide", "`commons-cli` of `zkCli`");
    }
    // As an administrator, for a user.
    cli(&rights);
    let url = environment.url().replace("://", "://locks:secret@") + "/shop/locks";
    drop(LockManager::connect(&url).await.expect("all rights"));
    let text =
        format!("{:?}", LockManager::connect(&url.replace("secret", "s3cret")).await.map(drop).expect_err("none"));
    assert!(text.contains("the user may not make or read nodes below `/shop/locks`"), "{text}");

    let locks = LockManager::connect(&environment.url()).await.expect("it is up").instance("api-1").build();
    let guard = locks.lock(("reward", 7, "daily")).await.expect("free");
    let listed = cli(&all);
    let entry = listed.lines().find(|line| line.contains("/reward:7:daily~api-1:")).expect("an entry");
    let bucket = &entry["/tower-lock/".len()..][..2];
    assert!(GUIDE.contains(&format!("/tower-lock/{bucket}/reward:7:daily~api-1:")), "the bucket is {bucket}");
    let entry_of_guide = stat[0].strip_prefix("stat ").expect("a path");
    let in_place = |line: &str| line.replace(entry_of_guide, entry);
    let text = cli(&[&in_place(stat[0])]);
    assert!(text.contains("ctime = "), "{text}");
    for line in free {
        cli(&[&in_place(line)]);
    }
    soon("the loss", guard.held_lock().lost()).await;
    let busy = locks.try_lock(("reward", 7, "daily")).await;
    assert!(matches!(busy, Err(LockError::Busy { .. })), "{busy:?}");
    let next = locks.lock(("reward", 7, "daily")).wait(limits::BROKEN).await.expect("the block ends");
    assert!(next.fencing_token() > guard.fencing_token());
    next.release().await.expect("held");
    drop(locks);

    let url = environment.url();
    let with_user = url.replace("://", "://locks:secret@");
    let text = format!("{:?}", LockManager::connect(&with_user).await.map(drop).expect_err("open"));
    assert!(text.contains("clients without a user may write below `/tower-lock`"), "{text}");
    cli(&later);
    drop(LockManager::connect(&with_user).await.expect("closed"));
    let text = format!("{:?}", LockManager::connect(&url).await.map(drop).expect_err("no right"));
    assert!(text.contains("the user may not make or read nodes"), "{text}");
}
