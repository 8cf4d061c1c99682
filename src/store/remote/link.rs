//! A connection that is replaced when it breaks.
//!
//! A server closes a connection, or a network stops to carry its packets. All calls of a store
//! share a few connections, so each of them must notice that for all of them, and one of them
//! connects again.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    time::{Instant, timeout, timeout_at},
};

use crate::sync::{Mutex, MutexGuard};

/// Connects to a server.
pub(crate) trait Connect: Send + Sync + 'static {
    /// A connection for many concurrent calls.
    type Connection: Clone + Send + Sync + 'static;
    /// The error of a connect.
    type Error: Send + Sync + 'static;

    /// Connects. `named` gets the name of the server before, if it is looked up: the connect may
    /// take long if that server has stopped.
    fn connect(&self, named: &OnceLock<Arc<str>>)
    -> impl Future<Output = Result<Self::Connection, Self::Error>> + Send;

    /// The error of a connect to this server. `None`: it took too long.
    fn failed(&self, error: Option<Self::Error>, named: Option<&Arc<str>>) -> Self::Error;
}

/// One connection for many concurrent calls, which share its replacement.
#[derive(Debug)]
pub(crate) struct Link<C: Connect> {
    connect: Arc<C>,
    connect_timeout: Duration,
    /// Notified by the first reply after a timeout or on a new connection: an outage may have
    /// ended.
    recovered: Arc<Notify>,
    state: Mutex<Option<Arc<State<C>>>>,
}

/// Why a call has no reply.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError<E> {
    /// No connection before the deadline.
    #[error("timed out connecting")]
    ConnectTimeout,
    /// The connect failed. All callers that waited for it share the error.
    #[error("{0}")]
    ConnectFailed(Arc<E>),
    /// No reply before the deadline.
    #[error("timed out waiting for a reply")]
    NoReply,
}

/// One connection, from the start of its connect. A task of its own connects, so that a caller that
/// gives up does not cancel it for the others.
struct State<C: Connect> {
    /// The name of the server, as soon as it was looked up.
    named: Arc<OnceLock<Arc<str>>>,
    result: watch::Receiver<Option<ConnectResult<C>>>,
    /// No reply has arrived on it yet.
    is_new: AtomicBool,
    /// Consecutive calls without a reply in time.
    timeouts: AtomicU32,
}

type ConnectResult<C> = Result<<C as Connect>::Connection, Failure<<C as Connect>::Error>>;

/// A failed connect. The next one begins after [`RECONNECT_DELAY`].
struct Failure<E> {
    error: Arc<E>,
    at: Instant,
}

/// A call in flight. Its drop without a reply counts as a timeout, because the caller may cancel it
/// at the same time as the deadline.
struct InFlight<'a, C: Connect> {
    link: &'a Link<C>,
    state: &'a Arc<State<C>>,
    started: Instant,
    replied: bool,
}

/// Consecutive timeouts after which a connection is replaced: TCP notices an interrupted network
/// late.
const MAX_TIMEOUTS: u32 = 3;
/// A call that is cancelled earlier is no evidence about the connection.
const MIN_COUNTED_WAIT: Duration = Duration::from_millis(200);
/// Between two connects, so that a server that was down does not find thousands of them queued.
pub(crate) const RECONNECT_DELAY: Duration = Duration::from_millis(100);

impl<C: Connect> Link<C> {
    pub(crate) fn new(connect: Arc<C>, connect_timeout: Duration, recovered: Arc<Notify>) -> Self {
        Self { connect, connect_timeout, recovered, state: Mutex::default() }
    }

    /// Sends once and waits for the reply until the deadline. If the connection breaks, the outcome
    /// is unknown. A reply that `is_broken` shows that the connection is.
    pub(crate) async fn call<T, F: Future<Output = T> + Send>(
        &self,
        deadline: Instant,
        send: impl FnOnce(C::Connection) -> F,
        is_broken: impl FnOnce(&T) -> bool,
    ) -> Result<T, LinkError<C::Error>> {
        let (state, connection) = self.connected(deadline).await?;
        let mut in_flight = InFlight { link: self, state: &state, started: Instant::now(), replied: false };
        let Ok(reply) = timeout_at(deadline, send(connection)).await else { return Err(LinkError::NoReply) };
        in_flight.replied = true;
        if state.timeouts.swap(0, Ordering::Relaxed) > 0 || state.is_new.swap(false, Ordering::Relaxed) {
            self.recovered.notify_one();
        }
        if is_broken(&reply) {
            self.discard(&state);
        }
        Ok(reply)
    }

    /// Whether a call need not wait for a connection. Otherwise one is opened.
    #[cfg(any(feature = "__database", feature = "redis"))]
    pub(crate) fn is_connected(&self) -> bool {
        matches!(&*self.connect_or_join().result.borrow(), Some(Ok(_)))
    }

    /// The same, and opens none.
    #[cfg(feature = "__database")]
    pub(crate) fn is_open(&self) -> bool {
        let state = self.lock_state();
        state.as_ref().is_some_and(|state| matches!(&*state.result.borrow(), Some(Ok(_))))
    }

    /// Waits for a connection, within the connect timeout.
    #[cfg(any(feature = "postgres", feature = "redis", feature = "zookeeper"))]
    pub(crate) async fn ready(&self) -> Result<(), LinkError<C::Error>> {
        self.connected(Instant::now() + self.connect_timeout).await.map(drop)
    }

    /// Abandons a connection to any other server than the one with this name, complete or not.
    /// Returns whether there was one.
    #[cfg(feature = "redis")]
    pub(crate) fn leave_others(&self, name: &str) -> bool {
        let is_other = |state: &mut Arc<State<C>>| state.named.get().is_some_and(|other| **other != *name);
        self.lock_state().take_if(is_other).is_some()
    }

    /// Abandons the connection. Calls on it may still get their replies.
    #[cfg(feature = "redis")]
    pub(crate) fn abandon(&self) {
        self.lock_state().take();
    }

    /// Abandons the connection, and returns it if it is complete.
    #[cfg(any(feature = "redis", feature = "zookeeper"))]
    pub(crate) fn take(&self) -> Option<C::Connection> {
        let state = self.lock_state().take()?;
        match &*state.result.borrow() {
            Some(Ok(connection)) => Some(connection.clone()),
            _ => None,
        }
    }

    async fn connected(&self, deadline: Instant) -> Result<(Arc<State<C>>, C::Connection), LinkError<C::Error>> {
        let state = self.connect_or_join();
        let mut result = state.result.clone();
        let connected = timeout_at(deadline, result.wait_for(Option::is_some)).await;
        match connected.ok().and_then(Result::ok).as_deref() {
            Some(Some(Ok(connection))) => Ok((state, connection.clone())),
            Some(Some(Err(failure))) => Err(LinkError::ConnectFailed(Arc::clone(&failure.error))),
            // The deadline has passed, or the runtime of the connecting task has ended.
            Some(None) | None => Err(LinkError::ConnectTimeout),
        }
    }

    /// The current connection, complete or not. Starts one if there is none.
    fn connect_or_join(&self) -> Arc<State<C>> {
        let mut current = self.lock_state();
        if let Some(state) = current.as_ref().filter(|state| !state.is_unusable()) {
            return Arc::clone(state);
        }
        let (sender, result) = watch::channel(None);
        let (connect, connect_timeout) = (Arc::clone(&self.connect), self.connect_timeout);
        let state = Arc::new(State {
            named: Arc::default(),
            result,
            is_new: AtomicBool::new(true),
            timeouts: AtomicU32::new(0),
        });
        let named = Arc::clone(&state.named);
        Handle::current().spawn(async move {
            let connected = match timeout(connect_timeout, connect.connect(&named)).await {
                Ok(Ok(connection)) => Ok(connection),
                Ok(Err(error)) => Err(connect.failed(Some(error), named.get())),
                Err(_) => Err(connect.failed(None, named.get())),
            };
            let failure = |error| Failure { error: Arc::new(error), at: Instant::now() };
            sender.send_replace(Some(connected.map_err(failure)));
        });
        Arc::clone(current.insert(state))
    }

    /// Discards a broken connection, unless another caller already did.
    fn discard(&self, broken: &Arc<State<C>>) {
        self.lock_state().take_if(|state| Arc::ptr_eq(state, broken));
    }

    fn lock_state(&self) -> MutexGuard<'_, Option<Arc<State<C>>>> {
        self.state.lock()
    }
}

impl<C: Connect> State<C> {
    /// Whether it has failed some time ago, or its runtime has ended before the connect did.
    fn is_unusable(&self) -> bool {
        match &*self.result.borrow() {
            Some(Ok(_)) => false,
            Some(Err(failure)) => failure.at.elapsed() >= RECONNECT_DELAY,
            None => self.result.has_changed().is_err(),
        }
    }
}

impl<C: Connect> fmt::Debug for State<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("named", &self.named).finish_non_exhaustive()
    }
}

impl<C: Connect> Drop for InFlight<'_, C> {
    fn drop(&mut self) {
        if !self.replied
            && self.started.elapsed() >= MIN_COUNTED_WAIT
            && self.state.timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_TIMEOUTS
        {
            self.link.discard(self.state);
        }
    }
}
