//! The nodes of a Cluster: which master has a slot now, and how that changes.
//!
//! By hand, because the cluster client of the library repeats calls by itself: a copy of a call
//! must not be sent after its validity, and one master that is down must not delay the calls to
//! the others.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use deadpool_redis::redis::{Cmd, RedisError, Value, cmd, from_redis_value};
use futures_util::future::BoxFuture;
use tokio::{
    runtime::Handle,
    sync::Semaphore,
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{info, warn};

use super::{
    ask_all::ask_all,
    endpoint::{Connected, Endpoint, Subscriptions, list},
    locate::Topology,
    server::{Parts, Server},
    slot_map::{NodeName, Redirect, SlotMap},
    socket::{OnMessage, Socket},
};
use crate::{
    lock_key::LockKey,
    store::{
        EventSink, StoreError,
        redis::{error::CallError, wire::LockName},
        remote::link::RECONNECT_DELAY,
    },
    sync::Mutex,
};

/// What a store keeps for a node.
pub(crate) trait Node: Send + Sync + Sized + 'static {
    /// `nodes`: those of the Cluster that the server belongs to.
    fn new(parts: Parts, topology: Arc<dyn Topology>, address: String, nodes: Option<Weak<Nodes<Self>>>) -> Arc<Self>;

    fn server(&self) -> &Server;

    /// Receives messages for this sink.
    fn listen(self: &Arc<Self>, sink: EventSink);
}

/// The nodes of a Cluster.
pub(crate) struct Nodes<S> {
    /// The addresses that the user has named.
    seeds: Vec<Endpoint>,
    pub(crate) parts: Parts,
    this: Weak<Self>,
    state: Mutex<State<S>>,
    /// One permit: for the refresh under way.
    refreshing: Semaphore,
    /// Those of the managers, for nodes that join later.
    sinks: Mutex<Vec<EventSink>>,
}

struct State<S> {
    view: Option<Arc<View<S>>>,
    /// Nodes that only redirections have named.
    others: HashMap<NodeName, Arc<S>>,
    /// Why no node has replied to the last refresh.
    failure: Option<Arc<CallError>>,
    /// The end of the last refresh.
    refreshed_at: Option<Instant>,
}

/// The masters, at one time.
struct View<S> {
    map: SlotMap,
    /// In the order of `map.masters`.
    nodes: Vec<Arc<S>>,
}

/// Values of one master.
type Group<S, T> = (Arc<S>, Vec<T>);

/// How one node is found.
struct ClusterNode<S> {
    endpoint: Endpoint,
    name: NodeName,
    nodes: Weak<Nodes<S>>,
}

/// How old a map may be. Each node asks for it each second, and one of them is enough.
const MAX_AGE: Duration = Duration::from_millis(500);
/// The nodes that are asked for the map.
const MAX_ASKED: usize = 7;
/// The nodes that only redirections have named.
const MAX_OTHERS: usize = 16;

impl<S: Node> Nodes<S> {
    pub(crate) fn new(seeds: Vec<Endpoint>, parts: Parts) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            parts: Parts { user: seeds[0].user(), ..parts },
            seeds,
            this: Weak::clone(this),
            state: Mutex::new(State { view: None, others: HashMap::new(), failure: None, refreshed_at: None }),
            refreshing: Semaphore::new(1),
            sinks: Mutex::default(),
        })
    }

    /// Each node has the login and the TLS of all of them.
    fn make(&self, name: &NodeName) -> Arc<S> {
        let (endpoint, nodes) = (self.seeds[0].at(&name.host, name.port), || Weak::clone(&self.this));
        let topology = Arc::new(ClusterNode { endpoint, name: name.clone(), nodes: nodes() });
        let parts = Parts { keyspace: self.parts.keyspace.at_node(&name.id), ..self.parts.clone() };
        S::new(parts, topology, name.to_string(), Some(nodes()))
    }

    /// Receives messages for this sink at each master, also without a call to it: a queue may move
    /// to it.
    pub(crate) fn listen(&self, sink: &EventSink) {
        let mut sinks = self.sinks.lock();
        sinks.retain(EventSink::is_open);
        sinks.push(sink.clone());
        drop(sinks);
        self.all().iter().for_each(|node| node.listen(sink.clone()));
    }

    /// Asks for the map in the background, until a node replies.
    pub(crate) fn start(&self) {
        let (Ok(runtime), this) = (Handle::try_current(), Weak::clone(&self.this)) else { return };
        runtime.spawn(async move {
            while let Some(nodes) = this.upgrade() {
                if nodes.refresh(None).await.is_ok() {
                    break;
                }
                drop(nodes);
                sleep(RECONNECT_DELAY).await;
            }
        });
    }

    /// The slot of a key. That of an invalid name is any: its call fails.
    pub(crate) fn slot(&self, key: &LockKey) -> u16 {
        self.parts.keyspace.lock(key).map_or(0, LockName::slot)
    }

    /// The master of a slot, as far as this process knows.
    pub(crate) fn owner(&self, slot: u16) -> Option<Arc<S>> {
        self.view()?.owner(slot).cloned()
    }

    /// The number of the master of a slot. Any, if that is not known.
    pub(crate) fn number(&self, slot: u16) -> usize {
        self.view().and_then(|view| view.map.owner(slot)).unwrap_or(0)
    }

    /// The master of a slot. Asks the nodes if that is not known.
    pub(crate) async fn find(&self, slot: u16, operation: &'static str) -> Result<Arc<S>, StoreError> {
        if let Some(owner) = self.owner(slot) {
            return Ok(owner);
        }
        let refreshed = self.refresh_before(self.parts.timeouts.call_deadline()).await;
        let owner = refreshed.and_then(|()| self.owner(slot).ok_or(CallError::NoMaster));
        owner.map_err(|error| self.store_error(operation, error))
    }

    /// Asks the nodes for the map, if none is known.
    pub(crate) async fn load(&self, operation: &'static str) -> Result<(), StoreError> {
        if self.view().is_some() {
            return Ok(());
        }
        let refreshed = self.refresh_before(self.parts.timeouts.call_deadline()).await;
        refreshed.map_err(|error| self.store_error(operation, error))
    }

    /// Values by the master of their key, and those whose master is not known.
    pub(crate) fn groups<T>(
        &self,
        values: impl Iterator<Item = T>,
        key: impl Fn(&T) -> &LockKey,
    ) -> (Vec<Group<S, T>>, Vec<T>) {
        let view = self.view();
        let (mut groups, mut unknown) = (Vec::<Group<S, T>>::new(), Vec::new());
        for value in values {
            let owner = view.as_ref().and_then(|view| view.owner(self.slot(key(&value))));
            let Some(owner) = owner else {
                unknown.push(value);
                continue;
            };
            match groups.iter_mut().find(|(server, _)| Arc::ptr_eq(server, owner)) {
                Some((_, values)) => values.push(value),
                None => groups.push((Arc::clone(owner), vec![value])),
            }
        }
        (groups, unknown)
    }

    /// All masters, in the order of their ids.
    pub(crate) fn all(&self) -> Vec<Arc<S>> {
        let Some(view) = self.view() else { return Vec::new() };
        let mut nodes: Vec<_> = view.map.masters.iter().zip(&view.nodes).collect();
        nodes.sort_unstable_by_key(|(name, _)| &name.id);
        nodes.into_iter().map(|(_, node)| Arc::clone(node)).collect()
    }

    /// The node that a redirection names.
    pub(crate) fn at(&self, redirect: &Redirect) -> Arc<S> {
        let Redirect { host, port, .. } = redirect;
        let mut state = self.state.lock();
        if let Some(view) = &state.view
            && let Some(at) = view.map.masters.iter().position(|name| name.host == *host && name.port == *port)
        {
            return Arc::clone(&view.nodes[at]);
        }
        let name = NodeName { host: host.clone(), port: *port, id: String::new() };
        if let Some(known) = state.others.get(&name) {
            return Arc::clone(known);
        }
        let evicted = if state.others.len() < MAX_OTHERS { None } else { Some(std::mem::take(&mut state.others)) };
        let node = self.make(&name);
        state.others.insert(name, Arc::clone(&node));
        drop(state);
        // Their last references may be here, and stop tasks.
        drop(evicted);
        node
    }

    /// Asks the nodes for the map, unless one has just been received.
    pub(crate) async fn refresh_if_old(&self) {
        let is_old = self.state.lock().refreshed_at.is_none_or(|at| at.elapsed() > MAX_AGE);
        if is_old {
            // An error is logged, and the next refresh is soon.
            let _ = self.refresh(None).await;
        }
    }

    /// Asks the nodes for the map, at most until the deadline.
    pub(crate) async fn refresh_before(&self, deadline: Instant) -> Result<(), CallError> {
        timeout_at(deadline, self.refresh(None)).await.map_err(|_| CallError::ConnectTimeout)?
    }

    /// Asks the nodes for the map, also the one to which a slot has moved: it knows all its slots.
    /// One refresh is under way at a time; its result counts for all that wait.
    pub(crate) async fn refresh(&self, hint: Option<Arc<S>>) -> Result<(), CallError> {
        let since = Instant::now();
        // Nothing drives the runtime of one that takes longer, or the named nodes do not reply, and
        // another one beside it does no harm.
        let _refreshing = timeout(self.parts.timeouts.call, self.refreshing.acquire()).await;
        {
            let state = self.state.lock();
            if state.refreshed_at.is_some_and(|at| at > since) {
                return state.failure.clone().map_or(Ok(()), |error| Err(CallError::Common(error)));
            }
        }
        let newest = self.newest_map(hint).await.map_err(Arc::new);
        let refreshed = newest.map(|map| self.apply(map));
        self.note(refreshed.as_ref().err());
        refreshed.map_err(CallError::Common)
    }

    /// The newest map that a node knows. A node that was partitioned has an older one.
    async fn newest_map(&self, hint: Option<Arc<S>>) -> Result<SlotMap, CallError> {
        let mut nodes = self.all();
        fastrand::shuffle(&mut nodes);
        nodes.retain(|node| hint.as_ref().is_none_or(|hint| !Arc::ptr_eq(node, hint)));
        nodes.truncate(MAX_ASKED);
        let hinted = hint.iter().map(|node| (node, true));
        let asked = hinted.chain(nodes.iter().map(|node| (node, false)));
        let maps = asked.map(|(node, is_hinted)| async move {
            let map = map_of(node.server()).await?;
            self.check_map(&map)?;
            Ok((map, is_hinted))
        });
        let (known, failures) = ask_all(maps, self.parts.timeouts.call).await;
        // Of two nodes with one configuration, that counts which has the slot, as another one said.
        if let Some((map, _)) = known.into_iter().max_by_key(|(map, is_hinted)| (map.epoch, *is_hinted)) {
            return Ok(map);
        }
        // The named nodes: their names may lead to new addresses of the same Cluster.
        let maps = self.seeds.iter().map(async |seed| {
            let map = map_of_seed(seed).await?;
            self.check_map(&map)?;
            Ok(map)
        });
        let (maps, of_seeds) = ask_all(maps, self.parts.timeouts.connect).await;
        let failures = if nodes.is_empty() { of_seeds } else { failures };
        let newest = maps.iter().max_by_key(|map| map.epoch);
        let newest = newest.ok_or_else(|| failures.into_iter().next_back().unwrap_or(CallError::ConnectTimeout))?;
        let are_of_one = maps.iter().all(|map| newest.continues(map) || map.continues(newest));
        if are_of_one { Ok(newest.clone()) } else { Err(CallError::OtherCluster) }
    }

    /// Fails if the map is of another Cluster than the last one.
    fn check_map(&self, map: &SlotMap) -> Result<(), CallError> {
        let continues = self.view().is_none_or(|view| map.continues(&view.map));
        continues.then_some(()).ok_or(CallError::OtherCluster)
    }

    /// Replaces the map. Nodes that stay keep their connections.
    fn apply(&self, map: SlotMap) {
        let mut state = self.state.lock();
        let former = state.view.clone();
        if former.as_ref().is_some_and(|former| former.map == map) {
            return;
        }
        let known = |name: &NodeName| {
            let former = former.as_ref()?;
            let at = former.map.masters.iter().position(|known| known == name)?;
            Some(Arc::clone(&former.nodes[at]))
        };
        let mut joined = Vec::new();
        let nodes = map.masters.iter().map(|name| {
            known(name).unwrap_or_else(|| {
                let node = self.make(name);
                joined.push(Arc::clone(&node));
                node
            })
        });
        let nodes: Vec<_> = nodes.collect();
        let others = std::mem::take(&mut state.others);
        state.view = Some(Arc::new(View { map, nodes }));
        drop(state);
        // Their last references may be here, and stop tasks.
        drop((former, others));
        let sinks = self.sinks.lock().clone();
        for node in &joined {
            sinks.iter().for_each(|sink| node.listen(sink.clone()));
        }
    }

    /// Notes the end of a refresh, and logs a change.
    fn note(&self, failure: Option<&Arc<CallError>>) {
        let mut state = self.state.lock();
        state.refreshed_at = Some(Instant::now());
        let former = std::mem::replace(&mut state.failure, failure.cloned());
        drop(state);
        let is_reachable = failure.is_none();
        if former.is_none() == is_reachable {
            return;
        }
        let nodes = self.to_string();
        self.parts.background.log(move || {
            if is_reachable {
                info!(target: "tower_lock", "a node of the Redis Cluster replies again: {nodes}");
            } else {
                warn!(target: "tower_lock", "no node of the Redis Cluster replies with its slots: {nodes}");
            }
        });
    }

    /// The error of a call that reached no node.
    pub(crate) fn store_error(&self, operation: &'static str, error: CallError) -> StoreError {
        let kind = error.kind();
        error.into_store_error(operation, kind, &self.to_string(), &self.parts.user)
    }
}

impl<S> Nodes<S> {
    fn view(&self) -> Option<Arc<View<S>>> {
        self.state.lock().view.clone()
    }
}

impl<S> View<S> {
    fn owner(&self, slot: u16) -> Option<&Arc<S>> {
        self.nodes.get(self.map.owner(slot)?)
    }
}

fn map_commands() -> [Cmd; 2] {
    ["INFO", "SLOTS"].map(|name| cmd("CLUSTER").arg(name).take())
}

async fn map_of(server: &Server) -> Result<SlotMap, CallError> {
    let deadline = server.timeouts.call_deadline();
    let [info, slots] = map_commands();
    let query = |command| server.release_conn.command(command, deadline);
    let (info, slots) = tokio::join!(query(&info), query(&slots));
    let host = server.topology.host();
    SlotMap::parse(&host, info?, &slots?).ok_or(CallError::NoMaster)
}

async fn map_of_seed(seed: &Endpoint) -> Result<SlotMap, CallError> {
    map_on(&seed.connect().await?, seed).await
}

async fn map_on(socket: &Socket, endpoint: &Endpoint) -> Result<SlotMap, CallError> {
    let replies = socket.call(&map_commands()).await.map_err(|error| match error.detail() {
        Some(detail) if detail.contains("cluster support disabled") => CallError::NotCluster(endpoint.to_string()),
        _ => error.into(),
    })?;
    let Value::Array(replies) = replies else { return Err(CallError::NoMaster) };
    let [info, slots] = <[Value; 2]>::try_from(replies).map_err(|_| CallError::NoMaster)?;
    SlotMap::parse(endpoint.host(), info, &slots).ok_or(CallError::NoMaster)
}

impl<S: Node> ClusterNode<S> {
    /// Fails if another node has the address now: it may be one of another Cluster.
    async fn check_node(&self, socket: &Socket) -> Result<(), CallError> {
        if self.name.id.is_empty() {
            let Some(nodes) = self.nodes.upgrade() else { return Ok(()) };
            return nodes.check_map(&map_on(socket, &self.endpoint).await?);
        }
        let id = socket.call(&[cmd("CLUSTER").arg("MYID").take()]).await?;
        let id: String = from_redis_value(id).map_err(RedisError::from)?;
        if id == self.name.id { Ok(()) } else { Err(CallError::OtherCluster) }
    }
}

impl<S: Node> Topology for ClusterNode<S> {
    fn connect<'a>(&'a self, _named: &'a OnceLock<Arc<str>>) -> BoxFuture<'a, Result<Connected, CallError>> {
        Box::pin(async {
            let socket = self.endpoint.connect().await?;
            self.check_node(&socket).await?;
            Ok(Connected::Socket(socket))
        })
    }

    fn subscribe(&self, on_message: OnMessage) -> BoxFuture<'_, Result<Subscriptions, CallError>> {
        Box::pin(async { Ok(self.endpoint.subscribe(on_message).await?) })
    }

    /// The nodes of a Cluster keep their addresses, and its slots move.
    fn current(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(async {
            if let Some(nodes) = self.nodes.upgrade() {
                nodes.refresh_if_old().await;
            }
            None
        })
    }

    fn any_slot(&self) -> Option<u16> {
        self.nodes.upgrade()?.view()?.map.slot_of(&self.name)
    }

    fn host(&self) -> String {
        self.name.host.clone()
    }

    /// The Cluster promotes a replica, if its other nodes are there.
    fn will_promote(&self) -> bool {
        self.nodes.upgrade().is_some_and(|nodes| nodes.state.lock().failure.is_none())
    }
}

impl<S> fmt::Display for Nodes<S> {
    /// The addresses that the user has named, without users and passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&list(self.seeds.iter()))
    }
}
