//! One connection for all calls of a kind, taken from the pool once and replaced when it breaks.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use deadpool_redis::{
    Connection, Pool,
    redis::{Cmd, RedisResult, Value, aio::MultiplexedConnection},
};
use tokio::{
    sync::OnceCell,
    time::{Instant, timeout},
};

use super::{script::ScriptCall, trouble::Trouble};
use crate::defaults::STORE_CALL;

/// Calls go out one behind the other and are answered in order, many at once under way. Two lanes do not wait for each other: what gives back
/// must not queue behind what asks.
///
/// The pool is asked for a connection when there is none, and not for each call: it would send a PING first each time.
#[derive(Debug)]
pub(super) struct Lane {
    pool: Pool,
    link: Mutex<Arc<Link>>,
}

/// One connection, from before it is made.
#[derive(Debug, Default)]
struct Link {
    connection: OnceCell<MultiplexedConnection>,
    /// Calls in a row that got no answer in time.
    silent: AtomicU32,
}

/// What a lane can be asked.
#[derive(Clone, Copy, Debug)]
pub(super) enum Question<'a> {
    Script(&'a ScriptCall),
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
    const ALMOST: Duration = STORE_CALL.saturating_sub(Duration::from_millis(50));

    pub(super) fn new(pool: Pool) -> Self {
        Self { pool, link: Mutex::default() }
    }

    /// Runs this script.
    pub(super) async fn run(&self, call: &ScriptCall) -> Result<Value, Trouble> {
        self.ask(Question::Script(call)).await
    }

    /// Asks. On a connection that breaks it asks once more, on a new one: it may have been broken since it was last used, and every verb can
    /// be repeated.
    pub(super) async fn ask(&self, question: Question<'_>) -> Result<Value, Trouble> {
        match self.once(question).await? {
            Err(error) if error.is_connection_dropped() => Ok(self.once(question).await??),
            answer => Ok(answer?),
        }
    }

    async fn once(&self, question: Question<'_>) -> Result<RedisResult<Value>, Trouble> {
        let link = Arc::clone(&self.link.lock().unwrap_or_else(PoisonError::into_inner));
        // Whoever comes first makes the connection for all; if it gives up, the next one does.
        let mut connection = link.connection.get_or_try_init(|| self.connect()).await?.clone();
        let mut under_way = UnderWay { lane: self, link: &link, began: Instant::now(), heard: false };
        let Ok(answer) = timeout(STORE_CALL, question.put(&mut connection)).await else { return Err(Trouble::Silent) };
        under_way.heard = true;
        link.silent.store(0, Ordering::Relaxed);
        if answer.as_ref().is_err_and(Trouble::breaks_connection) {
            self.replace(&link);
        }
        Ok(answer)
    }

    async fn connect(&self) -> Result<MultiplexedConnection, Trouble> {
        let connection = timeout(STORE_CALL, self.pool.get()).await.map_err(|_| Trouble::NoConnection)??;
        // For good: what is given back would be given to others, who would queue with us.
        let mut connection = Connection::take(connection);
        connection.set_response_timeout(2 * STORE_CALL);
        Ok(connection)
    }

    /// The next call takes another connection, if nobody has seen to that yet.
    fn replace(&self, broken: &Arc<Link>) {
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        if Arc::ptr_eq(&link, broken) {
            *link = Arc::default();
        }
    }
}

impl Question<'_> {
    async fn put(self, connection: &mut MultiplexedConnection) -> RedisResult<Value> {
        match self {
            Self::Script(call) => call.run(connection).await,
            Self::Command(command) => command.query_async(connection).await,
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if !self.heard
            && self.began.elapsed() >= Lane::ALMOST
            && self.link.silent.fetch_add(1, Ordering::Relaxed) + 1 >= Lane::SILENT
        {
            self.lane.replace(self.link);
        }
    }
}
