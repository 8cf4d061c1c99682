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

/// One connection for many concurrent calls. Redis replies in the order of the calls.
///
/// A store has two of them, so that releases and renewals do not queue behind acquisitions, and a
/// third one for renewals that wait for replicas.
pub(crate) struct SharedConnection {
    pub(in crate::store) link: Link<Connector>,
    signs: Arc<Signs>,
}

/// Connects through the topology.
pub(in crate::store) struct Connector(Arc<dyn Topology>);

/// Whether enough replicas have a write.
pub(crate) type Replicated = Result<(), NotReplicated>;

/// How scripts are sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// The replicas whose acknowledgement is waited for.
    pub(crate) min_replicas: Option<MinReplicas>,
    /// Whether they are sent again if the connection breaks: it may have been broken since its last
    /// use. Only for scripts that may be executed again at any later time.
    pub(crate) may_repeat: bool,
    /// Whether the only script is sent to the node to which the slot of its key moves.
    pub(crate) is_asking: bool,
}

impl SharedConnection {
    pub(crate) fn new(topology: Arc<dyn Topology>, connect_timeout: Duration, signs: Arc<Signs>) -> Self {
        let link = Link::new(Arc::new(Connector(topology)), connect_timeout, Arc::clone(&signs.recovered));
        Self { link, signs }
    }

    /// Executes scripts that are sent together, each as a step of its own, and waits for their
    /// replies until the deadline. Also returns whether enough replicas have the writes of all of
    /// them. If the connection breaks, the outcome is unknown.
    pub(crate) async fn call(
        &self,
        scripts: &[ScriptCall],
        terms: Terms,
        deadline: Instant,
    ) -> Result<(Vec<Result<Value, CallError>>, Replicated), CallError> {
        let call = || self.call_once(scripts, terms, deadline);
        if terms.may_repeat { retry(call).await } else { call().await }
    }

    async fn call_once(
        &self,
        scripts: &[ScriptCall],
        terms: Terms,
        deadline: Instant,
    ) -> Result<(Vec<Result<Value, CallError>>, Replicated), CallError> {
        let send = |mut connected: Connected| async move { send(scripts, terms, &mut connected).await };
        let is_broken = |replies: &RedisResult<(Vec<RedisResult<Value>>, _)>| match replies {
            Ok((replies, _)) => self.is_broken(replies.iter().filter_map(|reply| reply.as_ref().err())),
            Err(error) => self.is_broken([error].into_iter()),
        };
        let replies = self.link.call(deadline, send, is_broken).await?;
        let (replies, wait) = replies?;
        let replicated = match (terms.min_replicas, wait) {
            (None, _) => Ok(()),
            // A master that has become a replica refuses the wait, and the scripts say where to go.
            (Some(MinReplicas { count, .. }), Err(_)) if replies.iter().any(Result::is_err) => {
                Err(NotReplicated { acknowledged: 0, required: count })
            }
            (Some(required), Ok(wait)) => match wait.as_slice() {
                [Value::Int(acknowledged), role @ ..] => required.check(*acknowledged, role.first()),
                _ => return Err(UnexpectedReply.into()),
            },
            (Some(_), Err(error)) => return Err(error.into()),
        };
        Ok((replies.into_iter().map(|reply| Ok(reply?)).collect(), replicated))
    }

    /// Executes one script that may be executed again, and whose writes count at once.
    pub(crate) async fn script(&self, script: &ScriptCall, deadline: Instant) -> Result<Value, CallError> {
        let terms = Terms { may_repeat: true, ..Terms::default() };
        let (mut replies, _) = self.call(std::slice::from_ref(script), terms, deadline).await?;
        replies.pop().unwrap_or_else(|| unreachable!("one for each script"))
    }

    /// Executes one command, and again if the connection breaks: it may have been broken since its
    /// last use.
    pub(crate) async fn command(&self, command: &Cmd, deadline: Instant) -> Result<Value, CallError> {
        let call = || async {
            let send = |mut connected: Connected| async move { connected.call(command).await };
            let is_broken = |reply: &RedisResult<Value>| self.is_broken(reply.as_ref().err().into_iter());
            Ok(self.link.call(deadline, send, is_broken).await??)
        };
        retry(call).await
    }

    /// Whether these errors show that the connection is unusable, or leads to a replica. The other
    /// connections may lead to the same server.
    fn is_broken<'a>(&self, errors: impl Iterator<Item = &'a RedisError> + Clone) -> bool {
        if errors.clone().any(CallError::is_of_replica) {
            self.signs.moved.notify_one();
        }
        errors.into_iter().any(CallError::breaks_connection)
    }

    /// A reply that no script sends shows that replies and calls are out of step: all calls of the
    /// connection fail, and it is replaced.
    pub(crate) fn checked<T>(&self, parsed: Result<T, CallError>) -> Result<T, CallError> {
        if matches!(parsed, Err(CallError::UnexpectedReply(_)))
            && let Some(Connected::Socket(socket)) = self.link.take()
        {
            socket.close();
        }
        parsed
    }

    /// Fails if too few replicas are up.
    pub(crate) async fn check_replicas(&self, required: MinReplicas, deadline: Instant) -> Result<(), CallError> {
        let reply = self.command(&required.wait(), deadline).await?;
        let Value::Int(acknowledged) = reply else { return Err(UnexpectedReply.into()) };
        Ok(required.check(acknowledged, None)?)
    }

    /// Asks the server for its role, and abandons the connection if it is a replica. It also tests
    /// the connection.
    pub(crate) async fn check_role(&self, deadline: Instant) -> Result<(), CallError> {
        match self.command(&cmd("ROLE"), deadline).await {
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

    /// The number of subscribers of a channel. It also tests the connection.
    pub(crate) async fn subscriber_count(&self, channel: &str, deadline: Instant) -> Option<u64> {
        let reply = self.command(cmd("PUBSUB").arg("NUMSUB").arg(channel), deadline).await.ok()?;
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
            LinkError::ConnectFailed(error) => Self::Common(error),
            LinkError::NoReply => Self::NoReply,
        }
    }
}

/// The replies of scripts that were sent together, and those of the wait for replicas.
///
/// The connection is blocked until the replicas have acknowledged: requests that arrive meanwhile
/// share the next call, and the next wait.
async fn send(
    scripts: &[ScriptCall],
    Terms { min_replicas, is_asking, .. }: Terms,
    connected: &mut Connected,
) -> RedisResult<(Vec<RedisResult<Value>>, RedisResult<Vec<Value>>)> {
    let mut replies: Vec<RedisResult<Value>> = Vec::new();
    let mut wait = Ok(Vec::new());
    // By their hashes; by its text if the server does not know one. Not by `SCRIPT LOAD`: the
    // script cache may be flushed before the script runs. The text is sent once, because the later
    // calls follow the one that loads it. If that one is redirected meanwhile, it loads nothing,
    // and each of the others is sent with the text.
    for attempt in 0..3 {
        let is_open = |at: &usize| replies.get(*at).is_none_or(|reply| reply.as_ref().is_err_and(is_unknown_script));
        let open: Vec<_> = (0..scripts.len()).filter(is_open).collect();
        if open.is_empty() {
            break;
        }
        let mut sent = Vec::new();
        let script = |at: &usize| {
            let script = &scripts[*at];
            if attempt == 0 || attempt == 1 && sent.contains(&script.sha()) {
                return script.eval_sha();
            }
            sent.push(script.sha());
            script.eval()
        };
        let asking = is_asking.then(|| cmd("ASKING"));
        let commands: Vec<_> = asking.into_iter().chain(open.iter().map(script)).chain(waits(min_replicas)).collect();
        let received = connected.call_each(&commands).await?;
        let mut received = received.into_iter().skip(usize::from(is_asking));
        for at in open {
            let reply = received.next().unwrap_or(Ok(Value::Nil));
            if at < replies.len() { replies[at] = reply } else { replies.push(reply) }
        }
        wait = received.collect();
    }
    Ok((replies, wait))
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

fn waits(required: Option<MinReplicas>) -> impl Iterator<Item = Cmd> {
    // The role has the addresses of the replicas, of which one may have several connections.
    let role = required.filter(|required| required.count > 1).map(|_| cmd("ROLE"));
    required.map(MinReplicas::wait).into_iter().chain(role)
}
