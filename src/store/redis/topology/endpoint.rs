//! The address of a server, and its connections.

use std::{fmt, io, slice};

use deadpool_redis::redis::{
    Cmd, ConnectionAddr, ConnectionInfo, RedisError, RedisResult, Value, aio::MultiplexedConnection, cmd,
    from_redis_value, make_extension_error, pipe,
};

use super::socket::{OnMessage, Socket};
use crate::store::{
    error::escape_control,
    redis::error::LOGIN_FAILED,
    remote::{
        credentials::{Credentials, Login, LoginError, TWO_LOGINS},
        stream::{self, Stream, Tls},
    },
};

/// The address of a server, and how to connect to it.
#[derive(Clone)]
pub(crate) struct Endpoint {
    /// Host and port, or the path of a socket; user, password and database.
    info: ConnectionInfo,
    tls: Option<Tls>,
    /// In place of user and password.
    login: Option<Login>,
}

/// A connection for calls.
#[derive(Clone)]
pub(crate) enum Connected {
    Socket(Socket),
    /// Of a pool of the user. Its replies have no bound but timeouts.
    Pooled(MultiplexedConnection),
}

/// A connection for messages.
pub(crate) struct Subscriptions {
    socket: Socket,
    /// Why the server does not say when it has deleted all keys.
    pub(crate) untracked: Option<RedisError>,
}

impl Endpoint {
    pub(crate) fn new(info: ConnectionInfo, tls: Option<Tls>) -> Self {
        Self { info, tls, login: None }
    }

    /// Has each connect ask for user and password. Fails if the URL has one of them.
    pub(super) fn logged_in_by(self, login: Option<&Login>) -> Result<Self, &'static str> {
        let settings = self.info.redis_settings();
        if login.is_some() && (settings.username().is_some() || settings.password().is_some()) {
            return Err(TWO_LOGINS);
        }
        Ok(Self { login: login.cloned(), ..self })
    }

    /// Another server with the login and the TLS of this one.
    pub(crate) fn at(&self, host: &str, port: u16) -> Self {
        Self { info: self.info.clone().set_addr(ConnectionAddr::Tcp(host.to_owned(), port)), ..self.clone() }
    }

    /// The host of the server. Empty for a socket of this machine.
    pub(crate) fn host(&self) -> &str {
        if let ConnectionAddr::Tcp(host, _) = self.info.addr() { host } else { "" }
    }

    /// The user, in an error message.
    pub(crate) fn user(&self) -> String {
        if self.login.is_some() {
            return "the user of `credentials`".to_owned();
        }
        format!("user `{}`", escape_control(self.info.redis_settings().username().unwrap_or("default")))
    }

    /// Address, user, password and database.
    #[cfg(test)]
    pub(super) fn seen(&self) -> (String, Option<&str>, Option<&str>, i64) {
        let settings = self.info.redis_settings();
        (self.info.addr().to_string(), settings.username(), settings.password(), settings.db())
    }

    #[cfg(all(test, feature = "redis-tls"))]
    pub(super) fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Connects for calls. Fails if the server closes the connection, with its reason.
    pub(crate) async fn connect(&self) -> RedisResult<Socket> {
        let socket = self.open(None).await?;
        let Err(error) = socket.call(&[cmd("PING")]).await else { return Ok(socket) };
        match socket.call(&[cmd("PING")]).await {
            Err(again) if again.is_io_error() => Err(socket.closing_reason().unwrap_or(error)),
            // An error of that command, such as LOADING.
            Ok(_) | Err(_) => Ok(socket),
        }
    }

    /// Connects for messages.
    pub(crate) async fn subscribe(&self, on_message: OnMessage) -> RedisResult<Subscriptions> {
        Ok(Subscriptions { socket: self.open(Some(on_message)).await?, untracked: None })
    }

    /// Connects, and logs in.
    pub(super) async fn open(&self, on_message: Option<OnMessage>) -> RedisResult<Socket> {
        let settings = self.info.redis_settings();
        let auth = match &self.login {
            Some(login) => {
                let failed = |error: LoginError| make_extension_error(LOGIN_FAILED.to_owned(), Some(error.to_string()));
                let Credentials { user, password } = login.get().await.map_err(failed)?;
                Some(cmd("AUTH").arg(user).arg(password).take())
            }
            None => settings.password().map(|password| cmd("AUTH").arg(settings.username()).arg(password).take()),
        };
        let socket = Socket::open(self.stream().await?, on_message);
        let select = (settings.db() != 0).then(|| cmd("SELECT").arg(settings.db()).take());
        let commands: Vec<_> = auth.into_iter().chain(select).collect();
        if !commands.is_empty() {
            socket.call(&commands).await?;
        }
        Ok(socket)
    }

    async fn stream(&self) -> io::Result<Box<dyn Stream>> {
        let (host, port) = match self.info.addr() {
            ConnectionAddr::Tcp(host, port) => (host.as_str(), *port),
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => return Ok(Box::new(tokio::net::UnixStream::connect(path).await?)),
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        stream::open(host, port, self.tls.as_ref()).await
    }
}

impl Connected {
    /// Sends a command.
    pub(crate) async fn call(&mut self, command: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Socket(socket) => socket.call(slice::from_ref(command)).await,
            Self::Pooled(connection) => command.query_async(connection).await,
        }
    }

    /// Sends commands together. An error is the reply to its command alone.
    pub(crate) async fn call_each(&mut self, commands: &[Cmd]) -> RedisResult<Vec<RedisResult<Value>>> {
        match self {
            Self::Socket(socket) => socket.call_each(commands).await,
            Self::Pooled(connection) => {
                let mut pipeline = pipe();
                for command in commands {
                    pipeline.add_command(command.clone());
                }
                pipeline.ignore_errors().query_async(connection).await
            }
        }
    }
}

impl Subscriptions {
    /// Has the server track what this connection reads, which is nothing, and tell it of each
    /// `FLUSHALL` and `FLUSHDB`. Before any subscription: RESP2 allows a client that has one no
    /// other command.
    pub(super) async fn track(&mut self) -> RedisResult<()> {
        let track = async {
            let id: i64 = from_redis_value(self.socket.call(&[cmd("CLIENT").arg("ID").take()]).await?)?;
            self.socket.call(&[cmd("CLIENT").arg("TRACKING").arg("ON").arg("REDIRECT").arg(id).take()]).await
        };
        match track.await {
            Err(error) if error.is_io_error() => return Err(error),
            tracked => self.untracked = tracked.err(),
        }
        Ok(())
    }

    pub(crate) async fn subscribe(&self, channels: &[String]) -> RedisResult<()> {
        self.socket.call(&for_each("SUBSCRIBE", channels)).await.map(drop)
    }

    pub(crate) async fn unsubscribe(&self, channels: &[String]) -> RedisResult<()> {
        self.socket.call(&for_each("UNSUBSCRIBE", channels)).await.map(drop)
    }

    pub(crate) async fn ping(&self) -> RedisResult<()> {
        self.socket.call(&[cmd("PING")]).await.map(drop)
    }

    /// Waits for the end of the connection.
    pub(crate) async fn ended(&self) {
        self.socket.ended().await;
    }
}

impl fmt::Display for Endpoint {
    /// The address, without user and password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape_control(&self.info.addr().to_string()))
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The addresses of servers, without users and passwords.
pub(super) fn list<'a>(endpoints: impl Iterator<Item = &'a Endpoint>) -> String {
    endpoints.map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A command for each channel: one of several channels has a reply for each, or one error.
fn for_each(command: &str, channels: &[String]) -> Vec<Cmd> {
    channels.iter().map(|channel| cmd(command).arg(channel).take()).collect()
}
