//! The servers of a question.

use tower_lock_testkit::{RedisCluster, RedisServer};

use crate::measure::RedisWork;

/// Servers that keep the locks of a question.
pub enum Servers {
    One(RedisServer),
    /// The masters of a Redis Cluster, without replicas.
    Cluster(RedisCluster),
    /// Servers of Redlock, which know nothing of each other.
    Independent(Vec<RedisServer>),
}

// === impl Servers ===

impl Servers {
    pub async fn one() -> Self {
        Self::One(RedisServer::start().await)
    }

    pub async fn cluster(masters: usize) -> Self {
        let cluster = RedisCluster::start(masters, 0).await;
        // The defaults of Redis. The tests have shorter times, and so more work while nothing
        // happens.
        for node in 0..masters {
            for [directive, value] in [["hz", "10"], ["cluster-node-timeout", "15000"]] {
                let reply = cluster.command(node, &["CONFIG", "SET", directive, value]).await;
                assert_eq!(reply.text(), Some("OK"), "{directive}");
            }
        }
        Self::Cluster(cluster)
    }

    pub async fn independent(count: usize) -> Self {
        let mut servers = Vec::new();
        for _ in 0..count {
            servers.push(RedisServer::start().await);
        }
        Self::Independent(servers)
    }

    /// `redis://` and an address, or `redis+cluster://` or `redis+redlock://` and all addresses.
    pub fn url(&self) -> String {
        match self {
            Self::One(server) => server.url(),
            Self::Cluster(cluster) => cluster.url(),
            Self::Independent(servers) => {
                let addresses: Vec<_> = servers.iter().map(|server| server.address().to_string()).collect();
                format!("redis+redlock://{}", addresses.join(","))
            }
        }
    }

    pub fn all(&self) -> Vec<&RedisServer> {
        match self {
            Self::One(server) => vec![server],
            Self::Independent(servers) => servers.iter().collect(),
            Self::Cluster(cluster) => (0..cluster.addresses().len()).map(|node| cluster.node(node)).collect(),
        }
    }

    /// The sum of their counters.
    pub async fn work(&self) -> RedisWork {
        let mut work = RedisWork::default();
        for server in self.all() {
            work = work + RedisWork::of(server).await;
        }
        work
    }

    pub async fn flush(&self) {
        for server in self.all() {
            server.command(&["FLUSHALL"]).await;
        }
    }
}
