//! A multiplexed connection that is replaced when it breaks.
//!
//! By hand, because `redis::aio::ConnectionManager` does not replace a connection after a number of
//! timeouts. A `deadpool` pool only creates connections here: each is taken out of it for good.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use deadpool_redis::{
    Connection, Pool,
    redis::{
        Cmd, ErrorKind, RedisResult, ServerErrorKind, Value, aio::MultiplexedConnection, cmd, from_redis_value, pipe,
    },
};
use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    time::{Instant, timeout, timeout_at},
};

use super::{
    connector::{Connector, is_replica},
    error::CallError,
    proto::{ScriptCall, UnexpectedReply},
    replicas::{MinReplicas, NotReplicated},
    socket::Connected,
};
use crate::{
    process::{Process, ProcessMark},
    sync::{Mutex, MutexGuard},
};

/// Timeouts of a call and of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    /// Of one call, as the caller measures it.
    pub(super) call: Duration,
    /// Of connecting: DNS, TCP, TLS, AUTH.
    pub(super) connect: Duration,
}

/// The source of new connections.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Own(Connector),
    Pool(Pool),
}

/// One connection for many concurrent calls. Redis replies in the order of the calls.
///
/// A store has two of them, so that releases and renewals do not queue behind acquisitions. The
/// pool creates a connection when there is none, and not for each call: it would send a `PING`
/// first each time.
#[derive(Debug)]
pub(super) struct SharedConnection {
    source: Source,
    pub(super) timeouts: Timeouts,
    state: Mutex<Option<Arc<ConnectionState>>>,
    signs: Arc<Signs>,
}

/// Signs of the end of an outage, and of a failover.
#[derive(Debug, Default)]
pub(super) struct Signs {
    /// Notified by the first reply after a timeout or on a new connection: the outage may have
    /// ended.
    pub(super) recovered: Notify,
    /// Notified by a reply of a replica, and by the sentinels: the master may be another server.
    pub(super) moved: Notify,
}

/// One connection, from the start of its connect. A task of its own connects, so that a caller that
/// gives up does not cancel it for the others.
#[derive(Debug)]
struct ConnectionState {
    /// A child of `fork()` shares the socket with its parent and must not write to it.
    created_in: ProcessMark,
    /// The address of the server, as soon as sentinels have named it.
    master: Arc<OnceLock<Arc<str>>>,
    result: watch::Receiver<Option<ConnectResult>>,
    /// No reply has arrived on it yet.
    is_new: AtomicBool,
    /// Consecutive calls without a reply in time.
    timeouts: AtomicU32,
}

type ConnectResult = Result<Connected, Arc<ConnectFailure>>;

/// A failed connect. The next one begins after [`SharedConnection::RECONNECT_DELAY`].
#[derive(Debug)]
struct ConnectFailure {
    error: Arc<CallError>,
    at: Instant,
}

/// A command for a connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum Query<'a> {
    EvalSha(&'a ScriptCall),
    /// The script, and a wait for the replicas. The reply has those of both, and of `ROLE` if more
    /// than one replica is required.
    EvalShaAndWait(&'a ScriptCall, MinReplicas),
    /// The same script by its text, for a server that does not know its hash.
    Eval(&'a ScriptCall),
    Command(&'a Cmd),
}

/// A call in flight. Its drop without a reply counts as a timeout, because the caller may cancel it
/// at the same time as the deadline.
struct InFlightQuery<'a> {
    connection: &'a SharedConnection,
    state: &'a Arc<ConnectionState>,
    started: Instant,
    replied: bool,
}

impl SharedConnection {
    /// Consecutive timeouts after which a connection is replaced: TCP notices an interrupted
    /// network late.
    const MAX_TIMEOUTS: u32 = 3;
    /// A call that is cancelled earlier is no evidence about the connection.
    const MIN_COUNTED_WAIT: Duration = Duration::from_millis(200);
    /// Between two connects, so that a server that was down does not find thousands of them queued.
    pub(super) const RECONNECT_DELAY: Duration = Duration::from_millis(100);

    pub(super) fn new(source: Source, timeouts: Timeouts, signs: Arc<Signs>) -> Self {
        Self { source, timeouts, state: Mutex::default(), signs }
    }

    /// Sends once and waits for the reply until the deadline. If the connection breaks, the outcome
    /// is unknown.
    pub(super) async fn query(&self, query: Query<'_>, deadline: Instant) -> Result<Value, CallError> {
        let (state, connected) = self.connected(deadline).await?;
        let mut connection = connected.connection.clone();
        let mut in_flight = InFlightQuery { connection: self, state: &state, started: Instant::now(), replied: false };
        let Ok(reply) = timeout_at(deadline, query.send(&mut connection)).await else { return Err(CallError::NoReply) };
        in_flight.replied = true;
        if state.timeouts.swap(0, Ordering::Relaxed) > 0 || state.is_new.swap(false, Ordering::Relaxed) {
            self.signs.recovered.notify_one();
        }
        if reply.as_ref().is_err_and(CallError::breaks_connection) {
            self.discard(&state);
        }
        if reply.as_ref().is_err_and(CallError::is_of_replica) {
            // The other connections may lead to the same server.
            self.signs.moved.notify_one();
        }
        Ok(reply?)
    }

    /// As [`query`](Self::query), but sends again on a new connection if the first one breaks: it
    /// may have been broken since its last use. Only for commands that may be repeated at any later
    /// time.
    pub(super) async fn query_retry(&self, query: Query<'_>, deadline: Instant) -> Result<Value, CallError> {
        match self.query(query, deadline).await {
            Err(CallError::Redis(error)) if error.is_connection_dropped() => self.query(query, deadline).await,
            reply => reply,
        }
    }

    /// Fails if too few replicas are up.
    pub(super) async fn check_replicas(&self, required: MinReplicas, deadline: Instant) -> Result<(), CallError> {
        let reply = self.query(Query::Command(&required.wait()), deadline).await?;
        let Value::Int(acknowledged) = reply else { return Err(UnexpectedReply.into()) };
        Ok(required.check(acknowledged, None)?)
    }

    /// As [`call_replicated`](Self::call_replicated), and sends again as
    /// [`query_retry`](Self::query_retry).
    pub(super) async fn call_replicated_retry(
        &self,
        call: &ScriptCall,
        min_replicas: Option<MinReplicas>,
        deadline: Instant,
    ) -> Result<(Value, Result<(), NotReplicated>), CallError> {
        match self.call_replicated(call, min_replicas, deadline).await {
            Err(CallError::Redis(error)) if error.is_connection_dropped() => {
                self.call_replicated(call, min_replicas, deadline).await
            }
            reply => reply,
        }
    }

    /// Sends a `PING`. It detects a connection that broke while idle, before a request does.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), CallError> {
        self.query_retry(Query::Command(&cmd("PING")), deadline).await.map(drop)
    }

    /// Executes a script. Also returns whether enough replicas have its writes, and all writes
    /// before them.
    pub(super) async fn call_replicated(
        &self,
        call: &ScriptCall,
        min_replicas: Option<MinReplicas>,
        deadline: Instant,
    ) -> Result<(Value, Result<(), NotReplicated>), CallError> {
        let Some(required) = min_replicas else {
            return Ok((self.query(Query::EvalSha(call), deadline).await?, Ok(())));
        };
        let Value::Array(replies) = self.query(Query::EvalShaAndWait(call, required), deadline).await? else {
            return Err(UnexpectedReply.into());
        };
        let mut replies = replies.into_iter();
        let (Some(reply), Some(Value::Int(acknowledged))) = (replies.next(), replies.next()) else {
            return Err(UnexpectedReply.into());
        };
        Ok((reply, required.check(acknowledged, replies.next().as_ref())))
    }

    /// Asks the server for its role, and abandons the connection if it is a replica. It also tests
    /// the connection, as [`ping`](Self::ping).
    pub(super) async fn check_role(&self, deadline: Instant) -> Result<(), CallError> {
        match self.query_retry(Query::Command(&cmd("ROLE")), deadline).await {
            Ok(role) if is_replica(&role) => {
                self.abandon();
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
    pub(super) fn leave_others(&self, master: &str) -> bool {
        let is_other = |state: &mut Arc<ConnectionState>| state.master.get().is_some_and(|other| **other != *master);
        self.lock_state().take_if(is_other).is_some()
    }

    /// Abandons the connection. Calls on it may still get their replies.
    pub(super) fn abandon(&self) {
        self.lock_state().take();
    }

    /// Waits for a connection, within the connect timeout.
    pub(super) async fn ready(&self) -> Result<(), CallError> {
        self.connected(Instant::now() + self.timeouts.connect).await.map(drop)
    }

    /// The number of subscribers of a channel. It also tests the connection, as
    /// [`ping`](Self::ping).
    pub(super) async fn subscriber_count(&self, channel: &str) -> Option<u64> {
        let mut command = cmd("PUBSUB");
        command.arg("NUMSUB").arg(channel);
        let reply = self.query(Query::Command(&command), self.timeouts.call_deadline()).await.ok()?;
        from_redis_value::<(String, u64)>(reply).ok().map(|(_, subscribers)| subscribers)
    }

    async fn connected(&self, deadline: Instant) -> Result<(Arc<ConnectionState>, Connected), CallError> {
        let state = self.connect_or_join();
        let mut result = state.result.clone();
        let result = match timeout_at(deadline, result.wait_for(Option::is_some)).await {
            Ok(Ok(result)) => result.clone(),
            // The deadline has passed, or the runtime of the connecting task has ended.
            Ok(Err(_)) | Err(_) => None,
        };
        match result {
            Some(Ok(connection)) => Ok((state, connection)),
            Some(Err(failure)) => Err(CallError::ConnectFailed(Arc::clone(&failure.error))),
            None => Err(CallError::ConnectTimeout),
        }
    }

    /// The current connection, complete or not. Starts one if there is none.
    fn connect_or_join(&self) -> Arc<ConnectionState> {
        let mut current = self.lock_state();
        if let Some(state) = current.as_ref().filter(|state| !state.is_unusable()) {
            return Arc::clone(state);
        }
        let (sender, result) = watch::channel(None);
        let (source, timeouts) = (self.source.clone(), self.timeouts);
        let master = Arc::<OnceLock<_>>::default();
        let named = Arc::clone(&master);
        Handle::current().spawn(async move {
            let connected = timeout(timeouts.connect, connect(&source, timeouts, &named)).await;
            let connected = connected.unwrap_or(Err(CallError::ConnectTimeout)).map_err(|error| match named.get() {
                Some(server) => CallError::AtMaster { server: Arc::clone(server), error: Box::new(error) },
                None => error,
            });
            let failed = |error| Arc::new(ConnectFailure { error: Arc::new(error), at: Instant::now() });
            sender.send_replace(Some(connected.map_err(failed)));
        });
        let created_in = Process::default().mark();
        let (is_new, timeouts) = (AtomicBool::new(true), AtomicU32::new(0));
        Arc::clone(current.insert(Arc::new(ConnectionState { created_in, master, result, is_new, timeouts })))
    }

    /// Discards a broken connection, unless another caller already did.
    fn discard(&self, broken: &Arc<ConnectionState>) {
        self.lock_state().take_if(|state| Arc::ptr_eq(state, broken));
    }

    fn lock_state(&self) -> MutexGuard<'_, Option<Arc<ConnectionState>>> {
        self.state.lock()
    }
}

async fn connect(source: &Source, timeouts: Timeouts, named: &OnceLock<Arc<str>>) -> Result<Connected, CallError> {
    match source {
        Source::Own(connector) => Ok(connector.connect(named).await?),
        Source::Pool(pool) => {
            // For good: a returned connection would be shared with other users of the pool.
            let mut connection = Connection::take(pool.get().await?);
            connection.set_response_timeout(2 * timeouts.call);
            Ok(connection.into())
        }
    }
}

impl Timeouts {
    /// The deadline of a call that begins now. It is shortly before the caller's own timeout, so
    /// that the caller gets the reason.
    pub(super) fn call_deadline(self) -> Instant {
        Instant::now() + self.call.saturating_sub((self.call / 10).min(Duration::from_millis(20)))
    }
}

impl ConnectionState {
    /// Whether it was abandoned, has failed some time ago, or belongs to another process.
    fn is_unusable(&self) -> bool {
        if !self.created_in.is_current() {
            return true;
        }
        match &*self.result.borrow() {
            Some(Ok(_)) => false,
            Some(Err(failure)) => failure.at.elapsed() >= SharedConnection::RECONNECT_DELAY,
            None => self.result.has_changed().is_err(),
        }
    }
}

impl Query<'_> {
    async fn send(self, connection: &mut MultiplexedConnection) -> RedisResult<Value> {
        match self {
            // By its hash; by its text if the server does not know it, which also loads it. Not by
            // `SCRIPT LOAD`: the script cache may be flushed before the script runs.
            Self::EvalSha(call) => match call.eval_sha().query_async(connection).await {
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                    call.eval().query_async(connection).await
                }
                reply => reply,
            },
            Self::EvalShaAndWait(call, required) => match call_and_wait(call.eval_sha(), required, connection).await {
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                    call_and_wait(call.eval(), required, connection).await
                }
                replies => replies,
            },
            Self::Eval(call) => call.eval().query_async(connection).await,
            Self::Command(command) => command.query_async(connection).await,
        }
    }
}

/// The connection is blocked until the replicas have acknowledged: requests that arrive meanwhile
/// share the next call, and the next wait.
async fn call_and_wait(
    script: Cmd,
    required: MinReplicas,
    connection: &mut MultiplexedConnection,
) -> RedisResult<Value> {
    let mut pipeline = pipe();
    pipeline.add_command(script).add_command(required.wait()).ignore_errors();
    if required.needs_role() {
        pipeline.add_command(cmd("ROLE"));
    }
    let replies: Vec<RedisResult<Value>> = pipeline.query_async(connection).await?;
    Ok(Value::Array(replies.into_iter().collect::<RedisResult<_>>()?))
}

impl Drop for InFlightQuery<'_> {
    fn drop(&mut self) {
        if !self.replied
            && self.started.elapsed() >= SharedConnection::MIN_COUNTED_WAIT
            && self.state.timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= SharedConnection::MAX_TIMEOUTS
        {
            self.connection.discard(self.state);
        }
    }
}
