//! Raw keys beside Redisson on a Cluster.

use std::future::IntoFuture;

use tower_lock::LockManager;
use tower_lock_testkit::{limits, log::Log, wait::until};

use super::{
    connecting::{cluster_user, smallest_cluster_acl},
    instance, shared_cluster,
};
use crate::{
    redisson::{RAW, Redisson, each_release_wakes, raw, redisson_excludes_and_wakes, second_release_leaves_the_key},
    support::granted,
};

/// Redisson subscribes at any node, or to a sharded channel at the master of the key.
/// Guarantee: G5.
#[tokio::test]
async fn raw_key_on_a_cluster_is_shared_with_redisson() {
    let Some(cluster) = shared_cluster().await else { return };
    let owner = cluster.owner(RAW).await;
    let both = [instance(&cluster, "a").await, instance(&cluster, "b").await];
    let client = Redisson::at(cluster.node(owner));
    redisson_excludes_and_wakes(client, &both[0]).await;
    each_release_wakes(client.with_node(Some(cluster.node((owner + 1) % 3))), &both[0]).await;
    each_release_wakes(client.with_node(None), &both[0]).await;
    second_release_leaves_the_key(client, &both).await;
    second_release_leaves_the_key(client.with_node(None), &both).await;
}

/// Neither for the channel, nor for the commands of sharded ones.
/// Guarantee: G5.
#[tokio::test]
async fn raw_key_on_a_cluster_needs_no_permission_for_redisson() {
    let Some(cluster) = shared_cluster().await else { return };
    let log = Log::default();
    let _listening = log.listen();
    let rules: Vec<_> = smallest_cluster_acl().into_iter().chain([format!("~{RAW}")]).collect();
    let url = cluster_user(&cluster, &rules).await;
    let locks = LockManager::new(limits::redis().connect(&url).await.expect("enough"));
    let client = Redisson::at(cluster.node(cluster.owner(RAW).await));
    let sharded = client.with_node(None);
    client.locks().await;
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    client.until_queued(1).await;
    until("warned", async || log.text().contains("Add the ACL rule `&redisson_lock__channel:*`")).await;
    client.unlocks().await;
    granted(waiting).await.release().await.expect("held, at the next poll");
    assert!(client.is_free().await, "the release is complete");
    // With the rule of the guide it wakes, and with the commands also those of sharded channels.
    let channel = ["&redisson_lock__channel:*"].map(ToOwned::to_owned);
    let commands = ["+spublish", "+pubsub|shardnumsub"].map(ToOwned::to_owned);
    let rules = [rules, channel.to_vec()].concat();
    for (rules, wakes_sharded) in [(rules.clone(), false), ([rules, commands.to_vec()].concat(), true)] {
        cluster_user(&cluster, &rules).await;
        for (client, wakes) in [(client, true), (sharded, wakes_sharded)] {
            let mut waits = client.waits().await;
            locks.lock(raw()).await.expect("free").release().await.expect("held");
            assert_eq!(waits.is_woken().await, wakes);
        }
    }
}
