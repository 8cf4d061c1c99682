//! How a store is made of a checked configuration: its servers, their tasks, and their self-test.

use std::{
    pin::Pin,
    sync::{Arc, Weak},
};

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::{
    error::{CallError, RedisConnectError},
    messages::Messages,
    self_test::{SelfTestError, self_test},
    shared::{Shared, Sinks},
    topology::{
        ClusterNode, Endpoint, Nodes, Servers, Signs, Topology, connection::SharedConnection, replicas::MinReplicas,
        server::Server, slot_map::NodeName,
    },
    wire::Keyspace,
};
use crate::{
    background::Background,
    clock::Clock,
    store::remote::settings::{RETRY_INTERVAL, Timeouts},
};

/// What all servers of a store have in common.
#[derive(Clone)]
pub(super) struct Parts {
    pub(super) user: String,
    pub(super) keyspace: Keyspace,
    pub(super) timeouts: Timeouts,
    pub(super) min_replicas: Option<MinReplicas>,
    pub(super) background: Background,
    pub(super) sinks: Arc<Sinks>,
}

impl Parts {
    /// A store on one server.
    pub(super) fn one(self, topology: Arc<dyn Topology>, address: String) -> Servers<Shared> {
        Servers::One(self.server(topology, address, None))
    }

    /// A store on a Cluster that has these nodes.
    pub(super) fn cluster(self, seeds: Vec<Endpoint>) -> Servers<Shared> {
        // Each node has the login and the TLS of all of them.
        let one = seeds[0].clone();
        let Self { keyspace, user, timeouts, background, .. } = self.clone();
        let make = move |name: &NodeName, nodes: &Weak<Nodes<Shared>>| {
            let endpoint = one.at(&name.host, name.port);
            let topology = Arc::new(ClusterNode { endpoint, name: name.clone(), nodes: Weak::clone(nodes) });
            let parts = Self { keyspace: self.keyspace.at_node(&name.id), ..self.clone() };
            parts.server(topology, name.to_string(), Some(Weak::clone(nodes)))
        };
        Servers::Cluster(Nodes::new(seeds, Box::new(make), keyspace, user, timeouts, background))
    }

    pub(super) fn server(
        self,
        topology: Arc<dyn Topology>,
        address: String,
        nodes: Option<Weak<Nodes<Shared>>>,
    ) -> Arc<Shared> {
        let Self { user, keyspace, timeouts, min_replicas, background, sinks } = self;
        let signs = Arc::<Signs>::default();
        let connection =
            || Arc::new(SharedConnection::new(Arc::clone(&topology), timeouts.connect, Arc::clone(&signs)));
        let acquire_conn = connection();
        let release_conn = if topology.needs_order() { Arc::clone(&acquire_conn) } else { connection() };
        let renew_conn = if min_replicas.is_some() { connection() } else { Arc::clone(&release_conn) };
        let server = Arc::new(Server {
            topology,
            address,
            user,
            keyspace,
            background,
            timeouts,
            min_replicas,
            acquire_conn,
            release_conn,
            renew_conn,
        });
        Arc::new(Shared {
            acquires: Default::default(),
            releases: Default::default(),
            messages: Messages::new(Arc::clone(&server), signs),
            server,
            sinks,
            nodes,
            fences: Default::default(),
            clock: Clock::default(),
            server_clock: Default::default(),
            warned_of_missing_ttl: Default::default(),
            fence_warned_at: Default::default(),
        })
    }
}

/// Runs the self-test of each server. A server that starts shortly after the service is retried.
/// Of a Cluster, one master that works is enough: the others are tested when they can be reached.
pub(super) async fn test(servers: &Servers<Shared>) -> Result<(), RedisConnectError> {
    let deadline = Instant::now() + servers.timeouts().connect;
    loop {
        // Boxed: the nested future type is too deep for the default limit of the caller's compiler.
        let test: Pin<Box<dyn Future<Output = _> + Send + '_>> = Box::pin(test_all(servers, deadline));
        let (passed, failure) = test.await;
        match failure {
            None => return Ok(()),
            Some(failure) if !failure.is_transient => return Err(failure.error),
            Some(_) if Instant::now() + RETRY_INTERVAL < deadline => sleep(RETRY_INTERVAL).await,
            // Each of them warns.
            Some(_) if passed > 0 => return Ok(()),
            Some(failure) => return Err(failure.error),
        }
    }
}

/// Tests the servers that have not passed. Returns how many have, and the worst failure.
async fn test_all(servers: &Servers<Shared>, deadline: Instant) -> (usize, Option<SelfTestError>) {
    if let Servers::Cluster(nodes) = servers
        && let Err(error) = nodes.refresh_before(deadline).await
    {
        return (0, Some(nodes_error(nodes, error)));
    }
    let all = servers.all();
    if let Servers::Cluster(nodes) = servers
        && all.is_empty()
    {
        return (0, Some(nodes_error(nodes, CallError::NoMaster)));
    }
    let tests = all.iter().filter(|shared| !shared.messages.has_passed()).map(|shared| async move {
        let (subscriptions, server_us) = self_test(&shared.server, shared.messages.on_message()).await?;
        shared.server_clock().observe(server_us, shared.clock.now());
        shared.messages.check_passed();
        shared.messages.start(Some(subscriptions));
        Ok(())
    });
    let failures = join_all(tests).await.into_iter().filter_map(Result::err);
    let failure = failures.reduce(|worst: SelfTestError, failure| if worst.is_transient { failure } else { worst });
    (all.iter().filter(|shared| shared.messages.has_passed()).count(), failure)
}

fn nodes_error(nodes: &Nodes<Shared>, error: CallError) -> SelfTestError {
    let address = nodes.to_string();
    match error.of_connect() {
        CallError::NotCluster(address) => RedisConnectError::NotCluster { address: address.clone() }.into(),
        CallError::Redis(refusal) if refusal.code() == Some("NOPERM") => {
            let (user, refusals) = (nodes.user.clone(), vec![error.to_string()]);
            RedisConnectError::PermissionDenied { address, user, refusals }.into()
        }
        _ => {
            let is_transient = error.is_transient();
            let source = error.with_hint(None, &nodes.user);
            SelfTestError { error: RedisConnectError::Unreachable { address, source }, is_transient }
        }
    }
}
