//! One connection for all calls of a kind, taken from the pool once and replaced when it breaks.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use deadpool_redis::{
    Connection, Pool,
    redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value, aio::MultiplexedConnection, cmd, from_redis_value},
};
use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    time::{Instant, timeout, timeout_at},
};

use super::{
    error::CallError,
    proto::ScriptCall,
    socket::{Connected, Connector},
};
use crate::process::Process;

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    /// A call, as the caller counts it.
    pub(super) call: Duration,
    /// To make a connection: DNS, TCP, TLS, AUTH.
    pub(super) connect: Duration,
}

/// Where connections come from.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Own(Connector),
    Pool(Pool),
}

/// Calls go out one behind the other and are answered in order, many at once under way. Two lanes do not wait for each other: what gives back
/// must not queue behind what asks.
///
/// The pool is asked for a connection when there is none, and not for each call: it would send a PING first each time.
#[derive(Debug)]
pub(super) struct SharedConnection {
    source: Source,
    pub(super) timeouts: Timeouts,
    state: Mutex<Option<Arc<ConnectionState>>>,
    /// A call was answered after one that was not: the outage may be over.
    recovered: Arc<Notify>,
}

/// One connection, from before it is made. It is made in a task of its own: whoever waits for it may give up, and others wait on.
#[derive(Debug)]
struct ConnectionState {
    /// A child of `fork()` shares the socket with its parent, and must not write on it.
    process_id: u32,
    result: watch::Receiver<Option<ConnectResult>>,
    /// Nothing was answered on it yet.
    is_new: AtomicBool,
    /// Calls in a row that got no answer in time.
    timeouts: AtomicU32,
}

type ConnectResult = Result<Connected, Arc<ConnectFailure>>;

/// There is no connection, and for a moment nobody tries again.
#[derive(Debug)]
struct ConnectFailure {
    error: Arc<CallError>,
    at: Instant,
}

/// What a lane can be asked.
#[derive(Clone, Copy, Debug)]
pub(super) enum Query<'a> {
    EvalSha(&'a ScriptCall),
    /// The same, as a server is asked that does not know the script.
    Eval(&'a ScriptCall),
    Command(&'a Cmd),
}

/// A call that is under way. Whoever waits for it may give up in the same moment as we do.
struct InFlightQuery<'a> {
    connection: &'a SharedConnection,
    state: &'a Arc<ConnectionState>,
    started: Instant,
    replied: bool,
}

impl SharedConnection {
    /// So many calls in a row that nobody answered: a cable was pulled somewhere, and TCP has not noticed.
    const MAX_TIMEOUTS: u32 = 3;
    /// A call that is given up earlier says nothing about the connection.
    const MIN_COUNTED_WAIT: Duration = Duration::from_millis(200);
    /// Between two tries to connect: a server that is down or stopped is not to find thousands of them when it is back.
    pub(super) const RECONNECT_DELAY: Duration = Duration::from_millis(100);

    pub(super) fn new(source: Source, limits: Timeouts, recovered: Arc<Notify>) -> Self {
        Self { source, timeouts: limits, state: Mutex::default(), recovered }
    }

    /// Asks once, and waits for an answer until then. If the connection breaks, nobody knows whether it was done, or will be.
    pub(super) async fn query(&self, question: Query<'_>, by: Instant) -> Result<Value, CallError> {
        let (link, connected) = self.connected(by).await?;
        let mut connection = connected.connection.clone();
        let mut under_way = InFlightQuery { connection: self, state: &link, started: Instant::now(), replied: false };
        let Ok(answer) = timeout_at(by, question.send(&mut connection)).await else { return Err(CallError::NoReply) };
        under_way.replied = true;
        if link.timeouts.swap(0, Ordering::Relaxed) > 0 || link.is_new.swap(false, Ordering::Relaxed) {
            self.recovered.notify_one();
        }
        if answer.as_ref().is_err_and(CallError::breaks_connection) {
            self.discard(&link);
        }
        Ok(answer?)
    }

    /// Asks once more, on a new connection, if it breaks: it may have been broken since it was last used. Only what does no harm when it is
    /// done again at any later time.
    pub(super) async fn query_retry(&self, question: Query<'_>, by: Instant) -> Result<Value, CallError> {
        match self.query(question, by).await {
            Err(CallError::Redis(error)) if error.is_connection_dropped() => self.query(question, by).await,
            answer => answer,
        }
    }

    /// Whether somebody is there. A connection that died while nothing was asked is found out by this, and not by a request.
    pub(super) async fn ping(&self, by: Instant) -> Result<(), CallError> {
        self.query_retry(Query::Command(&cmd("PING")), by).await.map(drop)
    }

    /// Completes when there is a connection, which may take longer than a call.
    pub(super) async fn ready(&self) -> Result<(), CallError> {
        self.connected(Instant::now() + self.timeouts.connect).await.map(drop)
    }

    /// How many listen to this channel. As good as a [`ping`](Self::ping).
    pub(super) async fn subscriber_count(&self, channel: &str) -> Option<u64> {
        let mut command = cmd("PUBSUB");
        command.arg("NUMSUB").arg(channel);
        let reply = self.query(Query::Command(&command), self.timeouts.call_deadline()).await.ok()?;
        from_redis_value::<(String, u64)>(reply).ok().map(|(_, subscribers)| subscribers)
    }

    async fn connected(&self, by: Instant) -> Result<(Arc<ConnectionState>, Connected), CallError> {
        let link = self.connect_or_join();
        let mut made = link.result.clone();
        let made = match timeout_at(by, made.wait_for(Option::is_some)).await {
            Ok(Ok(made)) => made.clone(),
            // It took too long, or the runtime on which it was made has ended.
            Ok(Err(_)) | Err(_) => None,
        };
        match made {
            Some(Ok(connection)) => Ok((link, connection)),
            Some(Err(failure)) => Err(CallError::ConnectFailed(Arc::clone(&failure.error))),
            None => Err(CallError::ConnectTimeout),
        }
    }

    /// The connection for all, made by now or not; the first one who finds none sees to that.
    fn connect_or_join(&self) -> Arc<ConnectionState> {
        let mut current = self.lock_state();
        if let Some(link) = current.as_ref().filter(|link| !link.is_unusable()) {
            return Arc::clone(link);
        }
        let (tell, made) = watch::channel(None);
        let (source, limits) = (self.source.clone(), self.timeouts);
        Handle::current().spawn(async move {
            let connected = timeout(limits.connect, connect(&source, limits)).await;
            let connected = connected.unwrap_or(Err(CallError::ConnectTimeout));
            let failed = |trouble| Arc::new(ConnectFailure { error: Arc::new(trouble), at: Instant::now() });
            tell.send_replace(Some(connected.map_err(failed)));
        });
        let process = Process::default().id();
        let (is_new, silent) = (AtomicBool::new(true), AtomicU32::new(0));
        Arc::clone(current.insert(Arc::new(ConnectionState {
            process_id: process,
            result: made,
            is_new,
            timeouts: silent,
        })))
    }

    /// The next call takes another connection, if nobody has seen to that yet.
    fn discard(&self, broken: &Arc<ConnectionState>) {
        self.lock_state().take_if(|link| Arc::ptr_eq(link, broken));
    }

    fn lock_state(&self) -> MutexGuard<'_, Option<Arc<ConnectionState>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn connect(source: &Source, limits: Timeouts) -> Result<Connected, CallError> {
    match source {
        Source::Own(connector) => Ok(connector.connect().await?),
        Source::Pool(pool) => {
            // For good: what is given back would be given to others, who would queue with us.
            let mut connection = Connection::take(pool.get().await?);
            connection.set_response_timeout(2 * limits.call);
            Ok(connection.into())
        }
    }
}

impl Timeouts {
    /// How long a call waits for its answer that is made now. Whoever asked gives up a moment later, and does not know why.
    pub(super) fn call_deadline(self) -> Instant {
        Instant::now() + self.call.saturating_sub((self.call / 10).min(Duration::from_millis(20)))
    }
}

impl ConnectionState {
    /// It will never be made, has failed some time ago, or is that of another process.
    fn is_unusable(&self) -> bool {
        if self.process_id != Process::default().id() {
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
            // By its hash; by its text where the server does not know it (any more), which also teaches it. Not by `SCRIPT LOAD`: what is
            // loaded may be flushed again before it is run.
            Self::EvalSha(call) => match call.eval_sha().query_async(connection).await {
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                    call.eval().query_async(connection).await
                }
                answer => answer,
            },
            Self::Eval(call) => call.eval().query_async(connection).await,
            Self::Command(command) => command.query_async(connection).await,
        }
    }
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
