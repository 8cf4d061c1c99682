//! A connection for the calls of a store.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use deadpool_redis::redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value, cmd, from_redis_value};
use tokio::time::Instant;

use super::{
    endpoint::Connected,
    locate::{Signs, Topology},
    replicas::{MinReplicas, is_replica},
};
use crate::store::{
    redis::{
        error::{CallError, NotReplicated},
        wire::{ScriptCall, UnexpectedReply},
    },
    remote::link::{Connect, Link, LinkError},
};

/// Timeouts of a call and of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// Of one call, as the caller measures it.
    pub(crate) call: Duration,
    /// Of connecting: DNS, TCP, TLS, AUTH.
    pub(crate) connect: Duration,
}

/// One connection for many concurrent calls. Redis replies in the order of the calls.
///
/// A store has two of them, so that releases and renewals do not queue behind acquisitions, and a
/// third one for renewals that wait for replicas.
#[derive(Debug)]
pub(crate) struct SharedConnection {
    link: Link<Connector>,
    pub(crate) timeouts: Timeouts,
    signs: Arc<Signs>,
    is_of_cluster: bool,
}

/// Connects through the topology.
#[derive(Debug)]
struct Connector(Arc<dyn Topology>);

/// Whether enough replicas have a write.
pub(crate) type Replicated = Result<(), NotReplicated>;

/// A command for a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Query<'a> {
    EvalSha(&'a ScriptCall),
    /// The script, and a wait for the replicas. The reply has those of both, and of `ROLE` if more
    /// than one replica is required.
    EvalShaAndWait(&'a ScriptCall, MinReplicas),
    /// The script at the node to which the slot of its key moves, and the wait if there is one.
    Asking(&'a ScriptCall, Option<MinReplicas>),
    /// The same script by its text, for a server that does not know its hash.
    Eval(&'a ScriptCall),
    Command(&'a Cmd),
}

impl SharedConnection {
    pub(crate) fn new(topology: Arc<dyn Topology>, timeouts: Timeouts, signs: Arc<Signs>) -> Self {
        let is_of_cluster = topology.is_cluster();
        let link = Link::new(Arc::new(Connector(topology)), timeouts.connect, Arc::clone(&signs.recovered));
        Self { link, timeouts, signs, is_of_cluster }
    }

    /// Sends once and waits for the reply until the deadline. If the connection breaks, the outcome
    /// is unknown.
    pub(crate) async fn query(&self, query: Query<'_>, deadline: Instant) -> Result<Value, CallError> {
        let send = |mut connected: Connected| async move { query.send(&mut connected).await };
        let breaks = |reply: &RedisResult<Value>| reply.as_ref().is_err_and(CallError::breaks_connection);
        let reply = self.link.call(deadline, send, breaks).await?;
        if reply.as_ref().is_err_and(CallError::is_of_replica) {
            // The other connections may lead to the same server.
            self.signs.moved.notify_one();
        }
        Ok(reply?)
    }

    /// A reply that no script sends shows that replies and calls are out of step: all calls of the
    /// connection fail, and it is replaced.
    pub(crate) fn parsed<T>(&self, parsed: Result<T, UnexpectedReply>) -> Result<T, CallError> {
        if parsed.is_err()
            && let Some(Connected::Socket(socket)) = self.link.take()
        {
            socket.close();
        }
        Ok(parsed?)
    }

    /// As [`query`](Self::query), but sends again on a new connection if the first one breaks: it
    /// may have been broken since its last use. Only for commands that may be repeated at any later
    /// time.
    pub(crate) async fn query_retry(&self, query: Query<'_>, deadline: Instant) -> Result<Value, CallError> {
        retry(|| self.query(query, deadline)).await
    }

    /// Fails if too few replicas are up.
    pub(crate) async fn check_replicas(&self, required: MinReplicas, deadline: Instant) -> Result<(), CallError> {
        let reply = self.query(Query::Command(&required.wait()), deadline).await?;
        let Value::Int(acknowledged) = reply else { return Err(UnexpectedReply.into()) };
        Ok(required.check(acknowledged, None)?)
    }

    /// As [`call_replicated`](Self::call_replicated), and sends again as
    /// [`query_retry`](Self::query_retry).
    pub(crate) async fn call_replicated_retry(
        &self,
        call: &ScriptCall,
        min_replicas: Option<MinReplicas>,
        deadline: Instant,
    ) -> Result<(Value, Replicated), CallError> {
        retry(|| self.call_replicated(call, min_replicas, deadline)).await
    }

    /// Sends a write of this key that changes nothing, because nobody makes the key. A server
    /// that is full, cannot save or is a replica refuses it. It also detects a connection that
    /// broke while idle, before a request does.
    pub(crate) async fn check_writes(&self, key: &str, deadline: Instant) -> Result<(), CallError> {
        let mut write = cmd("SET");
        write.arg(key).arg("").arg("XX");
        match self.query_retry(Query::Command(&write), deadline).await {
            // The slot of the key moves, and the node replies.
            Err(CallError::Redis(error)) if error.redirect_node().is_some() && self.is_of_cluster => Ok(()),
            reply => reply.map(drop),
        }
    }

    /// Executes a script. Also returns whether enough replicas have its writes, and all writes
    /// before them.
    pub(crate) async fn call_replicated(
        &self,
        call: &ScriptCall,
        min_replicas: Option<MinReplicas>,
        deadline: Instant,
    ) -> Result<(Value, Replicated), CallError> {
        let Some(required) = min_replicas else {
            return Ok((self.query(Query::EvalSha(call), deadline).await?, Ok(())));
        };
        replicated(self.query(Query::EvalShaAndWait(call, required), deadline).await?, required)
    }

    /// As [`call_replicated`](Self::call_replicated), at the node to which the slot of the key
    /// moves.
    pub(crate) async fn call_asking(
        &self,
        call: &ScriptCall,
        min_replicas: Option<MinReplicas>,
        deadline: Instant,
    ) -> Result<(Value, Replicated), CallError> {
        let reply = self.query(Query::Asking(call, min_replicas), deadline).await?;
        match min_replicas {
            None => Ok((reply, Ok(()))),
            Some(required) => replicated(reply, required),
        }
    }

    /// Executes scripts that were sent together, each as a step of its own. Also returns whether
    /// enough replicas have the writes of all of them.
    pub(crate) async fn call_each(
        &self,
        calls: &[ScriptCall],
        min_replicas: Option<MinReplicas>,
        deadline: Instant,
    ) -> Result<(Vec<Result<Value, CallError>>, Replicated), CallError> {
        let send = |mut connected: Connected| async move { each_and_wait(calls, min_replicas, &mut connected).await };
        let breaks = |replies: &RedisResult<(Vec<RedisResult<Value>>, _)>| match replies {
            Ok((replies, _)) => replies.iter().flat_map(|reply| reply.as_ref().err()).any(CallError::breaks_connection),
            Err(error) => CallError::breaks_connection(error),
        };
        let replies = self.link.call(deadline, send, breaks).await?;
        if replies.as_ref().is_err_and(CallError::is_of_replica) {
            self.signs.moved.notify_one();
        }
        let (replies, wait) = replies?;
        let replicated = match (min_replicas, wait) {
            (None, _) => Ok(()),
            // A master that has become a replica refuses the wait, and the scripts say where to go.
            (Some(required), Err(_)) if replies.iter().any(Result::is_err) => Err(required.none_acknowledged()),
            (Some(required), Ok(wait)) => match wait.as_slice() {
                [Value::Int(acknowledged), role @ ..] => required.check(*acknowledged, role.first()),
                _ => return Err(UnexpectedReply.into()),
            },
            (Some(_), Err(error)) => return Err(error.into()),
        };
        Ok((replies.into_iter().map(|reply| Ok(reply?)).collect(), replicated))
    }

    /// As [`call_each`](Self::call_each), and sends again as [`query_retry`](Self::query_retry).
    pub(crate) async fn call_each_retry(
        &self,
        calls: &[ScriptCall],
        min_replicas: Option<MinReplicas>,
        deadline: Instant,
    ) -> Result<(Vec<Result<Value, CallError>>, Replicated), CallError> {
        retry(|| self.call_each(calls, min_replicas, deadline)).await
    }

    /// Whether a call need not wait for a connection. Otherwise one is opened.
    pub(crate) fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    /// Asks the server for its role, and abandons the connection if it is a replica. It also tests
    /// the connection.
    pub(crate) async fn check_role(&self, deadline: Instant) -> Result<(), CallError> {
        match self.query_retry(Query::Command(&cmd("ROLE")), deadline).await {
            Ok(role) if is_replica(&role) => {
                self.link.abandon();
                self.signs.moved.notify_one();
                Ok(())
            }
            // The reply shows that the server is there.
            Err(CallError::Redis(error)) if error.code() == Some("NOPERM") => Ok(()),
            reply => reply.map(drop),
        }
    }

    /// Abandons a connection to any other server than this one, complete or not. Returns whether
    /// there was one.
    pub(crate) fn leave_others(&self, address: &str) -> bool {
        self.link.leave_others(address)
    }

    /// Waits for a connection, within the connect timeout.
    pub(crate) async fn ready(&self) -> Result<(), CallError> {
        Ok(self.link.ready().await?)
    }

    /// The number of subscribers of a channel. It also tests the connection.
    pub(crate) async fn subscriber_count(&self, channel: &str) -> Option<u64> {
        let mut command = cmd("PUBSUB");
        command.arg("NUMSUB").arg(channel);
        let reply = self.query(Query::Command(&command), self.timeouts.call_deadline()).await.ok()?;
        from_redis_value::<(String, u64)>(reply).ok().map(|(_, subscribers)| subscribers)
    }
}

/// Sends again if the connection was dropped.
async fn retry<T, F: Future<Output = Result<T, CallError>>>(send: impl Fn() -> F) -> Result<T, CallError> {
    match send().await {
        Err(CallError::Redis(error)) if error.is_connection_dropped() => send().await,
        reply => reply,
    }
}

impl Connect for Connector {
    type Connection = Connected;
    type Error = CallError;

    async fn connect(&self, named: &OnceLock<Arc<str>>) -> Result<Connected, CallError> {
        self.0.connect(named).await
    }

    fn failed(&self, error: Option<CallError>, named: Option<&Arc<str>>) -> CallError {
        let error = error.unwrap_or(CallError::ConnectTimeout);
        match named {
            Some(server) => CallError::AtMaster { server: Arc::clone(server), error: Box::new(error) },
            None => error,
        }
    }
}

impl From<LinkError<Self>> for CallError {
    fn from(error: LinkError<Self>) -> Self {
        match error {
            LinkError::ConnectTimeout => Self::ConnectTimeout,
            LinkError::ConnectFailed(error) => Self::ConnectFailed(error),
            LinkError::NoReply => Self::NoReply,
        }
    }
}

impl Timeouts {
    /// The deadline of a call that begins now. It is shortly before the caller's own timeout, so
    /// that the caller gets the reason.
    pub(crate) fn call_deadline(self) -> Instant {
        Instant::now() + self.call.saturating_sub((self.call / 10).min(Duration::from_millis(20)))
    }
}

impl Query<'_> {
    async fn send(self, connected: &mut Connected) -> RedisResult<Value> {
        let (call, required, is_asking) = match self {
            Self::EvalSha(call) => (call, None, false),
            Self::EvalShaAndWait(call, required) => (call, Some(required), false),
            Self::Asking(call, required) => (call, required, true),
            Self::Eval(call) => return connected.call(&[call.eval()]).await,
            Self::Command(command) => return connected.call(std::slice::from_ref(command)).await,
        };
        // By its hash; by its text if the server does not know it, which also loads it. Not by
        // `SCRIPT LOAD`: the script cache may be flushed before the script runs.
        match call_and_wait(call.eval_sha(), required, is_asking, connected).await {
            Err(error) if is_unknown_script(&error) => call_and_wait(call.eval(), required, is_asking, connected).await,
            reply => reply,
        }
    }
}

/// The connection is blocked until the replicas have acknowledged: requests that arrive meanwhile
/// share the next call, and the next wait.
async fn call_and_wait(
    script: Cmd,
    required: Option<MinReplicas>,
    is_asking: bool,
    connected: &mut Connected,
) -> RedisResult<Value> {
    if required.is_none() && !is_asking {
        return connected.call(&[script]).await;
    }
    let asking = is_asking.then(|| cmd("ASKING"));
    let commands: Vec<_> = asking.into_iter().chain([script]).chain(waits(required)).collect();
    let Value::Array(mut replies) = connected.call(&commands).await? else { return Ok(Value::Nil) };
    if is_asking && !replies.is_empty() {
        // That to ASKING.
        replies.remove(0);
    }
    if required.is_none() { Ok(replies.pop().unwrap_or(Value::Nil)) } else { Ok(Value::Array(replies)) }
}

/// The replies of scripts that were sent together, and those of the wait for replicas.
async fn each_and_wait(
    calls: &[ScriptCall],
    required: Option<MinReplicas>,
    connected: &mut Connected,
) -> RedisResult<(Vec<RedisResult<Value>>, RedisResult<Vec<Value>>)> {
    let commands: Vec<_> = calls.iter().map(ScriptCall::eval_sha).chain(waits(required)).collect();
    let mut replies = connected.call_each(&commands).await?;
    let wait = replies.split_off(calls.len().min(replies.len()));
    let mut wait = wait.into_iter().collect();
    // Those whose script the server does not know are sent again: its text once, because the later
    // ones follow the one that loads it. If that one is redirected meanwhile, it loads nothing, and
    // each of the others is sent with the text.
    for is_text_sent_once in [true, false] {
        let is_unknown = |at: &usize| replies[*at].as_ref().is_err_and(is_unknown_script);
        let unknown: Vec<_> = (0..replies.len()).filter(is_unknown).collect();
        if unknown.is_empty() {
            break;
        }
        let mut sent = Vec::new();
        let again = unknown.iter().map(|at| {
            let call = &calls[*at];
            if is_text_sent_once && sent.contains(&call.sha()) {
                return call.eval_sha();
            }
            sent.push(call.sha());
            call.eval()
        });
        let commands: Vec<_> = again.chain(waits(required)).collect();
        let mut again = connected.call_each(&commands).await?.into_iter();
        for at in unknown {
            replies[at] = again.next().unwrap_or(Ok(Value::Nil));
        }
        wait = again.collect();
    }
    Ok((replies, wait))
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

fn waits(required: Option<MinReplicas>) -> impl Iterator<Item = Cmd> {
    let role = required.is_some_and(MinReplicas::needs_role).then(|| cmd("ROLE"));
    required.map(MinReplicas::wait).into_iter().chain(role)
}

/// The reply of a script, and whether enough replicas have its writes.
fn replicated(reply: Value, required: MinReplicas) -> Result<(Value, Replicated), CallError> {
    let Value::Array(replies) = reply else { return Err(UnexpectedReply.into()) };
    let mut replies = replies.into_iter();
    let (Some(reply), Some(Value::Int(acknowledged))) = (replies.next(), replies.next()) else {
        return Err(UnexpectedReply.into());
    };
    Ok((reply, required.check(acknowledged, replies.next().as_ref())))
}
