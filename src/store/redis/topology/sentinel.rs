//! The sentinels of a master: which server it is now, and the message that it has moved.
//!
//! By hand, because `redis::sentinel` asks one sentinel after the other, without a timeout, and
//! takes the first reply. A sentinel that was stopped or partitioned names a former master.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_redis::redis::{RedisError, RedisResult, cmd, from_redis_value, make_extension_error};
use futures_util::{
    FutureExt,
    future::{BoxFuture, join_all},
};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::{
    ask_all::ask_all,
    endpoint::{Connected, Endpoint, Subscriptions, list},
    locate::{Signs, Topology},
    replicas::is_replica,
    socket::{OnMessage, Socket},
};
use crate::{
    background::Background,
    store::{
        error::{error_chain, escape_control},
        redis::error::CallError,
    },
    sync::Mutex,
};

/// The sentinels of one master.
pub(crate) struct Sentinels {
    /// The name of the master.
    name: String,
    nodes: Vec<Node>,
    /// The address of the servers is that which the sentinels name; the rest is here.
    server: Endpoint,
    /// Of a call of the sentinels.
    call_timeout: Duration,
    /// One of them has replied to the last request.
    are_reachable: AtomicBool,
    background: Background,
}

/// One sentinel.
struct Node {
    endpoint: Endpoint,
    /// `None`: not connected, or the connection broke.
    connection: Mutex<Option<Socket>>,
}

/// The master, as one sentinel knows it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MasterReply {
    /// The number of the configuration. A failover makes a larger one.
    epoch: u64,
    host: String,
    port: u16,
}

impl Sentinels {
    /// Between two connects to a sentinel that is down.
    const RECONNECT_DELAY: Duration = Duration::from_secs(1);

    pub(crate) fn new(
        name: String,
        nodes: Vec<Endpoint>,
        server: Endpoint,
        call_timeout: Duration,
        background: Background,
    ) -> Self {
        let nodes = nodes.into_iter().map(|endpoint| Node { endpoint, connection: Mutex::default() }).collect();
        Self { name, nodes, server, call_timeout, are_reachable: AtomicBool::new(true), background }
    }

    /// The master.
    async fn master(&self) -> RedisResult<Endpoint> {
        let MasterReply { host, port, .. } = self.newest_reply().await?;
        Ok(self.server.at(&host, port))
    }

    /// Asks all sentinels at the same time. The newest configuration counts: a sentinel that was
    /// partitioned has an older one.
    async fn newest_reply(&self) -> RedisResult<MasterReply> {
        let asked = self.nodes.iter().map(|node| self.reply_of(node));
        let (replies, failures) = ask_all(asked, self.call_timeout).await;
        let newest = MasterReply::newest(&replies);
        let were_reachable = self.are_reachable.swap(newest.is_some(), Ordering::Relaxed);
        self.log_reachable(were_reachable, newest.is_some());
        newest.ok_or_else(|| {
            let detail =
                format!("no sentinel names the master `{}`: {}", escape_control(&self.name), failures.join("; "));
            make_extension_error("NOMASTER".to_owned(), Some(detail))
        })
    }

    fn log_reachable(&self, before: bool, now: bool) {
        if before == now {
            return;
        }
        let sentinels = self.to_string();
        self.background.log(move || {
            if now {
                info!(target: "tower_lock", "a sentinel replies again: {sentinels}");
            } else {
                warn!(
                    target: "tower_lock",
                    "no sentinel replies. Open connections work, but one that breaks is not replaced until a sentinel replies: \
                     {sentinels}",
                );
            }
        });
    }

    /// The reply of one sentinel, or its address and the error.
    async fn reply_of(&self, node: &Node) -> Result<MasterReply, String> {
        let asked = timeout(self.call_timeout, node.ask(&self.name)).await;
        let failure = match asked {
            Ok(Ok(fields)) => match MasterReply::from_fields(fields) {
                Some(reply) => return Ok(reply),
                None => "an unexpected reply".to_owned(),
            },
            Ok(Err(error)) => error_chain(&error),
            Err(_) => "no reply".to_owned(),
        };
        // The next request has a connection of its own.
        node.connection.lock().take();
        Err(format!("{}: {failure}", node.endpoint))
    }
}

impl Topology for Sentinels {
    /// The connect may take long if the master has stopped.
    fn connect<'a>(&'a self, named: &'a OnceLock<Arc<str>>) -> BoxFuture<'a, Result<Connected, CallError>> {
        Box::pin(async {
            let master = self.master().await?;
            let _ = named.set(master.to_string().into());
            let socket = master.connect().await?;
            match socket.call(&[cmd("ROLE")]).await {
                // In the middle of a failover.
                Ok(role) if is_replica(&role) => {
                    let detail = "the server that the sentinels name is a replica".to_owned();
                    Err(make_extension_error("READONLY".to_owned(), Some(detail)).into())
                }
                Err(error) if error.code() != Some("NOPERM") => Err(error.into()),
                Ok(_) | Err(_) => Ok(Connected::Socket(socket)),
            }
        })
    }

    fn subscribe(&self, on_message: OnMessage) -> BoxFuture<'_, Result<Subscriptions, CallError>> {
        Box::pin(async { Ok(self.master().await?.subscribe(on_message).await?) })
    }

    /// A former master may still have its role: a process that was stopped has it until a sentinel
    /// changes it.
    fn current(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(async { self.master().await.ok().map(|master| master.to_string()) })
    }

    fn listen<'a>(&'a self, signs: &'a Arc<Signs>) -> BoxFuture<'a, ()> {
        let listen = |node: &'a Node| async move {
            loop {
                // An error, or the end of the connection: it is opened again.
                let _ = node.listen(&self.name, self.call_timeout, Arc::clone(signs)).await;
                sleep(Self::RECONNECT_DELAY).await;
            }
        };
        Box::pin(join_all(self.nodes.iter().map(listen)).map(drop))
    }

    /// By the sentinels, if they are there. The last request to them is at most a second old.
    fn will_promote(&self) -> bool {
        self.are_reachable.load(Ordering::Relaxed)
    }
}

impl Node {
    async fn ask(&self, name: &str) -> RedisResult<HashMap<String, String>> {
        let known = self.connection.lock().clone();
        let connection = match known {
            Some(connection) => connection,
            None => {
                // Without a check: the user of a sentinel may lack `PING`.
                let connection = self.endpoint.open(None).await?;
                self.connection.lock().insert(connection).clone()
            }
        };
        let master = cmd("SENTINEL").arg("MASTER").arg(name).take();
        Ok(from_redis_value(connection.call(&[master]).await?)?)
    }

    async fn listen(&self, name: &str, limit: Duration, signs: Arc<Signs>) -> RedisResult<()> {
        let expired = |_| RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
        let ours = format!("{name} ");
        let on_message = move |_: &[u8], text: &[u8]| {
            if text.starts_with(ours.as_bytes()) {
                signs.moved.notify_one();
            }
        };
        let messages = timeout(limit, self.endpoint.subscribe(Box::new(on_message))).await.map_err(expired)??;
        timeout(limit, messages.subscribe(&["+switch-master".to_owned()])).await.map_err(expired)??;
        messages.ended().await;
        Ok(())
    }
}

impl MasterReply {
    /// Of the replies with the newest configuration, that of most sentinels: before the first
    /// failover all configurations have the number zero, also that of a sentinel of another master.
    /// Sentinels that write one address in two ways lead to the same reply each time.
    fn newest(replies: &[Self]) -> Option<Self> {
        let count = |reply: &Self| replies.iter().filter(|other| *other == reply).count();
        replies.iter().max_by_key(|reply| (reply.epoch, count(reply), *reply)).cloned()
    }

    fn from_fields(mut fields: HashMap<String, String>) -> Option<Self> {
        let epoch = fields.get("config-epoch")?.parse().ok()?;
        let port = fields.get("port")?.parse().ok()?;
        Some(Self { epoch, host: fields.remove("ip")?, port })
    }
}

impl fmt::Display for Sentinels {
    /// Without users and passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sentinels = list(self.nodes.iter().map(|node| &node.endpoint));
        write!(f, "the master `{}` of the sentinels {sentinels}", escape_control(&self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_configuration_counts_and_at_a_tie_that_of_most() {
        let reply = |epoch, host: &str| MasterReply { epoch, host: host.to_owned(), port: 6379 };
        for (replies, newest) in [
            (vec![], None),
            (vec![reply(0, "a"), reply(0, "z"), reply(0, "a")], Some(reply(0, "a"))),
            (vec![reply(0, "a"), reply(0, "z")], Some(reply(0, "z"))),
            (vec![reply(1, "a"), reply(2, "b"), reply(1, "a")], Some(reply(2, "b"))),
        ] {
            assert_eq!(MasterReply::newest(&replies), newest, "{replies:?}");
        }
    }
}
