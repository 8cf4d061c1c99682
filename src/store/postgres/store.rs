//! The store: what PostgreSQL adds to the operations of every database.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_postgres::{
    Row,
    types::{ToSql, Type},
};

use super::{
    connection::{Calls, Connector, query},
    error::CallError,
    messages::Messages,
    schema::Schema,
};
use crate::{
    limits::POSTGRES_UNNOTIFIED_POLL,
    store::{
        LockStore,
        database::{self, Argument, Database, micros},
    },
};

/// Store of locks in PostgreSQL (13 or later), which any number of instances share. Needs the
/// feature `postgres`.
///
/// ```no_run
/// # use tower_lock::{LockManager, PostgresStore, store::PostgresConnectError};
/// # #[tokio::main]
/// # async fn main() -> Result<(), PostgresConnectError> {
/// let store = PostgresStore::builder().migrate(true).connect("postgres://user:password@localhost/app").await?;
/// let locks = LockManager::new(store);
/// # Ok(())
/// # }
/// ```
///
/// A lock is a row of a table, and each operation is one call of a function of the database. The
/// tables and the functions have a schema of their own, and are made by the
/// [migration](crate::store::PostgresStoreBuilder::migration). Waiters queue in another table. A
/// release offers the lock to the first waiter, and sends a message (`NOTIFY`) to its process.
///
/// A transaction of the application can keep its key: while a transaction has read the row of the
/// lock `FOR KEY SHARE`, the key is busy, although its lease may have expired. Renewals and
/// releases do not wait for such a transaction.
///
/// A store has three connections: one for acquires, one for renewals and releases, and one for
/// messages. Under load it opens more for acquires, up to
/// [`connections`](crate::store::PostgresStoreBuilder::connections). A broken connection is
/// replaced. No statement has a name, and no transaction is open between two messages, so that a
/// pooler may be in between; messages need a connection to the server itself
/// ([`events_url`](crate::store::PostgresStoreBuilder::events_url)).
///
/// A fence is the clock of the server in microseconds, or one more than the last fence of the key,
/// if that is larger.
///
/// A grant, a renewal, a record and a block are on the disk of the server when its reply arrives. A
/// release is not: one that a crash of the server loses leaves the key locked until its lease
/// expires.
///
/// While PostgreSQL cannot be reached, no lock is acquired (503, not started), and a held lock is
/// lost when its lease expires.
#[derive(Debug)]
pub struct PostgresStore(pub(in crate::store) Arc<dyn LockStore>);

/// A parameter of a statement, with its type: a statement without a name is sent with its types in
/// one message.
type Parameter<'a> = (Box<dyn ToSql + Sync + Send + 'a>, Type);

impl Database for Connector {
    const STORE: &'static str = "postgres";
    const HAS_QUEUE: bool = true;
    const SYNCS_RELEASES: bool = false;
    const POLL: [Duration; 2] = POSTGRES_UNNOTIFIED_POLL;

    type DriverError = tokio_postgres::Error;
    type Schema = Schema;
    type Row = Row;
    type Messages = Messages;

    async fn call(
        connection: &Calls,
        schema: &Schema,
        function: &str,
        arguments: &[Argument<'_>],
        deadline: Instant,
    ) -> Result<Vec<Row>, CallError> {
        let parameters = parameters(arguments);
        let parameters: Vec<_> =
            parameters.iter().map(|(value, of)| (&**value as &(dyn ToSql + Sync), of.clone())).collect();
        query(connection, &schema.call(function, parameters.len()), &parameters, deadline).await
    }

    /// The last statement would lock a row: a server that accepts no writes refuses it.
    async fn check(connection: &Calls, schema: &Schema, deadline: Instant) -> Result<(), CallError> {
        query(connection, &schema.check(), &[], deadline).await.map(drop)
    }

    fn has_text(text: &str) -> bool {
        !text.contains('\0')
    }
}

fn parameters<'a>(arguments: &[Argument<'a>]) -> Vec<Parameter<'a>> {
    fn one<'a>(value: impl ToSql + Sync + Send + 'a, of: Type) -> Parameter<'a> {
        (Box::new(value), of)
    }
    let number = |number: i64| one(number, Type::INT8);
    let mut parameters = Vec::with_capacity(9);
    for argument in arguments {
        match *argument {
            Argument::Number(value) => parameters.push(number(value)),
            Argument::Flag(flag) => parameters.push(one(flag, Type::BOOL)),
            Argument::Time(time) => parameters.push(number(millis(time))),
            Argument::Text(text) => parameters.push(one(text, Type::TEXT)),
            Argument::Bytes(bytes) => parameters.push(one(bytes, Type::BYTEA)),
            Argument::Offer(queue) => parameters.push(number(millis(queue.offer_ttl))),
            Argument::Queue(queue) => {
                let capacity = i64::try_from(queue.capacity).unwrap_or(i64::MAX);
                parameters.extend([millis(queue.offer_ttl), millis(queue.entry_ttl), capacity].map(number));
            }
            Argument::Trace(trace) => parameters.push(one(trace.map(ToString::to_string), Type::TEXT)),
            Argument::Traces(batch) => {
                let traces: Vec<_> = batch.requests.iter().map(|of| of.trace.as_deref()).collect();
                parameters.push(one(traces, Type::TEXT_ARRAY));
            }
            Argument::Requests(batch) => {
                let requests = || batch.requests.iter();
                parameters.extend([
                    one(requests().map(|of| &*of.name).collect::<Vec<_>>(), Type::TEXT_ARRAY),
                    one(requests().map(|of| &*of.id).collect::<Vec<_>>(), Type::TEXT_ARRAY),
                    one(requests().map(|of| millis(of.time)).collect::<Vec<_>>(), Type::INT8_ARRAY),
                ]);
                let waits: Option<Vec<bool>> = requests().map(|of| of.waits).collect();
                parameters.extend(waits.map(|waits| one(waits, Type::BOOL_ARRAY)));
            }
        }
    }
    parameters
}

/// A duration for the server: rounded up to milliseconds.
fn millis(duration: Duration) -> i64 {
    micros(duration.saturating_add(Duration::from_micros(999))) / 1000
}

impl database::Row for Row {
    fn number(&self, column: usize) -> Option<i64> {
        self.try_get(column).ok()
    }

    fn text(&self, column: usize) -> Option<String> {
        self.try_get(column).ok()
    }

    fn bytes(&self, column: usize) -> Option<Vec<u8>> {
        self.try_get(column).ok()
    }

    fn numbers(&self, column: usize) -> Option<Vec<i64>> {
        self.try_get(column).ok()
    }

    fn texts(&self, column: usize) -> Option<Vec<String>> {
        self.try_get(column).ok()
    }
}
