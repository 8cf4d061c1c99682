//! Connections to the server, and one statement on them.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use tokio::{
    runtime::Handle,
    time::{Instant, timeout},
};
use tokio_postgres::{
    Client, Config, Connection, Row, Socket,
    error::SqlState,
    tls::MakeTlsConnect,
    types::{FromSql, ToSql, Type},
};

use super::{address::Address, error::CallError, tls::Tls};
use crate::store::{
    database::{self, replies::only},
    remote::{
        credentials::{Credentials, Login},
        link::{Connect, Link, LinkError},
        settings::Timeouts,
    },
};

/// Connects to the server.
pub(super) struct Connector {
    /// For errors and logs.
    pub(super) address: String,
    /// One for each address.
    configs: Vec<Config>,
    /// The address that is tried first: the last one that has replied.
    first: AtomicUsize,
    tls: Tls,
    login: Option<Login>,
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

impl Connector {
    pub(super) fn new(address: Address, tls: Tls, timeouts: Timeouts) -> Self {
        let (is_pooler, tables) = (AtomicBool::new(false), OnceLock::new());
        let (first, Address { configs, login, display: address, .. }) = (AtomicUsize::new(0), address);
        Self { address, configs, first, tls, login, timeouts, is_pooler, tables }
    }

    /// The timeouts of a store, which may have to try each address.
    pub(super) fn timeouts(&self) -> Timeouts {
        let addresses = u32::try_from(self.configs.len()).unwrap_or(u32::MAX);
        Timeouts { connect: self.timeouts.connect.saturating_mul(addresses), ..self.timeouts }
    }

    /// Refuses connections to tables with another id from now on.
    pub(super) fn pin_tables(&self, statement: String, id: Option<&str>) {
        let _ = self.tables.set(Tables { statement, id: id.map(str::to_owned) });
    }

    /// Opens a connection. Each address has the time of a connect: a silent one delays the next.
    pub(super) async fn open(&self) -> Result<(Client, Connection<Socket, Stream>), CallError> {
        let (first, mut failure) = (self.first.load(Ordering::Relaxed), CallError::from(LinkError::ConnectTimeout));
        let login = match &self.login {
            Some(login) => {
                let asked = timeout(self.timeouts.connect, login.get()).await;
                Some(asked.map_err(|_| LinkError::ConnectTimeout)??)
            }
            None => None,
        };
        for at in (first..self.configs.len()).chain(0..first) {
            failure = match timeout(self.timeouts.connect, self.open_at(&self.configs[at], login.as_ref())).await {
                Ok(Ok(opened)) => {
                    self.first.store(at, Ordering::Relaxed);
                    return Ok(opened);
                }
                Ok(Err(error)) => error,
                Err(_) => LinkError::ConnectTimeout.into(),
            };
        }
        Err(failure)
    }

    /// Opens a connection to one address.
    ///
    /// The settings of its session are nets: a statement ends that its caller does not wait for any
    /// more, and the functions of the store need `read committed`, and to write. A pooler does not
    /// know the settings, and its sessions have those of its user.
    async fn open_at(
        &self,
        config: &Config,
        login: Option<&Credentials>,
    ) -> Result<(Client, Connection<Socket, Stream>), CallError> {
        let mut config = config.clone();
        if let Some(Credentials { user, password }) = login {
            config.user(user).password(password);
        }
        if self.is_pooler.load(Ordering::Relaxed) {
            return Ok(config.connect(self.tls.clone()).await?);
        }
        let mut with_settings = config.clone();
        let own = format!(
            "-c statement_timeout={} -c default_transaction_isolation=read\\ committed \
             -c default_transaction_read_only=off",
            self.timeouts.call.as_millis()
        );
        with_settings.options(match config.get_options() {
            Some(options) => format!("{options} {own}"),
            None => own,
        });
        match with_settings.connect(self.tls.clone()).await {
            Err(error) if error.code().is_some_and(|code| POOLER_CODES.contains(code)) => {
                let opened = config.connect(self.tls.clone()).await?;
                self.is_pooler.store(true, Ordering::Relaxed);
                Ok(opened)
            }
            opened => Ok(opened?),
        }
    }
}

/// The codes by which poolers refuse the settings of a session: PgBouncer, Odyssey, RDS Proxy and
/// others differ.
const POOLER_CODES: [SqlState; 5] = [
    SqlState::PROTOCOL_VIOLATION,
    SqlState::FEATURE_NOT_SUPPORTED,
    SqlState::INVALID_PARAMETER_VALUE,
    SqlState::UNDEFINED_OBJECT,
    SqlState::INVALID_AUTHORIZATION_SPECIFICATION,
];

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

/// Sends a statement once: see [`database::send`]. The rows are complete when the server has
/// committed.
pub(super) async fn query(
    connection: &Calls,
    statement: &str,
    parameters: &[(&(dyn ToSql + Sync), Type)],
    deadline: Instant,
) -> Result<Vec<Row>, CallError> {
    let send = |client: Arc<Client>| async move {
        if client.is_closed() {
            return Err(CallError::Closed);
        }
        Ok(client.query_typed(statement, parameters).await?)
    };
    database::send(connection, deadline, send).await
}

pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, index: usize) -> Result<T, CallError> {
    row.try_get(index).map_err(|_| CallError::UnexpectedReply)
}
