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
    error::Trouble,
    proto::ScriptCall,
    socket::{Connected, Connector},
};
use crate::process::Process;

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
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
pub(super) struct Lane {
    source: Source,
    pub(super) limits: Limits,
    link: Mutex<Option<Arc<Link>>>,
    /// A call was answered after one that was not: the outage may be over.
    recovered: Arc<Notify>,
}

/// One connection, from before it is made. It is made in a task of its own: whoever waits for it may give up, and others wait on.
#[derive(Debug)]
struct Link {
    /// A child of `fork()` shares the socket with its parent, and must not write on it.
    process: u32,
    made: watch::Receiver<Option<Made>>,
    /// Nothing was answered on it yet.
    is_new: AtomicBool,
    /// Calls in a row that got no answer in time.
    silent: AtomicU32,
}

type Made = Result<Connected, Arc<Failure>>;

/// There is no connection, and for a moment nobody tries again.
#[derive(Debug)]
struct Failure {
    trouble: Arc<Trouble>,
    at: Instant,
}

/// What a lane can be asked.
#[derive(Clone, Copy, Debug)]
pub(super) enum Question<'a> {
    Script(&'a ScriptCall),
    /// The same, as a server is asked that does not know the script.
    Text(&'a ScriptCall),
    Command(&'a Cmd),
}

/// A call that is under way. Whoever waits for it may give up in the same moment as we do.
struct UnderWay<'a> {
    lane: &'a Lane,
    link: &'a Arc<Link>,
    began: Instant,
    heard: bool,
}

impl Lane {
    /// So many calls in a row that nobody answered: a cable was pulled somewhere, and TCP has not noticed.
    const SILENT: u32 = 3;
    /// A call that is given up earlier says nothing about the connection.
    const LONG_ENOUGH: Duration = Duration::from_millis(200);
    /// Between two tries to connect: a server that is down or stopped is not to find thousands of them when it is back.
    pub(super) const PAUSE: Duration = Duration::from_millis(100);

    pub(super) fn new(source: Source, limits: Limits, recovered: Arc<Notify>) -> Self {
        Self { source, limits, link: Mutex::default(), recovered }
    }

    /// Asks once, and waits for an answer until then. If the connection breaks, nobody knows whether it was done, or will be.
    pub(super) async fn ask(&self, question: Question<'_>, by: Instant) -> Result<Value, Trouble> {
        let (link, connected) = self.connected(by).await?;
        let mut connection = connected.connection.clone();
        let mut under_way = UnderWay { lane: self, link: &link, began: Instant::now(), heard: false };
        let Ok(answer) = timeout_at(by, question.put(&mut connection)).await else { return Err(Trouble::Silent) };
        under_way.heard = true;
        if link.silent.swap(0, Ordering::Relaxed) > 0 || link.is_new.swap(false, Ordering::Relaxed) {
            self.recovered.notify_one();
        }
        if answer.as_ref().is_err_and(Trouble::breaks_connection) {
            self.replace(&link);
        }
        Ok(answer?)
    }

    /// Asks once more, on a new connection, if it breaks: it may have been broken since it was last used. Only what does no harm when it is
    /// done again at any later time.
    pub(super) async fn ask_again(&self, question: Question<'_>, by: Instant) -> Result<Value, Trouble> {
        match self.ask(question, by).await {
            Err(Trouble::Redis(error)) if error.is_connection_dropped() => self.ask(question, by).await,
            answer => answer,
        }
    }

    /// Whether somebody is there. A connection that died while nothing was asked is found out by this, and not by a request.
    pub(super) async fn ping(&self, by: Instant) -> Result<(), Trouble> {
        self.ask_again(Question::Command(&cmd("PING")), by).await.map(drop)
    }

    /// Completes when there is a connection, which may take longer than a call.
    pub(super) async fn ready(&self) -> Result<(), Trouble> {
        self.connected(Instant::now() + self.limits.connect).await.map(drop)
    }

    /// How many listen to this channel. As good as a [`ping`](Self::ping).
    pub(super) async fn subscribers(&self, channel: &str) -> Option<u64> {
        let mut command = cmd("PUBSUB");
        command.arg("NUMSUB").arg(channel);
        let reply = self.ask(Question::Command(&command), self.limits.by()).await.ok()?;
        from_redis_value::<(String, u64)>(reply).ok().map(|(_, subscribers)| subscribers)
    }

    async fn connected(&self, by: Instant) -> Result<(Arc<Link>, Connected), Trouble> {
        let link = self.link();
        let mut made = link.made.clone();
        let made = match timeout_at(by, made.wait_for(Option::is_some)).await {
            Ok(Ok(made)) => made.clone(),
            // It took too long, or the runtime on which it was made has ended.
            Ok(Err(_)) | Err(_) => None,
        };
        match made {
            Some(Ok(connection)) => Ok((link, connection)),
            Some(Err(failure)) => Err(Trouble::NotConnected(Arc::clone(&failure.trouble))),
            None => Err(Trouble::NoConnection),
        }
    }

    /// The connection for all, made by now or not; the first one who finds none sees to that.
    fn link(&self) -> Arc<Link> {
        let mut current = self.current();
        if let Some(link) = current.as_ref().filter(|link| !link.is_spent()) {
            return Arc::clone(link);
        }
        let (tell, made) = watch::channel(None);
        let (source, limits) = (self.source.clone(), self.limits);
        Handle::current().spawn(async move {
            let connected = timeout(limits.connect, connect(&source, limits)).await;
            let connected = connected.unwrap_or(Err(Trouble::NoConnection));
            let failed = |trouble| Arc::new(Failure { trouble: Arc::new(trouble), at: Instant::now() });
            tell.send_replace(Some(connected.map_err(failed)));
        });
        let process = Process::default().id();
        let (is_new, silent) = (AtomicBool::new(true), AtomicU32::new(0));
        Arc::clone(current.insert(Arc::new(Link { process, made, is_new, silent })))
    }

    /// The next call takes another connection, if nobody has seen to that yet.
    fn replace(&self, broken: &Arc<Link>) {
        self.current().take_if(|link| Arc::ptr_eq(link, broken));
    }

    fn current(&self) -> MutexGuard<'_, Option<Arc<Link>>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn connect(source: &Source, limits: Limits) -> Result<Connected, Trouble> {
    match source {
        Source::Own(connector) => Ok(connector.replies().await?),
        Source::Pool(pool) => {
            // For good: what is given back would be given to others, who would queue with us.
            let mut connection = Connection::take(pool.get().await?);
            connection.set_response_timeout(2 * limits.call);
            Ok(connection.into())
        }
    }
}

impl Limits {
    /// How long a call waits for its answer that is made now. Whoever asked gives up a moment later, and does not know why.
    pub(super) fn by(self) -> Instant {
        Instant::now() + self.call.saturating_sub((self.call / 10).min(Duration::from_millis(20)))
    }
}

impl Link {
    /// It will never be made, has failed some time ago, or is that of another process.
    fn is_spent(&self) -> bool {
        if self.process != Process::default().id() {
            return true;
        }
        match &*self.made.borrow() {
            Some(Ok(_)) => false,
            Some(Err(failure)) => failure.at.elapsed() >= Lane::PAUSE,
            None => self.made.has_changed().is_err(),
        }
    }
}

impl Question<'_> {
    async fn put(self, connection: &mut MultiplexedConnection) -> RedisResult<Value> {
        match self {
            // By its hash; by its text where the server does not know it (any more), which also teaches it. Not by `SCRIPT LOAD`: what is
            // loaded may be flushed again before it is run.
            Self::Script(call) => match call.by_hash().query_async(connection).await {
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                    call.by_text().query_async(connection).await
                }
                answer => answer,
            },
            Self::Text(call) => call.by_text().query_async(connection).await,
            Self::Command(command) => command.query_async(connection).await,
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if !self.heard
            && self.began.elapsed() >= Lane::LONG_ENOUGH
            && self.link.silent.fetch_add(1, Ordering::Relaxed) + 1 >= Lane::SILENT
        {
            self.lane.replace(self.link);
        }
    }
}
