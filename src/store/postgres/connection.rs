//! Connections to the server, and one statement on them.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::{runtime::Handle, time::Instant};
use tokio_postgres::{Client, Config, Connection, Row, Socket, error::SqlState, tls::MakeTlsConnect};

use super::{
    address::Address,
    error::CallError,
    replies::{column, only},
    tls::Tls,
};
use crate::store::remote::{
    link::{Connect, Link, LinkError},
    settings::Timeouts,
};

/// Connects to the server.
pub(super) struct Connector {
    /// For errors and logs.
    pub(super) address: String,
    config: Config,
    tls: Tls,
    timeouts: Timeouts,
    /// A pooler has refused the settings of a session.
    is_pooler: AtomicBool,
    tables: OnceLock<Tables>,
}

/// The tables that the store has begun with: the address may lead to others later.
struct Tables {
    /// The statement that reads the id.
    statement: String,
    id: Option<String>,
}

/// The bytes of a connection with TLS, if it has TLS.
type Stream = <Tls as MakeTlsConnect<Socket>>::Stream;

/// A connection for calls.
pub(super) type Calls = Link<Connector>;

/// A parameter of a statement, with its type: a statement without a name is sent with its types in
/// one message.
pub(super) type Parameter<'a> = (&'a (dyn tokio_postgres::types::ToSql + Sync), tokio_postgres::types::Type);

impl Connector {
    pub(super) fn new(address: Address, tls: Tls, timeouts: Timeouts) -> Self {
        let (is_pooler, tables) = (AtomicBool::new(false), OnceLock::new());
        Self { address: address.display, config: address.config, tls, timeouts, is_pooler, tables }
    }

    /// Refuses connections to tables with another id from now on.
    pub(super) fn pin_tables(&self, statement: String, id: Option<&str>) {
        let _ = self.tables.set(Tables { statement, id: id.map(str::to_owned) });
    }

    /// Opens a connection.
    ///
    /// The settings of its session are nets: a statement ends that its caller does not wait for any
    /// more, and the functions of the store need `read committed`, and to write. A pooler does not
    /// know the settings, and its sessions have those of its user.
    pub(super) async fn open(&self) -> Result<(Client, Connection<Socket, Stream>), CallError> {
        if self.is_pooler.load(Ordering::Relaxed) {
            return Ok(self.config.connect(self.tls.clone()).await?);
        }
        let mut config = self.config.clone();
        let own = format!(
            "-c statement_timeout={} -c default_transaction_isolation=read\\ committed \
             -c default_transaction_read_only=off",
            self.timeouts.call.as_millis()
        );
        config.options(match config.get_options() {
            Some(options) => format!("{options} {own}"),
            None => own,
        });
        match config.connect(self.tls.clone()).await {
            Err(error) if error.code() == Some(&SqlState::PROTOCOL_VIOLATION) => {
                let opened = self.config.connect(self.tls.clone()).await?;
                self.is_pooler.store(true, Ordering::Relaxed);
                Ok(opened)
            }
            opened => Ok(opened?),
        }
    }
}

impl Connect for Connector {
    type Connection = Arc<Client>;
    type Error = CallError;

    async fn connect(&self, _: &OnceLock<Arc<str>>) -> Result<Arc<Client>, CallError> {
        let (client, connection) = self.open().await?;
        // Ends with the last handle of the client, or with the connection: its calls then fail.
        Handle::current().spawn(async move { drop(connection.await) });
        if let Some(Tables { statement, id }) = self.tables.get()
            && column::<Option<&str>>(only(&client.query_typed(statement, &[]).await?)?, 0)? != id.as_deref()
        {
            return Err(CallError::OtherTables);
        }
        Ok(Arc::new(client))
    }

    fn failed(&self, error: Option<CallError>, _: Option<&Arc<str>>) -> CallError {
        error.unwrap_or(LinkError::ConnectTimeout.into())
    }
}

impl fmt::Debug for Connector {
    /// Without the settings, which have the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").field("timeouts", &self.timeouts).finish_non_exhaustive()
    }
}

/// Sends a statement once, and waits for its rows until the deadline. If the connection breaks, the
/// outcome is unknown; a connection that had broken before is replaced. The rows are complete when
/// the server has committed.
pub(super) async fn query(
    connection: &Calls,
    statement: &str,
    parameters: &[Parameter<'_>],
    deadline: Instant,
) -> Result<Vec<Row>, CallError> {
    let send = async || {
        let send = |client: Arc<Client>| async move {
            if client.is_closed() {
                return Err(CallError::Closed);
            }
            Ok(client.query_typed(statement, parameters).await?)
        };
        let breaks = |reply: &Result<Vec<Row>, CallError>| reply.as_ref().is_err_and(CallError::breaks_connection);
        connection.call(deadline, send, breaks).await?
    };
    match send().await {
        Err(CallError::Closed) => send().await,
        reply => reply,
    }
}
