//! Servers are killed and stopped while instances lock keys.

use std::{sync::Arc, time::Duration};

use tower_lock_testkit::{caller::LONG, sections::Sections, wait::ms};

use crate::support::own_environment;

const LEASE: Duration = Duration::from_secs(6);

/// Guarantee: G1.
#[tokio::test]
async fn locks_outlast_members_that_are_killed() {
    let Some(environment) = own_environment(3).await else { return };
    let servers = environment.servers();
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&environment.instances(LEASE).await);
    for n in 0..3 {
        sections.go_on("sections before a kill").await;
        servers.kill(n);
        sections.go_on("sections without a member").await;
        servers.restart(n).await;
    }
    let leader = servers.leader().await;
    servers.kill(leader);
    sections.go_on("sections after the leader").await;
    servers.restart(leader).await;
    sections.go_on("sections after the restart").await;
    sections.end(tasks).await;
}

/// For less and for more than a session.
///
/// Guarantee: G1.
#[tokio::test]
async fn locks_outlast_members_that_are_stopped() {
    let Some(environment) = own_environment(3).await else { return };
    let servers = environment.servers();
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&environment.instances(Duration::from_secs(2)).await);
    for (is_leader, time) in [(true, ms(2_000)), (false, ms(2_000)), (true, ms(12_000)), (false, ms(12_000))] {
        sections.go_on("sections before a stop").await;
        let leader = servers.leader().await;
        let stopped = if is_leader { leader } else { (leader + 1) % 3 };
        servers.freeze(stopped);
        tokio::time::sleep(time).await;
        sections.go_on("sections without a member").await;
        servers.thaw(stopped);
    }
    sections.go_on("sections after the stops").await;
    sections.end(tasks).await;
}

/// Guarantee: G1.
#[tokio::test]
async fn restart_of_the_only_server_ends_no_lock() {
    let Some(environment) = own_environment(1).await else { return };
    let servers = environment.servers();
    let [a, b] = environment.instances(Duration::from_secs(30)).await;
    let held = a.lock(("held",)).await.expect("free");
    let waiter = tokio::spawn(async move { b.lock(("held",)).wait(LONG).await });
    for _ in 0..2 {
        servers.kill(0);
        servers.restart(0).await;
    }
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&environment.instances(LEASE).await);
    sections.go_on("sections after the restarts").await;
    sections.end(tasks).await;
    assert!(!waiter.is_finished(), "the key is held");
    let token = held.fencing_token();
    held.release().await.expect("it is still held");
    let next = tower_lock_testkit::wait::soon("a grant", waiter).await.expect("no panic").expect("a grant");
    assert!(next.fencing_token() > token);
    next.release().await.expect("held");
}
