//! The cost of locks in statements and waits for the disk, counted on the server.

use std::{sync::Mutex, time::Duration};

use mysql_async::prelude::Queryable;
use tokio::time::sleep;
use tower_lock_testkit::{
    costs::{self, Costs},
    locks::key,
};

use crate::support::own_environment;

/// Guarantee: G21.
#[tokio::test]
async fn locks_on_mysql_cost_the_statements_of_the_table() {
    let Some(environment) = own_environment(&[]).await else { return };
    // Each question about the statements is one of them.
    let free = Mutex::new(Some((environment.session().await, 0)));
    let statements = async || {
        let taken = free.lock().expect("no panic").take();
        let (mut session, asked) = taken.expect("one question at a time");
        let row: Option<(String, u64)> = session.query_first("SHOW GLOBAL STATUS LIKE 'Questions'").await.expect("up");
        *free.lock().expect("no panic") = Some((session, asked + 1));
        vec![row.expect("a counter").1 - asked]
    };
    let row = Costs { servers: 1, lock: 2, handoff: None, renewal: 1, keys_share: true };
    costs::check(row, async || environment.store().await, statements).await;
}

/// MariaDB counts the commits of its binary log, and MySQL those of its redo log.
const SETTINGS: [&str; 4] =
    ["--log-bin=log", "--binlog-format=ROW", "--innodb-flush-log-at-trx-commit=1", "--innodb-flush-method=fsync"];

#[tokio::test]
async fn grant_and_release_wait_once_for_the_disk() {
    // Each group of commits that write is one wait. A commit that has written nothing is in none.
    let Some(environment) = own_environment(&SETTINGS).await else { return };
    let [one, two] = environment.instances(Duration::from_secs(60)).await;
    let count = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Binlog_group_commits', 'Innodb_os_log_fsyncs')";
    let waits = async || environment.value::<u64>(count, 1).await;
    let since = async |before: u64| waits().await - before;
    let keys = || (0..64).map(|number| ("several", number));
    one.lock_all(keys()).await.expect("free").release().await.expect("up");
    one.lock(key()).await.expect("free").release().await.expect("up");

    let before = waits().await;
    for _ in 0..40 {
        one.try_lock(key()).await.expect("free").release().await.expect("up");
    }
    let count = since(before).await;
    assert!((80..90).contains(&count), "{count} waits for 40 locks");

    let before = waits().await;
    for _ in 0..20 {
        one.lock_all(keys()).await.expect("free").release().await.expect("up");
    }
    let count = since(before).await;
    // Far fewer than a wait for each key. MySQL also writes large transactions early.
    assert!((40..80).contains(&count), "{count} waits for 20 locks of 64 keys");

    let held = one.lock(key()).await.expect("free");
    let before = waits().await;
    for _ in 0..40 {
        two.try_lock(key()).await.expect_err("it is held");
    }
    let count = since(before).await;
    assert!(count < 10, "{count} waits for 40 rejections");
    held.release().await.expect("up");
}

/// A waiter asks every 50 to 150 ms, and waits for no disk.
#[tokio::test]
async fn waiter_polls_ten_times_a_second() {
    let Some(environment) = own_environment(&[]).await else { return };
    let [one, two] = environment.instances(Duration::from_secs(60)).await;
    let held = one.lock(key()).await.expect("free");
    let waiter = tokio::spawn(async move { two.lock(key()).wait(Duration::from_secs(60)).await });
    let statements = async || environment.value::<u64>("SHOW GLOBAL STATUS LIKE 'Com_call_procedure'", 1).await;
    let before = statements().await;
    sleep(Duration::from_secs(2)).await;
    let polls = statements().await - before;
    held.release().await.expect("up");
    waiter.await.expect("no panic").expect("a grant").release().await.expect("up");
    // A poll that finds the key busy calls two procedures.
    assert!((2 * 8..=2 * 45).contains(&polls), "{} polls in two seconds", polls / 2);
}
