//! Clients that see every byte of HTTP/1.1 and every frame of HTTP/2, and so know when a response
//! has ended.

use std::net::SocketAddr;

use axum::http::{HeaderMap, Request, Response};
use bytes::Bytes;
use h2::{
    RecvStream,
    client::{ResponseFuture, SendRequest},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    sync::watch,
    task::AbortHandle,
};

use crate::wait::soon;

/// One HTTP/1.1 connection.
#[derive(Debug)]
pub struct Http1 {
    stream: TcpStream,
    read: Vec<u8>,
}

/// A version of HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2 without negotiation.
    Http2,
}

/// A client of one instance, with a kept connection.
#[derive(Debug)]
pub struct Client {
    address: SocketAddr,
    version: Version,
    connection: Option<Connection>,
}

#[derive(Debug)]
enum Connection {
    Http1(Http1),
    Http2(Http2),
}

/// A response as received; header names in lower case.
#[derive(Debug)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// The header section, in HTTP/1.1 with the status line.
    pub head: String,
    /// With the chunk sizes, if it was chunked.
    pub body: Vec<u8>,
    /// Bytes of the body alone.
    pub len: usize,
    /// Whether trailers followed the body.
    pub has_trailers: bool,
}

/// The connection or the stream ended before the response did.
#[derive(Debug)]
pub struct Cut;

/// One HTTP/2 connection.
#[derive(Debug)]
pub struct Http2 {
    send: SendRequest<Bytes>,
    address: SocketAddr,
    window: watch::Sender<u32>,
    driver: AbortHandle,
}

/// A chunked body, to its end.
struct Chunks {
    raw: usize,
    data: usize,
    has_trailers: bool,
}

// === impl Client ===

impl Client {
    /// Connects with its first request.
    pub fn new(address: SocketAddr, version: Version) -> Self {
        Self { address, version, connection: None }
    }

    /// Sends a request and reads the response to its end.
    pub async fn request(&mut self, method: &str, path: &str) -> Result<Reply, Cut> {
        let connection = match (&mut self.connection, self.version) {
            (Some(connection), _) => connection,
            (none, Version::Http1) => none.insert(Connection::Http1(Http1::connect(self.address).await)),
            (none, Version::Http2) => none.insert(Connection::Http2(Http2::connect(self.address).await)),
        };
        let response = match connection {
            Connection::Http1(wire) => {
                wire.write(format!("{method} {path} HTTP/1.1\r\nhost: x\r\nte: trailers\r\n\r\n")).await;
                wire.response(method == "HEAD").await
            }
            Connection::Http2(http2) => http2.response(method, path).await,
        };
        // In HTTP/2 only the stream has ended.
        if response.is_err() && self.version == Version::Http1 {
            self.connection = None;
        }
        response
    }
}

// === impl Http1 ===

impl Http1 {
    /// Connects to a server.
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.expect("a server");
        stream.set_nodelay(true).expect("a socket");
        Self { stream, read: Vec::new() }
    }

    /// Connects with a small socket buffer.
    pub async fn narrow(address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(4096).expect("a socket");
        let stream = socket.connect(address).await.expect("a server");
        Self { stream, read: Vec::new() }
    }

    /// Sends bytes.
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.expect("an open connection");
    }

    /// Reads to the end of a head; the bytes after it stay.
    pub async fn head(&mut self) -> (u16, String) {
        self.try_head().await.expect("closed before a head")
    }

    /// Reads one response to the byte that completes it.
    pub async fn reply(&mut self, to_head: bool) -> Reply {
        self.response(to_head).await.expect("closed within a response")
    }

    /// Reads one response to the byte that completes it, or to the end of the connection.
    pub async fn response(&mut self, to_head: bool) -> Result<Reply, Cut> {
        let (status, head) = self.try_head().await?;
        let length = head.split("content-length:").nth(1).and_then(|rest| rest.lines().next()?.trim().parse().ok());
        let (mut raw, mut len, mut has_trailers) = (0, 0, false);
        if to_head || matches!(status, 100..=199 | 204 | 304) {
        } else if head.contains("transfer-encoding: chunked") {
            let chunks = loop {
                if let Some(chunks) = Chunks::of(&self.read) {
                    break chunks;
                }
                self.more().await?;
            };
            (raw, len, has_trailers) = (chunks.raw, chunks.data, chunks.has_trailers);
        } else if let Some(length) = length {
            while self.read.len() < length {
                self.more().await?;
            }
            (raw, len) = (length, length);
        } else {
            while self.more().await.is_ok() {}
            (raw, len) = (self.read.len(), self.read.len());
        }
        Ok(Reply { status, head, body: self.read.drain(..raw).collect(), len, has_trailers })
    }

    /// Raw bytes after a head.
    pub async fn bytes(&mut self, n: usize) -> Vec<u8> {
        while self.read.len() < n {
            self.more().await.expect("closed before as many bytes");
        }
        self.read.drain(..n).collect()
    }

    /// All bytes to the end of the connection.
    pub async fn rest(mut self) -> Vec<u8> {
        while self.more().await.is_ok() {}
        self.read
    }

    async fn try_head(&mut self) -> Result<(u16, String), Cut> {
        let end = loop {
            if let Some(at) = self.read.windows(4).position(|w| w == b"\r\n\r\n") {
                break at;
            }
            self.more().await?;
        };
        let head = String::from_utf8_lossy(&self.read[..end]).to_lowercase();
        self.read.drain(..end + 4);
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line");
        Ok((status, head))
    }

    async fn more(&mut self) -> Result<(), Cut> {
        // A reset ends it as well.
        let read = soon("more bytes", self.stream.read_buf(&mut self.read)).await.unwrap_or(0);
        if read > 0 { Ok(()) } else { Err(Cut) }
    }
}

// === impl Chunks ===

impl Chunks {
    /// `None`: it is incomplete.
    fn of(bytes: &[u8]) -> Option<Self> {
        let line = |from: usize| {
            let end = from + bytes.get(from..)?.windows(2).position(|w| w == b"\r\n")?;
            Some((&bytes[from..end], end + 2))
        };
        let (mut at, mut data) = (0, 0);
        loop {
            let (size, behind) = line(at)?;
            let size = std::str::from_utf8(size).ok().and_then(|size| usize::from_str_radix(size, 16).ok());
            let size = size.expect("the size of a chunk");
            if size == 0 {
                let (mut end, mut has_trailers) = (behind, false);
                loop {
                    let (trailer, behind) = line(end)?;
                    end = behind;
                    if trailer.is_empty() {
                        return Some(Self { raw: end, data, has_trailers });
                    }
                    has_trailers = true;
                }
            }
            data += size;
            at = behind + size + 2;
        }
    }
}

// === impl Http2 ===

impl Http2 {
    /// Connects with a window that no test fills.
    pub async fn connect(address: SocketAddr) -> Self {
        Self::with_window(address, 1 << 20).await
    }

    /// Connects with this window per response.
    pub async fn with_window(address: SocketAddr, window: u32) -> Self {
        let stream = TcpStream::connect(address).await.expect("a server");
        stream.set_nodelay(true).expect("a socket");
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(window).initial_connection_window_size(1 << 20).enable_push(false);
        let (send, mut connection) = builder.handshake(stream).await.expect("HTTP/2");
        let (window, mut wanted) = watch::channel(window);
        let driver = tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = &mut connection => return,
                    changed = wanted.changed() => {
                        if changed.is_err() {
                            return;
                        }
                        let window = *wanted.borrow_and_update();
                        connection.set_initial_window_size(window).expect("an open connection");
                    }
                }
            }
        })
        .abort_handle();
        Self { send, address, window, driver }
    }

    /// Increases the window of each response, including those in flight.
    pub fn open_window(&self, window: u32) {
        self.window.send_replace(window);
    }

    /// Sends a request without a body. Dropping the response sends `RST_STREAM`.
    pub async fn send(&mut self, method: &str, path: &str) -> ResponseFuture {
        let uri = format!("http://{}{path}", self.address);
        let request = Request::builder().method(method).uri(uri).header("te", "trailers").body(());
        self.request(request.expect("a request"), true).await.0
    }

    /// Sends the head of a request. The stream takes its body, if it `ends` not.
    pub async fn request(&mut self, request: Request<()>, ends: bool) -> (ResponseFuture, h2::SendStream<Bytes>) {
        self.send = soon("capacity for a stream", self.send.clone().ready()).await.expect("an open connection");
        self.send.send_request(request, ends).expect("an open connection")
    }

    /// Reads one response to `END_STREAM` or `RST_STREAM`.
    pub async fn response(&mut self, method: &str, path: &str) -> Result<Reply, Cut> {
        let response = self.send(method, path).await;
        read(soon("a head", response).await.map_err(|_| Cut)?).await
    }
}

/// Reads a body to `END_STREAM` or `RST_STREAM`.
pub async fn read(response: Response<RecvStream>) -> Result<Reply, Cut> {
    let (head, mut incoming) = response.into_parts();
    let mut body = Vec::new();
    while let Some(data) = soon("more data", incoming.data()).await {
        let data = data.map_err(|_| Cut)?;
        let _ = incoming.flow_control().release_capacity(data.len());
        body.extend_from_slice(&data);
    }
    let trailers: Option<HeaderMap> = soon("trailers", incoming.trailers()).await.map_err(|_| Cut)?;
    let text = |(name, value): (&_, &axum::http::HeaderValue)| format!("{name}: {}\r\n", value.to_str().expect("text"));
    Ok(Reply {
        status: head.status.as_u16(),
        head: head.headers.iter().map(text).collect(),
        len: body.len(),
        body,
        has_trailers: trailers.is_some(),
    })
}

impl Drop for Http2 {
    fn drop(&mut self) {
        self.driver.abort();
    }
}
