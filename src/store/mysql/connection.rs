//! Connections to the server, and one statement on them.
//!
//! A connection executes one statement after the other, and cannot be used before the reply to the
//! last one is read. So a task owns the connection. If a caller gives up, the task reads the reply.
//! If the reply does not come in time, the task closes the connection.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use mysql_async::{Conn, OptsBuilder, Row, prelude::Queryable};
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
    time::{Instant, timeout_at},
};

use super::{address::Address, error::CallError, schema::Schema};
use crate::{
    limits::MYSQL_POLL,
    store::{
        database::{self, Argument, Database, Row as _},
        remote::{
            credentials::Login,
            link::{Connect, Link, LinkError},
        },
    },
};

/// Connects to the server.
pub(super) struct Connector {
    /// Host and port, for errors and logs.
    pub(super) address: String,
    options: OptsBuilder,
    login: Option<Login>,
    /// The prefix of the tables that the store has begun with, and their id. The address may lead
    /// to others later.
    tables: OnceLock<(String, String)>,
}

/// A statement for a connection, which is not sent after the deadline.
pub(super) struct Statement {
    text: String,
    deadline: Instant,
    reply: oneshot::Sender<Result<Vec<Row>, CallError>>,
}

/// A connection for calls.
pub(super) type Calls = Link<Connector>;

/// Statements that wait for one connection. Callers share calls: there are few.
const MAX_WAITING: usize = 64;

/// The settings of a session. Two are nets: a statement ends that its caller does not wait for any
/// more. The others are the defaults, which a server may have changed.
const INIT: &str = "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 1, autocommit = 1, \
    completion_type = 0, sql_safe_updates = 0, sql_big_selects = 1";

impl Connector {
    pub(super) fn new(address: Address) -> Self {
        let Address { options, display, login, .. } = address;
        let options = options.init(vec![INIT]);
        Self { address: display, options, login, tables: OnceLock::new() }
    }

    /// Refuses connections to tables with another id from now on.
    pub(super) fn pin_tables(&self, prefix: String, id: String) {
        let _ = self.tables.set((prefix, id));
    }
}

impl Connect for Connector {
    type Connection = mpsc::Sender<Statement>;
    type Error = CallError;

    async fn connect(&self, _: &OnceLock<Arc<str>>) -> Result<mpsc::Sender<Statement>, CallError> {
        let mut options = self.options.clone();
        if let Some(login) = &self.login {
            let login = login.get().await?;
            options = options.user(Some(login.user)).pass(Some(login.password));
        }
        let mut connection = Conn::new(options).await?;
        if let Some((prefix, id)) = self.tables.get() {
            let rows: Vec<Row> = connection.query(format!("SELECT id FROM {prefix}_floor")).await?;
            if rows.first().and_then(|row| row.text(0)).as_ref() != Some(id) {
                return Err(CallError::OtherTables);
            }
        }
        let (sender, statements) = mpsc::channel(MAX_WAITING);
        Handle::current().spawn(execute(connection, statements));
        Ok(sender)
    }

    fn failed(&self, error: Option<CallError>, _: Option<&Arc<str>>) -> CallError {
        error.unwrap_or(LinkError::ConnectTimeout.into())
    }
}

/// Executes statements until their senders are gone: a caller discards a broken connection.
async fn execute(mut connection: Conn, mut statements: mpsc::Receiver<Statement>) {
    while let Some(Statement { text, deadline, reply }) = statements.recv().await {
        if reply.is_closed() || deadline <= Instant::now() {
            continue;
        }
        // Without a reply in time, the next one on this connection would be that of this statement.
        let Ok(rows) = timeout_at(deadline, connection.query(text)).await else { return };
        // The caller may have given up.
        let _ = reply.send(rows.map_err(CallError::from));
    }
}

impl Database for Connector {
    const STORE: &'static str = "mysql";
    const HAS_QUEUE: bool = false;
    const SYNCS_RELEASES: bool = true;
    const POLL: [Duration; 2] = MYSQL_POLL;

    type DriverError = mysql_async::Error;
    type Schema = Schema;
    type Row = Row;
    type Messages = ();

    async fn call(
        connection: &Calls,
        schema: &Schema,
        procedure: &str,
        arguments: &[Argument<'_>],
        deadline: Instant,
    ) -> Result<Vec<Row>, CallError> {
        query(connection, &schema.call(procedure, arguments), deadline).await
    }

    async fn check(connection: &Calls, schema: &Schema, deadline: Instant) -> Result<(), CallError> {
        query(connection, &schema.call("self_test", &[]), deadline).await.map(drop)
    }
}

/// Sends a statement once: see [`database::send`].
pub(super) async fn query(connection: &Calls, text: &str, deadline: Instant) -> Result<Vec<Row>, CallError> {
    let send = |statements: mpsc::Sender<Statement>| async move {
        let (reply, rows) = oneshot::channel();
        let statement = Statement { text: text.to_owned(), deadline, reply };
        statements.send(statement).await.map_err(|_| CallError::Closed)?;
        // Another statement took too long: this one is sent on the next connection.
        rows.await.unwrap_or(Err(CallError::Closed))
    };
    database::send(connection, deadline, send).await
}

impl database::Row for Row {
    fn number(&self, column: usize) -> Option<i64> {
        self.get_opt(column)?.ok()
    }

    fn text(&self, column: usize) -> Option<String> {
        String::from_utf8(self.bytes(column)?).ok()
    }

    fn bytes(&self, column: usize) -> Option<Vec<u8>> {
        self.get_opt(column)?.ok()
    }

    fn numbers(&self, column: usize) -> Option<Vec<i64>> {
        serde_json::from_slice(&self.bytes(column)?).ok()
    }

    fn texts(&self, column: usize) -> Option<Vec<String>> {
        serde_json::from_slice(&self.bytes(column)?).ok()
    }
}
