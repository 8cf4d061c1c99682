//! Sockets that bound the length of a reply and keep an error that the server sends before it
//! closes.

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use deadpool_redis::redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ErrorKind, RedisError, RedisResult, Value,
    aio::{MultiplexedConnection, PubSub},
    cmd, make_extension_error,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    runtime::Handle,
    task::AbortHandle,
};

use crate::store::redis::wire::escape_control;
use crate::{
    limits::{MAX_RECORD_BODY_BYTES, MAX_RECORD_HEAD_BYTES},
    sync::Mutex,
};

/// The most bytes of one reply or one message. The longest expected one is a record. A faulty
/// server, or foreign data in a lock, must not exhaust the memory of this process.
pub(crate) const MAX_REPLY_BYTES: usize = 2 << 20;
const _: () = assert!(MAX_RECORD_HEAD_BYTES + MAX_RECORD_BODY_BYTES < MAX_REPLY_BYTES);

/// The most calls that wait for the socket; further calls wait for capacity.
const PIPELINE_CAPACITY: usize = 1024;

/// The address of a server, and how to connect to it.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    client: Arc<Client>,
    connect_timeout: Duration,
    call_timeout: Duration,
}

/// A connection and the task that drives it. The last handle aborts the task, which would otherwise
/// wait for replies for ever.
#[derive(Clone)]
pub(crate) struct Connected {
    pub(crate) connection: MultiplexedConnection,
    closing_error: ClosingError,
    _driver: Option<Arc<DriverTask>>,
}

struct DriverTask(AbortHandle);

trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Socket for S {}

/// A socket that bounds the length of each reply.
struct BoundedSocket {
    inner: Box<dyn Socket>,
    reply: ReplyLength,
    closing_error: ClosingError,
}

/// The first line of the server, if it is an error: the server may have closed the connection after
/// it, before any call.
#[derive(Clone, Default)]
struct ClosingError(Arc<Mutex<Vec<u8>>>);

impl Endpoint {
    pub(crate) fn new(client: Client, connect_timeout: Duration, call_timeout: Duration) -> Self {
        Self { client: Arc::new(client), connect_timeout, call_timeout }
    }

    /// Connects for calls.
    pub(crate) async fn connect(&self) -> RedisResult<Connected> {
        // The callers have timeouts of their own, for each call and for each connect.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(Some(2 * self.call_timeout))
            .set_pipeline_buffer_size(PIPELINE_CAPACITY);
        let Some((socket, closing_error)) = socket(&self.client).await? else {
            // The library does not expose its TLS stream: replies over TLS have no bound but
            // timeouts.
            let connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
            return Ok(Connected::from(connection));
        };
        let settings = self.client.get_connection_info().redis_settings();
        let made = MultiplexedConnection::new_with_config(settings, socket, config).await;
        let (connection, driver) = made.map_err(|error| closing_error.in_place_of(error))?;
        let driver = Handle::current().spawn(driver).abort_handle();
        Ok(Connected { connection, closing_error, _driver: Some(Arc::new(DriverTask(driver))) })
    }

    /// Connects for messages.
    pub(crate) async fn connect_pubsub(&self) -> RedisResult<PubSub> {
        let Some((socket, closing_error)) = socket(&self.client).await? else {
            return self.client.get_async_pubsub().await;
        };
        let settings = self.client.get_connection_info().redis_settings();
        PubSub::new(settings, socket).await.map_err(|error| closing_error.in_place_of(error))
    }
}

impl fmt::Display for Endpoint {
    /// The address, without user and password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escape_control(&self.client.get_connection_info().addr().to_string()))
    }
}

/// `None`: the address requires TLS.
async fn socket(client: &Client) -> RedisResult<Option<(BoundedSocket, ClosingError)>> {
    let inner: Box<dyn Socket> = match client.get_connection_info().addr() {
        ConnectionAddr::Tcp(host, port) => {
            let stream = TcpStream::connect((host.as_str(), *port)).await?;
            // Without Nagle's algorithm, a call does not wait for the reply to the previous one.
            stream.set_nodelay(true)?;
            Box::new(stream)
        }
        #[cfg(unix)]
        ConnectionAddr::Unix(path) => Box::new(tokio::net::UnixStream::connect(path).await?),
        _ => return Ok(None),
    };
    let closing_error = ClosingError::default();
    Ok(Some((
        BoundedSocket { inner, reply: ReplyLength::default(), closing_error: closing_error.clone() },
        closing_error,
    )))
}

impl Connected {
    /// Fails if the server has closed the connection, with its reason.
    pub(crate) async fn check(&self) -> RedisResult<()> {
        let ping = async || cmd("PING").query_async::<Value>(&mut self.connection.clone()).await;
        match ping().await {
            // The reply was the reason. Another error, such as LOADING, is one of that command.
            Err(error) if ping().await.is_err_and(|again| again.is_io_error()) => {
                Err(self.closing_error.in_place_of(error))
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }
}

impl From<MultiplexedConnection> for Connected {
    fn from(connection: MultiplexedConnection) -> Self {
        Self { connection, closing_error: ClosingError::default(), _driver: None }
    }
}

impl std::fmt::Debug for Connected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connected")
    }
}

impl Drop for DriverTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ClosingError {
    const MAX_BYTES: usize = 256;

    fn record(&self, bytes: &[u8]) {
        let mut line = self.0.lock();
        let begins = line.first().or(bytes.first());
        let ended = line.len() >= Self::MAX_BYTES || line.contains(&b'\n');
        if begins == Some(&b'-') && !ended {
            let capacity = Self::MAX_BYTES - line.len();
            line.extend(&bytes[..bytes.len().min(capacity)]);
        } else if line.is_empty() {
            // The first reply is not an error.
            line.push(b'\n');
        }
    }

    /// Replaces an I/O error by the error that the server sent before it closed the connection.
    /// Also that of `AUTH`, which is the same for each error that the server sends.
    fn in_place_of(&self, error: RedisError) -> RedisError {
        let line = self.0.lock();
        let text = String::from_utf8_lossy(&line);
        match text.lines().next().and_then(|line| line.strip_prefix('-')) {
            Some(message) if error.is_io_error() || error.kind() == ErrorKind::AuthenticationFailed => {
                let (code, detail) = message.split_once(' ').unwrap_or((message, ""));
                make_extension_error(escape_control(code), Some(escape_control(detail)))
            }
            _ => error,
        }
    }
}

impl AsyncRead for BoundedSocket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
        let read = &buf.filled()[before..];
        if this.closing_error.0.lock().last() != Some(&b'\n') {
            this.closing_error.record(read);
        }
        if this.reply.exceeds_limit(read) {
            let limit = format!("the server sent a reply of more than {} KiB", MAX_REPLY_BYTES >> 10);
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, limit)));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for BoundedSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};

        match ready!(Pin::new(&mut self.inner).poll_write(cx, buf)) {
            // The server has closed the connection and may have sent a reason, which can still be
            // read. Else the next read fails.
            Err(error) if matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset) => {
                Poll::Ready(Ok(buf.len()))
            }
            written => Poll::Ready(written),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// The length of one RESP reply so far, and its end. Data that is not RESP has no end, and exceeds
/// the limit.
#[derive(Debug)]
struct ReplyLength {
    bytes: usize,
    /// Values that follow.
    values_left: u64,
    /// Bytes of a text that follow, its line break included.
    text_left: u64,
    /// The header line of a value: its first byte, and its number.
    kind: u8,
    number: Option<u64>,
    is_negative: bool,
}

impl Default for ReplyLength {
    fn default() -> Self {
        Self { bytes: 0, values_left: 1, text_left: 0, kind: 0, number: Some(0), is_negative: false }
    }
}

impl ReplyLength {
    /// Adds bytes. Returns whether the reply exceeds the limit.
    fn exceeds_limit(&mut self, mut read: &[u8]) -> bool {
        while !read.is_empty() {
            if self.text_left > 0 {
                let part = read.len().min(usize::try_from(self.text_left).unwrap_or(usize::MAX));
                self.bytes += part;
                self.text_left -= part as u64;
                read = &read[part..];
                if self.text_left == 0 {
                    self.value_ended(0);
                }
            } else {
                self.bytes += 1;
                self.header_byte(read[0]);
                read = &read[1..];
            }
            // The header announces the length of a text: a long one exceeds the limit before it
            // arrives.
            if self.bytes > MAX_REPLY_BYTES || self.text_left > MAX_REPLY_BYTES as u64 {
                return true;
            }
        }
        false
    }

    fn header_byte(&mut self, byte: u8) {
        match byte {
            _ if self.kind == 0 => {
                (self.kind, self.number, self.is_negative) = (byte, Some(0), false);
            }
            b'\n' => {
                let number = if self.is_negative { None } else { self.number };
                match (std::mem::take(&mut self.kind), number) {
                    (b'$' | b'=' | b'!', Some(length)) => self.text_left = length.saturating_add(2),
                    (b'*' | b'~' | b'>', Some(values)) => self.value_ended(values),
                    // The value of an attribute follows its pairs.
                    (b'|', Some(pairs)) => self.value_ended(pairs.saturating_mul(2).saturating_add(1)),
                    (b'%', Some(pairs)) => self.value_ended(pairs.saturating_mul(2)),
                    _ => self.value_ended(0),
                }
            }
            b'-' => self.is_negative = true,
            b'0'..=b'9' => {
                let digit = u64::from(byte - b'0');
                self.number = self.number.map(|number| number.saturating_mul(10).saturating_add(digit));
            }
            b'\r' => {}
            // A text, or an invalid number.
            _ => self.number = None,
        }
    }

    /// One value has ended, or is an aggregate of `others`.
    fn value_ended(&mut self, others: u64) {
        self.values_left = self.values_left.saturating_sub(1).saturating_add(others);
        if self.values_left == 0 {
            *self = Self::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measure(replies: &[u8]) -> ReplyLength {
        let mut reply = ReplyLength::default();
        assert!(!reply.exceeds_limit(replies));
        reply
    }

    #[test]
    fn reply_size_is_counted_per_reply() {
        let text = "x".repeat(1000);
        let long = format!("${}\r\n{text}\r\n", text.len());
        for reply in [
            "+OK\r\n",
            "-ERR no 3\r\n",
            ":-1\r\n",
            "$-1\r\n",
            "*-1\r\n",
            "_\r\n",
            "$0\r\n\r\n",
            "*0\r\n",
            "*2\r\n:1\r\n*1\r\n$3\r\na\nb\r\n",
            "%1\r\n+a\r\n~2\r\n:1\r\n:2\r\n",
            "|1\r\n+a\r\n+b\r\n:7\r\n",
            ">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\n12\r\n",
            &long,
        ] {
            let many = reply.repeat(3_000_000 / reply.len());
            assert_eq!((measure(many.as_bytes()).bytes, measure(many.as_bytes()).values_left), (0, 1), "{reply:?}");
            // Byte by byte.
            let mut bytewise = ReplyLength::default();
            for byte in reply.repeat(3).bytes() {
                assert!(!bytewise.exceeds_limit(&[byte]));
            }
            assert_eq!((bytewise.bytes, bytewise.values_left), (0, 1), "{reply:?}");
        }
    }

    #[test]
    fn endless_reply_is_too_long() {
        let line = "x".repeat(MAX_REPLY_BYTES + 1);
        let nested = "*1\r\n".repeat(MAX_REPLY_BYTES / 4 + 1);
        let many = format!("*4000000\r\n{}", ":1\r\n".repeat(MAX_REPLY_BYTES / 4 + 1));
        for reply in [
            format!("+{line}"),
            line,
            nested,
            many,
            "$1073741824\r\n".to_owned(),
            "$99999999999999999999999\r\n".into(),
        ] {
            assert!(ReplyLength::default().exceeds_limit(reply.as_bytes()), "{}", &reply[..10]);
        }
    }
}
