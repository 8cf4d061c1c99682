use std::{collections::BTreeSet, ops::RangeInclusive, time::Duration};

use fastrand::Rng;
use tokio::time::sleep;

use crate::{
    process::ReservedPort,
    redis::{RedisOptions, RedisServer},
    resp::Reply,
    wait::{self, ms},
};

/// A Redis Cluster: masters and their replicas, each a process.
///
/// A node is named by its number: first the masters at the start, then the replicas of the first
/// master, those of the second one and so on, then the masters that were added.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<Node>,
    options: RedisClusterOptions,
}

/// Builder for a [`RedisCluster`] with non-default settings.
#[derive(Clone, Debug, Default)]
#[must_use = "options start nothing"]
pub struct RedisClusterOptions {
    server: RedisOptions,
    /// The arguments of `MIGRATE`.
    login: Vec<String>,
}

#[derive(Debug)]
struct Node {
    server: RedisServer,
    id: String,
    /// A master and its replicas have the same number, also after a failover.
    shard: usize,
    bus: ReservedPort,
}

/// A line of `CLUSTER NODES`.
#[derive(Debug)]
struct Line {
    id: String,
    flags: Vec<String>,
    master: String,
    epoch: u64,
    slots: Vec<RangeInclusive<u16>>,
}

/// The number of slots.
const SLOTS: u16 = 16_384;
/// As `redis-cli` does it.
const KEYS_PER_MIGRATE: usize = 10;

/// Polls until processes agree. They send messages ten times a second, and each poll asks all of
/// them.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    wait::until(what, async || {
        let holds = is_so().await;
        if !holds {
            sleep(Duration::from_millis(40)).await;
        }
        holds
    })
    .await;
}

// === impl RedisClusterOptions ===

impl RedisClusterOptions {
    /// Sets one directive of `redis.conf` on all nodes.
    pub fn set(self, directive: &str, value: &str) -> Self {
        Self { server: self.server.set(directive, value), ..self }
    }

    /// Sets the only user, and its password.
    pub fn user(self, name: &str, password: &str) -> Self {
        let server = self.server.user(name, password, ["off"]).set("masteruser", name).set("masterauth", password);
        Self { server, login: ["AUTH2", name, password].map(str::to_owned).to_vec() }
    }

    /// Starts the processes, and waits until all slots are served and a failover is possible.
    pub async fn start(self, masters: usize, replicas_per_master: usize) -> RedisCluster {
        let mut cluster = RedisCluster { nodes: Vec::new(), options: self };
        let replicas = (0..masters).flat_map(|master| std::iter::repeat_n(master, replicas_per_master));
        for shard in (0..masters).chain(replicas) {
            cluster.add(shard).await;
        }
        for node in 0..cluster.nodes.len() {
            cluster.ok(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(node + 1).to_string()]).await;
            if node < masters {
                let bound = |n: usize| n * usize::from(SLOTS) / masters;
                let (first, last) = (bound(node).to_string(), (bound(node + 1) - 1).to_string());
                cluster.ok(node, &["CLUSTER", "ADDSLOTSRANGE", &first, &last]).await;
            }
            if node > 0 {
                cluster.meet(node).await;
            }
        }
        for node in masters..cluster.nodes.len() {
            let master = &*cluster.nodes[cluster.nodes[node].shard].id;
            until("a replica knows its master", async || {
                cluster.command(node, &["CLUSTER", "REPLICATE", master]).await.text() == Some("OK")
            })
            .await;
        }
        cluster.settled().await;
        cluster
    }
}

// === impl RedisCluster ===

impl RedisCluster {
    /// A builder for non-default settings.
    pub fn options() -> RedisClusterOptions {
        RedisClusterOptions::default()
    }

    /// Starts a cluster whose masters have the same number of slots each.
    pub async fn start(masters: usize, replicas_per_master: usize) -> Self {
        Self::options().start(masters, replicas_per_master).await
    }

    /// Adds a master without slots. Returns its number.
    pub async fn add_empty_master(&mut self) -> usize {
        let shard = self.nodes.iter().map(|node| node.shard + 1).max().unwrap_or(0);
        let node = self.add(shard).await;
        self.meet(node).await;
        self.settled().await;
        node
    }

    /// The URL for clients: the first three nodes, with the user and the password.
    #[must_use]
    pub fn url(&self) -> String {
        let first = self.nodes[0].server.url();
        format!("redis+cluster{}", first.trim_start_matches("redis"))
            + &self.addresses()[1..self.nodes.len().min(3)].iter().map(|node| format!(",{node}")).collect::<String>()
    }

    /// The URL of one node.
    #[must_use]
    pub fn url_of(&self, node: usize) -> String {
        self.nodes[node].server.url()
    }

    /// The addresses of all nodes.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.server.address().to_string()).collect()
    }

    /// The server of a node.
    #[must_use]
    pub fn node(&self, node: usize) -> &RedisServer {
        &self.nodes[node].server
    }

    /// Runs a command at a node, on a new connection.
    pub async fn command(&self, node: usize, parts: &[&str]) -> Reply {
        self.nodes[node].server.command(parts).await
    }

    /// Runs a command at the master of a key.
    pub async fn command_for(&self, key: &str, parts: &[&str]) -> Reply {
        self.command(self.owner(key).await, parts).await
    }

    /// The slot of a key.
    #[must_use]
    pub fn slot(key: &str) -> u16 {
        let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
        let hashed = tag.filter(|tag| !tag.is_empty()).unwrap_or(key);
        let crc = hashed.bytes().fold(0_u16, |crc, byte| {
            (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| (crc << 1) ^ if crc >> 15 == 1 { 0x1021 } else { 0 })
        });
        crc % SLOTS
    }

    /// The node that is the master of the slot of this key.
    pub async fn owner(&self, key: &str) -> usize {
        self.owner_of_slot(Self::slot(key)).await
    }

    /// The node that is the master of this slot.
    pub async fn owner_of_slot(&self, slot: u16) -> usize {
        let mut owner = None;
        until("a node has the slot", async || {
            owner = self.claimed_owner(slot).await;
            owner.is_some()
        })
        .await;
        owner.expect("just seen")
    }

    /// `None`: while a slot moves, a node of a busy machine may not have heard of it yet.
    async fn claimed_owner(&self, slot: u16) -> Option<usize> {
        let mut claims = Vec::new();
        for node in self.running() {
            let own = self.own_line(node).await;
            if own.is_some_and(|own| own.slots.iter().any(|range| range.contains(&slot))) {
                claims.push(node);
            }
        }
        // A former master that comes back claims its slots until it hears of the new one.
        let mut owner = None;
        for node in claims {
            let epoch = self.own_line(node).await.map(|own| own.epoch);
            owner = owner.max(Some((epoch, node)));
        }
        owner.map(|(_, node)| node)
    }

    /// The slots of a node.
    pub async fn slots_of(&self, node: usize) -> Vec<u16> {
        self.own_line(node).await.map(|own| own.slots.into_iter().flatten().collect()).unwrap_or_default()
    }

    /// The running nodes that have slots.
    pub async fn masters(&self) -> Vec<usize> {
        let mut masters = Vec::new();
        for node in self.running() {
            if self.own_line(node).await.is_some_and(|own| !own.slots.is_empty()) {
                masters.push(node);
            }
        }
        masters
    }

    /// The running replicas of a master.
    pub async fn replicas_of(&self, master: usize) -> Vec<usize> {
        let mut replicas = Vec::new();
        for node in self.running() {
            if self.own_line(node).await.is_some_and(|own| own.master == self.nodes[master].id) {
                replicas.push(node);
            }
        }
        replicas
    }

    // --- faults ---

    /// Kills a node and waits for its end.
    pub fn kill(&self, node: usize) {
        self.nodes[node].server.kill();
    }

    /// Stops a node with SIGSTOP.
    pub fn freeze(&self, node: usize) {
        self.nodes[node].server.freeze();
    }

    /// Continues a node.
    pub fn thaw(&self, node: usize) {
        self.nodes[node].server.thaw();
    }

    /// Restarts a node in its folder, and waits until it is part of the cluster. It has no data. A
    /// master that was not replaced is the master again.
    pub async fn restart(&mut self, node: usize) {
        self.nodes[node].server.restart().await;
        self.rejoined(node).await;
    }

    /// Replaces a node by the only one of another cluster, which has all slots and a larger epoch,
    /// as where addresses are given again.
    pub async fn replace_by_another_cluster(&mut self, node: usize) {
        let Node { server, bus, .. } = &mut self.nodes[node];
        // The former nodes do not find it: they would drop the address.
        *bus = ReservedPort::new();
        server.options = server.options.clone().set("cluster-port", &bus.number().to_string());
        server.restart_empty().await;
        self.ok(node, &["CLUSTER", "SET-CONFIG-EPOCH", "1000"]).await;
        self.ok(node, &["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).await;
        until("it serves its slots", async || {
            let info = self.command(node, &["CLUSTER", "INFO"]).await;
            info.text().is_some_and(|info| info.contains("cluster_state:ok"))
        })
        .await;
    }

    /// Waits until a node that was restarted or thawed is part of the cluster.
    pub async fn rejoined(&self, node: usize) {
        until("a node is back", async || self.is_settled(node).await && self.all_know(node).await).await;
    }

    /// Kills a master, and waits until one of its replicas is the master. Returns its number.
    pub async fn failover(&self, master: usize) -> usize {
        self.kill(master);
        self.promoted(master).await
    }

    /// Waits until all running nodes know another master in the place of this one, and serve all
    /// slots. Returns its number.
    ///
    /// A shard may fail over once in four seconds. Until then a former master counts the votes of
    /// its last election again: it takes its slots with an old epoch, and no other node believes
    /// it.
    pub async fn promoted(&self, former: usize) -> usize {
        let mut promoted = None;
        until("a failover", async || {
            promoted = self.successor(former).await;
            promoted.is_some()
        })
        .await;
        promoted.expect("just seen")
    }

    /// Makes a replica the master in the place of a running one, without a loss. Returns its
    /// number.
    pub async fn planned_failover(&self, master: usize) -> usize {
        let replica = *self.replicas_of(master).await.first().expect("a replica");
        self.ok(replica, &["CLUSTER", "FAILOVER"]).await;
        self.promoted(master).await
    }

    /// Lets no replica follow the master any more. They keep what they have, and can be promoted.
    pub async fn cut_replication(&self, master: usize) {
        self.nodes[master].server.cut_replication().await;
    }

    // --- slots ---

    /// Starts to move a slot: it is half moved until [`finish_move`](Self::finish_move) or
    /// [`stop_move`](Self::stop_move).
    pub async fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let slot = &*slot.to_string();
        self.ok(to, &["CLUSTER", "SETSLOT", slot, "IMPORTING", &self.nodes[from].id]).await;
        self.ok(from, &["CLUSTER", "SETSLOT", slot, "MIGRATING", &self.nodes[to].id]).await;
    }

    /// The keys of a slot at a node, at most this many.
    pub async fn keys_in(&self, node: usize, slot: u16, limit: usize) -> Vec<String> {
        let reply = self.command(node, &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), &limit.to_string()]).await;
        reply.items().iter().filter_map(|key| key.text().map(str::to_owned)).collect()
    }

    /// Moves these keys of a half moved slot.
    ///
    /// # Errors
    ///
    /// The error of `MIGRATE`: a key is at both nodes, or the node does not respond.
    pub async fn migrate(&self, from: usize, to: usize, keys: &[&str]) -> Result<(), String> {
        let port = self.node(to).port().to_string();
        let login = self.options.login.iter().map(String::as_str);
        let parts = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000"].into_iter().chain(login).chain(["KEYS"]);
        let parts: Vec<_> = parts.chain(keys.iter().copied()).collect();
        match self.command(from, &parts).await {
            Reply::Error(error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Moves all keys of a half moved slot, as `redis-cli` does it.
    ///
    /// # Errors
    ///
    /// As [`migrate`](Self::migrate).
    pub async fn move_keys(&self, slot: u16, from: usize, to: usize) -> Result<(), String> {
        loop {
            let keys = self.keys_in(from, slot, KEYS_PER_MIGRATE).await;
            if keys.is_empty() {
                return Ok(());
            }
            self.migrate(from, to, &keys.iter().map(String::as_str).collect::<Vec<_>>()).await?;
        }
    }

    /// Moves a slot to another master, key by key and with pauses. The lock, its queue and its
    /// fence move one by one.
    ///
    /// # Panics
    ///
    /// Panics if a key is at both masters.
    pub async fn move_key_by_key(&self, slot: u16, rng: &mut Rng) {
        let from = self.owner_of_slot(slot).await;
        let mut masters = self.masters().await;
        masters.retain(|node| *node != from);
        let to = rng.choice(masters).expect("several masters");
        self.begin_move(slot, from, to).await;
        // Half moved, sometimes for long.
        sleep(ms(rng.u64(0..200))).await;
        for key in self.keys_in(from, slot, 10).await {
            self.migrate(from, to, &[&key]).await.expect("no key is at both masters");
            sleep(ms(rng.u64(0..50))).await;
        }
        self.move_keys(slot, from, to).await.expect("no key is at both masters");
        sleep(ms(rng.u64(0..20))).await;
        self.finish_move(slot, from, to).await;
    }

    /// Ends the move of a slot without keys at its former master.
    pub async fn finish_move(&self, slot: u16, from: usize, to: usize) {
        let others = self.masters().await.into_iter().filter(|node| ![from, to].contains(node));
        // The new master first: no node refuses the slot in between.
        let all: Vec<_> = [to, from].into_iter().chain(others).collect();
        for node in &all {
            self.ok(*node, &["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &self.nodes[to].id]).await;
        }
        // The new master has taken the next epoch. If another one took the same, the slot would
        // have two masters until one of them gives way.
        until("all nodes know the epoch of the move", async || {
            let mut epochs = BTreeSet::new();
            for node in &all {
                let info = self.text(*node, &["CLUSTER", "INFO"]).await;
                epochs.extend(info.lines().find(|line| line.starts_with("cluster_current_epoch")).map(str::to_owned));
            }
            epochs.len() == 1
        })
        .await;
    }

    /// Stops the move of a slot: it belongs to its former master. Keys that have moved stay there.
    pub async fn stop_move(&self, slot: u16, from: usize, to: usize) {
        for node in [from, to] {
            self.ok(node, &["CLUSTER", "SETSLOT", &slot.to_string(), "STABLE"]).await;
        }
    }

    /// Stops each move of a slot.
    pub async fn stop_moves(&self) {
        for node in 0..self.nodes.len() {
            let known = self.text(node, &["CLUSTER", "NODES"]).await;
            let own = known.lines().find(|line| line.contains("myself")).unwrap_or_default();
            for moved in own.split(" [").skip(1) {
                let slot = moved.split('-').next().expect("a slot");
                self.ok(node, &["CLUSTER", "SETSLOT", slot, "STABLE"]).await;
            }
        }
    }

    /// Moves a slot and its keys, as `redis-cli` does it.
    ///
    /// # Errors
    ///
    /// As [`migrate`](Self::migrate). The slot is half moved then.
    pub async fn move_slot(&self, slot: u16, from: usize, to: usize) -> Result<(), String> {
        self.begin_move(slot, from, to).await;
        self.move_keys(slot, from, to).await?;
        self.finish_move(slot, from, to).await;
        Ok(())
    }

    // --- private ---

    async fn add(&mut self, shard: usize) -> usize {
        let bus = ReservedPort::new();
        // Without migration of replicas, a master that gives its last slot away stays a master. A
        // replica is promoted however long its master has not been heard.
        let server = (self.options.server.clone())
            .set("cluster-enabled", "yes")
            .set("cluster-port", &bus.number().to_string())
            .set("cluster-node-timeout", "1000")
            .set("cluster-allow-replica-migration", "no")
            .set("cluster-replica-validity-factor", "0")
            .set("hz", "100")
            .set("repl-diskless-sync", "no")
            .set("repl-diskless-sync-delay", "0")
            .set("repl-ping-replica-period", "1")
            .start()
            .await;
        let id = server.command(&["CLUSTER", "MYID"]).await.text().expect("its id").to_owned();
        self.nodes.push(Node { server, id, shard, bus });
        self.nodes.len() - 1
    }

    async fn meet(&self, node: usize) {
        let known = &self.nodes[0];
        let (port, bus) = (known.server.port().to_string(), known.bus.number().to_string());
        self.ok(node, &["CLUSTER", "MEET", "127.0.0.1", &port, &bus]).await;
    }

    /// Waits until all nodes know all nodes, serve all slots, and replicas have the data of their
    /// masters.
    async fn settled(&self) {
        for node in 0..self.nodes.len() {
            until("the nodes form a cluster", async || self.is_settled(node).await && self.all_know(node).await).await;
        }
        for node in self.masters().await {
            let own = self.slots_of(node).await;
            let key = (0..).map(|n| format!("barrier-{n}")).find(|key| own.contains(&Self::slot(key)));
            let (key, replicas) = (key.expect("a key"), self.replicas_of(node).await.len());
            let mut connection = self.node(node).connect().await;
            connection.command(&["SET", &key, "", "PX", "1"]).await.expect("it responds");
            // Before its first acknowledgement a replica is not promoted.
            let waited = connection.command(&["WAIT", &replicas.to_string(), "60000"]).await.expect("it responds");
            assert_eq!(waited.integer(), i64::try_from(replicas).ok(), "the replicas acknowledge");
        }
    }

    /// Whether a node knows all nodes, serves all slots, and has the data of its master.
    async fn is_settled(&self, node: usize) -> bool {
        let info = self.text(node, &["CLUSTER", "INFO"]).await;
        let ok = ["cluster_state:ok", "cluster_slots_ok:16384"].iter().all(|line| info.contains(line));
        let known = self.lines(node).await;
        let knows = known.len() == self.nodes.len()
            && self.nodes.iter().all(|node| known.iter().any(|line| line.id == node.id && !line.is("handshake")));
        let replication = self.text(node, &["INFO", "replication"]).await;
        let follows = !replication.contains("role:slave") || replication.contains("master_link_status:up");
        ok && knows && follows
    }

    /// Whether all other running nodes know this one, and its role.
    async fn all_know(&self, node: usize) -> bool {
        let Some(own) = self.own_line(node).await else { return false };
        for other in self.running() {
            let known = self.lines(other).await;
            let Some(seen) = known.iter().find(|line| line.id == own.id) else { return false };
            if seen.is_down() || seen.master != own.master || seen.slots != own.slots {
                return false;
            }
        }
        true
    }

    /// The master in the place of this one, if all running nodes agree.
    async fn successor(&self, former: usize) -> Option<usize> {
        let shard = self.nodes[former].shard;
        let mut successor = None;
        for node in self.running().filter(|node| *node != former) {
            if !self.text(node, &["CLUSTER", "INFO"]).await.contains("cluster_state:ok") {
                return None;
            }
            let known = self.lines(node).await;
            let is_master = |number: usize| {
                known.iter().any(|line| line.id == self.nodes[number].id && !line.slots.is_empty() && !line.is_down())
            };
            let others = (0..self.nodes.len()).filter(|node| *node != former && self.nodes[*node].shard == shard);
            let named = others.into_iter().find(|node| is_master(*node))?;
            if successor.is_some_and(|agreed| agreed != named) {
                return None;
            }
            successor = Some(named);
        }
        successor
    }

    /// The nodes that respond.
    fn running(&self) -> impl Iterator<Item = usize> {
        let runs = |node: &usize| self.nodes[*node].server.is_running();
        (0..self.nodes.len()).filter(runs)
    }

    async fn own_line(&self, node: usize) -> Option<Line> {
        self.lines(node).await.into_iter().find(|line| line.is("myself"))
    }

    /// The nodes that this one knows. None if it does not respond.
    async fn lines(&self, node: usize) -> Vec<Line> {
        self.text(node, &["CLUSTER", "NODES"]).await.lines().filter_map(Line::parse).collect()
    }

    /// The text of a reply; empty if the node does not respond.
    async fn text(&self, node: usize, parts: &[&str]) -> String {
        let reply = self.nodes[node].server.try_command(parts).await;
        reply.ok().and_then(|reply| reply.text().map(str::to_owned)).unwrap_or_default()
    }

    async fn ok(&self, node: usize, parts: &[&str]) {
        let reply = self.command(node, parts).await;
        assert_eq!(reply.text(), Some("OK"), "{parts:?} at node {node}");
    }
}

// === impl Line ===

impl Line {
    /// `id address flags master ping pong epoch link slots...`
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<_> = line.split(' ').collect();
        let [id, _, flags, master, _, _, epoch, _, slots @ ..] = &*fields else { return None };
        let slots = slots.iter().filter(|slot| !slot.starts_with('[')).map(|slots| {
            let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
            Some(first.parse().ok()?..=last.parse().ok()?)
        });
        Some(Self {
            id: (*id).to_owned(),
            flags: flags.split(',').map(str::to_owned).collect(),
            master: (*master).to_owned(),
            epoch: epoch.parse().ok()?,
            slots: slots.collect::<Option<_>>()?,
        })
    }

    fn is(&self, flag: &str) -> bool {
        self.flags.iter().any(|set| set == flag)
    }

    fn is_down(&self) -> bool {
        self.is("fail") || self.is("fail?") || self.is("handshake")
    }
}
