//! The servers of a store, and one question to all of them.

use std::sync::Arc;

use futures_util::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    runtime::Handle,
    time::{Instant, timeout_at},
};

use super::{node::Node, quorum::Replies};
use crate::{
    lock_key::LockKey,
    store::{
        StoreError, StoreErrorKind,
        redis::{error::CallError, operations::Each, wire::Keyspace},
        remote::{
            batch::Needs,
            batching::{Outbox, Sender},
            settings::Timeouts,
        },
    },
};

/// The name of the store, for errors.
pub(super) const STORE: &str = "redlock";

/// The servers of a store, and the calls to them.
pub(super) struct Group {
    pub(super) nodes: Vec<Arc<Node>>,
    pub(super) keyspace: Keyspace,
    pub(super) timeouts: Timeouts,
    pub(super) outbox: Outbox,
}

/// The replies of the servers to one question about several keys.
pub(super) struct Answers<T> {
    /// Those about each key.
    pub(super) keys: Vec<Replies<T>>,
    /// The servers without a reply when the question was decided. They may reply later.
    pub(super) unanswered: Vec<usize>,
    errors: Vec<NodeError>,
}

/// The error of a server.
struct NodeError {
    /// The key that it is about. `None`: all of them.
    key: Option<usize>,
    node: usize,
    kind: StoreErrorKind,
    may_be_of_one_key: bool,
    /// Whether other calls to the server fail, too.
    is_of_server: bool,
    text: String,
}

/// Error of an operation that too few servers have executed.
#[derive(Debug, thiserror::Error)]
#[error("no majority of the {servers} servers: {}", .errors.join("; "))]
struct NoMajority {
    servers: usize,
    errors: Vec<String>,
}

/// Error of a request that independent servers refuse.
#[derive(Debug, thiserror::Error)]
enum Missing {
    #[error(
        "`RedlockStore` keeps no records: use one Redis, Sentinel or a Cluster (`RedisStore`) for `ReplayLayer` and `once`"
    )]
    Records,
    #[error("`RedlockStore` has no tickets: use one Redis, Sentinel or a Cluster (`RedisStore`)")]
    Tickets,
}

impl Group {
    /// A server that does not reply delays a decision of the others by this part of a call. An
    /// acquire asks twice.
    const LIMITS_PER_CALL: u32 = 3;

    /// The servers that make a majority.
    pub(super) fn majority(&self) -> usize {
        self.nodes.len() / 2 + 1
    }

    /// When a question is decided at the latest, if it is asked now.
    pub(super) fn limit(&self) -> Instant {
        Instant::now() + self.timeouts.call / Self::LIMITS_PER_CALL
    }

    /// Asks all servers at once, and waits until each key is decided, or the limit. A server that
    /// was slow before is not waited for. Calls that have no reply then go on in a task: they were
    /// sent, and show whether their connections work. Returns the outcome of each key, and the
    /// replies.
    pub(super) async fn ask<T, O, F>(
        &self,
        keys: usize,
        limit: Instant,
        call: impl Fn(Arc<Node>) -> F,
        decide: impl Fn(usize, &Replies<T>) -> Option<O>,
    ) -> (Vec<O>, Answers<T>)
    where
        T: Send + 'static,
        F: Future<Output = Result<Each<T>, CallError>> + Send + 'static,
    {
        let mut calls: FuturesUnordered<BoxFuture<'static, _>> = FuturesUnordered::new();
        let began = Instant::now();
        for (index, node) in self.nodes.iter().enumerate() {
            let (call, node) = (call(Arc::clone(node)), Arc::clone(node));
            calls.push(Box::pin(async move {
                let reply = call.await.map_err(|error| NodeError::new(None, index, &node, error));
                match &reply {
                    Ok(_) => node.replied(began.elapsed() < node.shared.server.timeouts.call / Self::LIMITS_PER_CALL),
                    Err(error) if error.is_of_server => node.failed(error.kind, &error.text),
                    Err(_) => {}
                }
                (index, reply)
            }));
        }
        let mut answers =
            Answers { keys: (0..keys).map(|_| Replies::new(self.nodes.len())).collect(), ..Answers::default() };
        let mut slow: Vec<_> = self.nodes.iter().map(|node| node.is_slow()).collect();
        if slow.iter().filter(|is_slow| !**is_slow).count() < self.majority() {
            slow.fill(false);
        }
        let mut open = vec![true; self.nodes.len()];
        while let Ok(Some((index, reply))) = timeout_at(limit, calls.next()).await {
            open[index] = false;
            answers.add(index, &self.nodes[index], reply);
            let has_others = open.iter().zip(&slow).any(|(is_open, is_slow)| *is_open && !is_slow);
            if !has_others || answers.keys.iter().enumerate().all(|(key, replies)| decide(key, replies).is_some()) {
                break;
            }
        }
        answers.unanswered = (0..self.nodes.len()).filter(|index| open[*index]).collect();
        answers.keys.iter_mut().for_each(Replies::close);
        if !calls.is_empty() {
            Handle::current().spawn(async move { while calls.next().await.is_some() {} });
        }
        let outcome = |(key, replies)| decide(key, replies).unwrap_or_else(|| unreachable!("no reply is waited for"));
        (answers.keys.iter().enumerate().map(outcome).collect(), answers)
    }

    /// The error of an operation on this key that too few servers have executed.
    pub(super) fn store_error<T>(&self, operation: &'static str, key: usize, answers: &Answers<T>) -> StoreError {
        self.store_error_because(operation, key, answers, None)
    }

    /// The same, for a reason that is not the error of a server.
    pub(super) fn store_error_because<T>(
        &self,
        operation: &'static str,
        key: usize,
        answers: &Answers<T>,
        reason: Option<&str>,
    ) -> StoreError {
        let errors = || answers.errors.iter().filter(|error| error.key.is_none_or(|of| of == key));
        let lasting: Vec<_> = errors().filter(|error| !error.kind.is_transient()).map(|error| error.kind).collect();
        let kind = match lasting.first() {
            // A majority may execute a retry.
            _ if self.nodes.len() - lasting.len() >= self.majority() => {
                let kinds: Vec<_> = errors().map(|error| error.kind).collect();
                let is_unsent =
                    kinds.len() == self.nodes.len() && kinds.iter().all(|kind| *kind == StoreErrorKind::Overloaded);
                match kinds.iter().find(|kind| kind.is_transient()) {
                    _ if is_unsent => StoreErrorKind::Overloaded,
                    Some(StoreErrorKind::Timeout) | None => StoreErrorKind::Timeout,
                    Some(_) => StoreErrorKind::Unavailable,
                }
            }
            Some(kind) => *kind,
            None => StoreErrorKind::Unavailable,
        };
        let mut texts: Vec<_> = errors().map(|error| error.text.clone()).collect();
        let silent = answers.unanswered.iter().map(|index| &self.nodes[*index].shared.server.address);
        texts.extend(silent.map(|address| format!("Redis at {address}: no reply yet")));
        texts.extend(reason.map(str::to_owned));
        let error = NoMajority { servers: self.nodes.len(), errors: texts };
        StoreError::new(STORE, operation, kind).with_source(error)
    }
}

impl<T> Default for Answers<T> {
    /// The replies about no key.
    fn default() -> Self {
        Self { keys: Vec::new(), unanswered: Vec::new(), errors: Vec::new() }
    }
}

impl<T> Answers<T> {
    fn add(&mut self, index: usize, node: &Node, reply: Result<Each<T>, NodeError>) {
        match reply {
            Ok(replies) => {
                for (key, reply) in replies.into_iter().enumerate() {
                    let reply = reply.map_err(|error| NodeError::new(Some(key), index, node, error));
                    let reply = reply.map_err(|error| self.errors.push(error));
                    self.keys[key].set(index, reply.ok());
                }
            }
            Err(error) => {
                self.errors.push(error);
                self.keys.iter_mut().for_each(|replies| replies.set(index, None));
            }
        }
    }

    /// Whether servers have refused the call because of one of its keys.
    pub(super) fn may_be_of_one_key(&self) -> bool {
        self.errors.iter().any(|error| error.may_be_of_one_key)
    }

    /// Whether the call to this server has failed.
    pub(super) fn has_failed(&self, node: usize) -> bool {
        self.errors.iter().any(|error| error.key.is_none() && error.node == node)
    }
}

impl NodeError {
    fn new(key: Option<usize>, node: usize, of: &Node, error: CallError) -> Self {
        let (kind, may_be_of_one_key) = (error.kind(), error.may_be_of_one_key());
        let is_of_server = match &error {
            CallError::Redis(error) => error.code() != Some("WRONGTYPE"),
            error => !matches!(error, CallError::Expired),
        };
        // The text of the self-test names the address.
        let address = (!matches!(error, CallError::SelfTestFailed(_))).then(|| of.shared.server.address.clone());
        let text = error.with_hint(address, &of.shared.server.user).to_string();
        Self { key, node, kind, may_be_of_one_key, is_of_server, text }
    }
}

impl Sender for Group {
    const STORE: &'static str = STORE;

    fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    fn check(&self, operation: &'static str, key: &LockKey, needs: Needs) -> Result<(), StoreError> {
        let why = match needs {
            Needs::Nothing => None,
            Needs::Record => Some(Missing::Records),
            Needs::Ticket => Some(Missing::Tickets),
        };
        if let Some(why) = why {
            return Err(StoreError::new(STORE, operation, StoreErrorKind::Unsupported).with_source(why));
        }
        let invalid = |error| StoreError::new(STORE, operation, StoreErrorKind::InvalidKey).with_source(error);
        self.keyspace.lock(key).map(drop).map_err(invalid)
    }
}
