//! The address of a server, and its connections.

use std::{fmt, sync::Arc, time::Duration};

use deadpool_redis::redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, RedisError, RedisResult, Value,
    aio::{MultiplexedConnection, PubSubSink},
    cmd, pipe,
};
use futures_util::StreamExt;
use tokio::{net::TcpStream, runtime::Handle, task::JoinHandle};

use super::socket::{OnMessage, Socket, Stream};
use crate::store::redis::wire::escape_control;

/// The most calls of a connection of the library that wait for its socket; further calls wait for
/// capacity.
const PIPELINE_CAPACITY: usize = 1024;

/// The address of a server, and how to connect to it.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    client: Arc<Client>,
    connect_timeout: Duration,
    call_timeout: Duration,
}

/// A connection for calls.
#[derive(Clone)]
pub(crate) enum Connected {
    Socket(Socket),
    /// Of a pool of the user, or over TLS. Its replies have no bound but timeouts.
    Library(MultiplexedConnection),
}

/// A connection for messages.
pub(crate) enum Subscriptions {
    Socket(Socket),
    /// Over TLS.
    Library(PubSubSink, ForwardTask),
}

/// Passes messages on until the connection ends.
pub(crate) struct ForwardTask(JoinHandle<()>);

impl Endpoint {
    pub(crate) fn new(client: Client, connect_timeout: Duration, call_timeout: Duration) -> Self {
        Self { client: Arc::new(client), connect_timeout, call_timeout }
    }

    /// The host of the server. Empty for a socket of this machine.
    pub(crate) fn host(&self) -> String {
        match self.client.get_connection_info().addr() {
            ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host.clone(),
            _ => String::new(),
        }
    }

    /// Connects for calls.
    pub(crate) async fn connect(&self) -> RedisResult<Connected> {
        if let Some(stream) = self.stream().await? {
            return Ok(Connected::Socket(self.log_in(Socket::open(stream, None)).await?));
        }
        // The callers have timeouts of their own, for each call and for each connect.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(Some(2 * self.call_timeout))
            .set_pipeline_buffer_size(PIPELINE_CAPACITY);
        Ok(Connected::Library(self.client.get_multiplexed_async_connection_with_config(&config).await?))
    }

    /// Connects for messages.
    pub(crate) async fn subscribe(&self, mut on_message: OnMessage) -> RedisResult<Subscriptions> {
        if let Some(stream) = self.stream().await? {
            return Ok(Subscriptions::Socket(self.log_in(Socket::open(stream, Some(on_message))).await?));
        }
        let (sink, mut messages) = self.client.get_async_pubsub().await?.split();
        let forward = async move {
            while let Some(message) = messages.next().await {
                on_message(message.get_channel_name().as_bytes(), message.get_payload_bytes());
            }
        };
        Ok(Subscriptions::Library(sink, ForwardTask(Handle::current().spawn(forward))))
    }

    /// `None`: the address requires TLS. The library does not expose its settings for it.
    async fn stream(&self) -> RedisResult<Option<Box<dyn Stream>>> {
        Ok(match self.client.get_connection_info().addr() {
            ConnectionAddr::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                // Nagle's algorithm would let a call wait for the reply to the previous one.
                stream.set_nodelay(true)?;
                Some(Box::new(stream))
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => Some(Box::new(tokio::net::UnixStream::connect(path).await?)),
            _ => None,
        })
    }

    async fn log_in(&self, socket: Socket) -> RedisResult<Socket> {
        let settings = self.client.get_connection_info().redis_settings();
        let auth = settings.password().map(|password| {
            let mut auth = cmd("AUTH");
            auth.arg(settings.username()).arg(password);
            auth
        });
        let select = (settings.db() != 0).then(|| {
            let mut select = cmd("SELECT");
            select.arg(settings.db());
            select
        });
        let commands: Vec<_> = auth.into_iter().chain(select).collect();
        if !commands.is_empty() {
            socket.call(&commands).await?;
        }
        Ok(socket)
    }
}

impl Connected {
    /// Sends commands together. The reply has those of all of them, if there are several.
    pub(crate) async fn call(&mut self, commands: &[Cmd]) -> RedisResult<Value> {
        match (self, commands) {
            (Self::Socket(socket), _) => socket.call(commands).await,
            (Self::Library(connection), [command]) => command.query_async(connection).await,
            (Self::Library(connection), _) => {
                let mut pipeline = pipe();
                for command in commands {
                    pipeline.add_command(command.clone());
                }
                let replies: Vec<RedisResult<Value>> = pipeline.ignore_errors().query_async(connection).await?;
                Ok(Value::Array(replies.into_iter().collect::<RedisResult<_>>()?))
            }
        }
    }

    /// Sends commands together. An error is the reply to its command alone.
    pub(crate) async fn call_each(&mut self, commands: &[Cmd]) -> RedisResult<Vec<RedisResult<Value>>> {
        match self {
            Self::Socket(socket) => socket.call_each(commands).await,
            Self::Library(connection) => {
                let mut pipeline = pipe();
                for command in commands {
                    pipeline.add_command(command.clone());
                }
                pipeline.ignore_errors().query_async(connection).await
            }
        }
    }

    /// Fails if the server has closed the connection, with its reason.
    pub(crate) async fn check(&mut self) -> RedisResult<()> {
        let Err(error) = self.call(&[cmd("PING")]).await else { return Ok(()) };
        match self.call(&[cmd("PING")]).await {
            Err(again) if again.is_io_error() => Err(self.closing_reason().unwrap_or(error)),
            // An error of that command, such as LOADING.
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn closing_reason(&self) -> Option<RedisError> {
        match self {
            Self::Socket(socket) => socket.closing_reason(),
            Self::Library(_) => None,
        }
    }
}

impl Subscriptions {
    pub(crate) async fn subscribe(&mut self, channels: &[String]) -> RedisResult<()> {
        match self {
            Self::Socket(socket) => socket.call(&for_each("SUBSCRIBE", channels)).await.map(drop),
            Self::Library(sink, _) => sink.subscribe(channels).await,
        }
    }

    pub(crate) async fn unsubscribe(&mut self, channels: &[String]) -> RedisResult<()> {
        match self {
            Self::Socket(socket) => socket.call(&for_each("UNSUBSCRIBE", channels)).await.map(drop),
            Self::Library(sink, _) => sink.unsubscribe(channels).await,
        }
    }

    pub(crate) async fn ping(&mut self) -> RedisResult<()> {
        match self {
            Self::Socket(socket) => socket.call(&[cmd("PING")]).await.map(drop),
            Self::Library(sink, _) => sink.ping().await,
        }
    }

    /// Waits for the end of the connection.
    pub(crate) async fn ended(&mut self) {
        match self {
            Self::Socket(socket) => socket.ended().await,
            Self::Library(_, ForwardTask(task)) => drop(task.await),
        }
    }
}

impl From<MultiplexedConnection> for Connected {
    fn from(connection: MultiplexedConnection) -> Self {
        Self::Library(connection)
    }
}

impl Drop for ForwardTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl fmt::Display for Endpoint {
    /// The address, without user and password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape_control(&self.client.get_connection_info().addr().to_string()))
    }
}

impl fmt::Debug for Connected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connected")
    }
}

impl fmt::Debug for Subscriptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Subscriptions")
    }
}

/// A command for each channel: one of several channels has a reply for each, or one error.
fn for_each(command: &str, channels: &[String]) -> Vec<Cmd> {
    let of_channel = |channel| {
        let mut command = cmd(command);
        command.arg(channel);
        command
    };
    channels.iter().map(of_channel).collect()
}
