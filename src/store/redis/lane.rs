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
    redis::{Cmd, FromRedisValue, Value, aio::MultiplexedConnection},
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
        self.with(async |connection| call.run(connection).await).await
    }

    /// Runs this command.
    pub(super) async fn query<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, Trouble> {
        self.with(async |connection| command.query_async(connection).await).await
    }

    async fn with<T>(
        &self,
        ask: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, deadpool_redis::redis::RedisError>,
    ) -> Result<T, Trouble> {
        let link = Arc::clone(&self.link.lock().unwrap_or_else(PoisonError::into_inner));
        // Whoever comes first makes the connection for all; if it gives up, the next one does.
        let mut connection = link.connection.get_or_try_init(|| self.connect()).await?.clone();
        let mut under_way = UnderWay { lane: self, link: &link, began: Instant::now(), heard: false };
        let Ok(answer) = timeout(STORE_CALL, ask(&mut connection)).await else { return Err(Trouble::Silent) };
        under_way.heard = true;
        link.silent.store(0, Ordering::Relaxed);
        answer.map_err(|error| {
            let trouble = Trouble::Redis(error);
            if trouble.breaks_connection() {
                self.replace(&link);
            }
            trouble
        })
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
