//! The cost of locks, counted at each server.

use futures_util::future::join_all;
use tower_lock_testkit::{
    costs::{self, Costs, scripts},
    wait::until,
};

use super::servers;

/// Guarantee: G21.
#[tokio::test]
async fn locks_on_redlock_cost_the_scripts_of_the_table() {
    let Some(servers) = servers(3).await else { return };
    // A vote, the raise of its fence, and a release.
    let row = Costs { servers: 3, lock: 3, handoff: None, renewal: 1, keys_share: true };
    let calls = async || {
        let mut calls = Vec::new();
        until("the server that was not waited for has executed all", async || {
            calls = join_all(servers.redis.iter().map(scripts)).await;
            calls.iter().all(|count| *count == calls[0])
        })
        .await;
        calls
    };
    costs::check(row, async || servers.store().await, calls).await;
}
