//! HTTP clients over real sockets that wait for their response, or disconnect at a given point.

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
};

use axum::{
    body::Bytes,
    http::{self, Response, header},
};
use h2::client as http2;
use http_body_util::{BodyExt, Empty};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    runtime::Handle,
    sync::Semaphore,
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::workload::{Disconnect, DisconnectKind, DisconnectPoint, Protocol, Workload};

/// The clients of a storm. Waiting clients share connections; a leaving client closes its own
/// connection or resets its stream.
#[derive(Debug)]
pub(crate) struct Clients {
    idle: Mutex<HashMap<SocketAddr, Vec<http1::SendRequest<Empty<Bytes>>>>>,
    shared: Mutex<HashMap<SocketAddr, Vec<Shared>>>,
    opening: Semaphore,
}

/// A request, and when its client disconnects.
#[derive(Clone, Debug)]
pub struct Request {
    /// The name of the request.
    pub name: String,
    /// The path and query.
    pub path: String,
    /// The protocol of its client.
    pub protocol: Protocol,
    /// When its client disconnects. `None`: after the response.
    pub disconnect: Option<Disconnect>,
}

/// The observation of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observed {
    /// A complete response.
    Response {
        /// The status.
        status: u16,
        /// `outcome` of its problem details.
        outcome: Option<String>,
        /// The last part of their `type`.
        kind: Option<String>,
    },
    /// The client left before the response.
    Left,
    /// The connection or the stream broke.
    Broken,
}

/// A shared HTTP/2 connection.
#[derive(Debug)]
struct Shared {
    requests: http2::SendRequest<Bytes>,
    connection: JoinHandle<()>,
}

/// A response whose body is not read yet.
struct PartialResponse {
    head: Response<()>,
    body: Body,
}

enum Body {
    Http1(Incoming),
    Http2(h2::RecvStream),
}

/// Why there is no response.
enum Failure {
    /// The server did not get the request: it can be sent again.
    NotSent,
    Broken,
}

/// Per instance; each has some hundred streams.
const CONNECTIONS: usize = 4;

/// A kept connection may be closed; a new one is not.
const TRIES: usize = 5;

// === impl Request ===

impl Request {
    /// A request of a waiting client.
    #[must_use]
    pub fn new(name: &str, path: &str) -> Self {
        Self { name: name.to_owned(), path: path.to_owned(), protocol: Protocol::Http1, disconnect: None }
    }

    /// A request of a leaving client.
    #[must_use]
    pub fn disconnecting(self, disconnect: Disconnect) -> Self {
        Self { disconnect: Some(disconnect), ..self }
    }

    fn to_http<B>(&self, to: SocketAddr, body: B) -> http::Request<B> {
        let request = http::Request::post(format!("http://{to}{}", self.path)).header(header::HOST, to.to_string());
        request.header("x-request", &self.name).body(body).expect("a request")
    }

    /// The bytes of a request with an unused body.
    fn in_bytes(&self, to: SocketAddr) -> String {
        let Self { path, name, .. } = self;
        format!("POST {path} HTTP/1.1\r\nhost: {to}\r\nx-request: {name}\r\ncontent-length: 40\r\n\r\n{:40}", "")
    }

    fn disconnects_in_body(&self) -> bool {
        self.disconnect.is_some_and(|disconnect| disconnect.point == DisconnectPoint::InBody)
    }

    /// Stops when the client disconnects.
    async fn until_leaving(&self, work: impl Future<Output = Result<Observed, Failure>>) -> Result<Observed, Failure> {
        match self.disconnect {
            Some(Disconnect { point: DisconnectPoint::After(limit), .. }) => {
                timeout(limit, work).await.unwrap_or(Ok(Observed::Left))
            }
            _ => work.await,
        }
    }
}

impl From<&Workload> for Request {
    fn from(workload: &Workload) -> Self {
        Self {
            name: workload.name(),
            path: workload.path(),
            protocol: workload.protocol,
            disconnect: workload.disconnect,
        }
    }
}

// === impl Clients ===

impl Clients {
    pub(crate) fn new() -> Self {
        Self { idle: Mutex::default(), shared: Mutex::default(), opening: Semaphore::new(1) }
    }

    pub(crate) async fn send(&self, to: SocketAddr, request: &Request) -> Observed {
        let observed = match (request.protocol, request.disconnect) {
            (Protocol::Http1, None) => self.send_on_kept_connection(to, request).await,
            (Protocol::Http1, Some(disconnect)) => send_and_disconnect_on_http1(to, request, disconnect).await,
            (Protocol::Http2, None | Some(Disconnect { kind: DisconnectKind::Reset, .. })) => {
                self.send_on_shared_connection(to, request).await
            }
            (Protocol::Http2, Some(disconnect)) => send_and_disconnect_on_http2(to, request, disconnect).await,
        };
        observed.unwrap_or(Observed::Broken)
    }

    async fn send_on_kept_connection(&self, to: SocketAddr, request: &Request) -> Result<Observed, Failure> {
        for _ in 0..TRIES {
            let kept = guarded(&self.idle).get_mut(&to).and_then(Vec::pop);
            let mut requests = match kept {
                Some(kept) => kept,
                None => {
                    let (requests, connection) = http1::handshake(TokioIo::new(connect(to).await?)).await?;
                    Handle::current().spawn(connection);
                    requests
                }
            };
            if requests.ready().await.is_err() {
                continue;
            }
            match send_on_http1(&mut requests, request.to_http(to, Empty::new())).await {
                Ok(answering) => {
                    let observed = answering.read(false).await?;
                    guarded(&self.idle).entry(to).or_default().push(requests);
                    return Ok(observed);
                }
                Err(Failure::NotSent) => {}
                Err(Failure::Broken) => break,
            }
        }
        Err(Failure::Broken)
    }

    async fn send_on_shared_connection(&self, to: SocketAddr, request: &Request) -> Result<Observed, Failure> {
        for _ in 0..TRIES {
            let mut requests = self.shared(to).await?;
            match request.until_leaving(exchange_on_http2(&mut requests, to, request)).await {
                Err(Failure::NotSent) => self.forget(to),
                other => return other,
            }
        }
        Err(Failure::Broken)
    }

    /// The next of the shared connections.
    async fn shared(&self, to: SocketAddr) -> Result<http2::SendRequest<Bytes>, Failure> {
        let open = || {
            let mut shared = guarded(&self.shared);
            let there = shared.entry(to).or_default();
            there.retain(|one| !one.connection.is_finished());
            if there.len() < CONNECTIONS {
                return None;
            }
            there.rotate_left(1);
            Some(there[0].requests.clone())
        };
        if let Some(requests) = open() {
            return Ok(requests);
        }
        let _turn = self.opening.acquire().await;
        if let Some(requests) = open() {
            return Ok(requests);
        }
        let (requests, connection) = http2::handshake(connect(to).await?).await?;
        let connection = Handle::current().spawn(async { drop(connection.await) });
        guarded(&self.shared).entry(to).or_default().push(Shared { requests: requests.clone(), connection });
        Ok(requests)
    }

    /// Drops the connections for new requests. Requests on them still complete.
    fn forget(&self, to: SocketAddr) {
        guarded(&self.shared).remove(&to);
    }
}

async fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// A connection that closes as configured when it is dropped.
async fn connect_to_disconnect(to: SocketAddr, disconnect: Disconnect) -> io::Result<TcpStream> {
    let stream = connect(to).await?;
    if disconnect.kind == DisconnectKind::Abort {
        stream.set_zero_linger()?;
    }
    Ok(stream)
}

/// On a connection of its own, which closes afterwards.
async fn send_and_disconnect_on_http1(
    to: SocketAddr,
    request: &Request,
    disconnect: Disconnect,
) -> Result<Observed, Failure> {
    let mut stream = connect_to_disconnect(to, disconnect).await?;
    if let DisconnectPoint::WhileSending { sent, after } = disconnect.point {
        let bytes = request.in_bytes(to);
        stream.write_all(&bytes.as_bytes()[..bytes.len() * sent / 100]).await?;
        sleep(after).await;
        return Ok(Observed::Left);
    }
    let (mut requests, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async {
        let answering = send_on_http1(&mut requests, request.to_http(to, Empty::new())).await?;
        answering.read(request.disconnects_in_body()).await
    };
    driving(connection, request.until_leaving(exchange)).await
}

/// On a connection of its own, which closes afterwards.
async fn send_and_disconnect_on_http2(
    to: SocketAddr,
    request: &Request,
    disconnect: Disconnect,
) -> Result<Observed, Failure> {
    let (mut requests, connection) = http2::handshake(connect_to_disconnect(to, disconnect).await?).await?;
    driving(connection, request.until_leaving(exchange_on_http2(&mut requests, to, request))).await
}

/// Polls the connection and the work, and drops both at the end.
async fn driving<T>(connection: impl Future, work: impl Future<Output = T>) -> T {
    let connection = async {
        drop(connection.await);
        std::future::pending::<Infallible>().await
    };
    tokio::select! {
        biased;
        done = work => done,
        never = connection => match never {},
    }
}

async fn send_on_http1(
    requests: &mut http1::SendRequest<Empty<Bytes>>,
    request: http::Request<Empty<Bytes>>,
) -> Result<PartialResponse, Failure> {
    match requests.try_send_request(request).await {
        Ok(answer) => {
            let (head, body) = answer.into_parts();
            Ok(PartialResponse { head: Response::from_parts(head, ()), body: Body::Http1(body) })
        }
        Err(mut error) => Err(if error.take_message().is_some() { Failure::NotSent } else { Failure::Broken }),
    }
}

/// Resets its stream when it is dropped early.
async fn exchange_on_http2(
    requests: &mut http2::SendRequest<Bytes>,
    to: SocketAddr,
    request: &Request,
) -> Result<Observed, Failure> {
    let ready = requests.clone().ready().await.map_err(|_| Failure::NotSent);
    let has_a_body = matches!(request.disconnect, Some(Disconnect { point: DisconnectPoint::WhileSending { .. }, .. }));
    let (answer, _body) = ready?.send_request(request.to_http(to, ()), !has_a_body).map_err(|_| Failure::NotSent)?;
    if let Some(Disconnect { point: DisconnectPoint::WhileSending { after, .. }, .. }) = request.disconnect {
        sleep(after).await;
        return Ok(Observed::Left);
    }
    let (head, body) = answer.await?.into_parts();
    let answering = PartialResponse { head: Response::from_parts(head, ()), body: Body::Http2(body) };
    answering.read(request.disconnects_in_body()).await
}

fn guarded<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl PartialResponse ===

impl PartialResponse {
    async fn read(mut self, disconnects_in_body: bool) -> Result<Observed, Failure> {
        let mut bytes = Vec::new();
        while let Some(frame) = self.body.frame().await {
            bytes.extend_from_slice(&frame?);
            if disconnects_in_body {
                return Ok(Observed::Left);
            }
        }
        let is_a_problem =
            self.head.headers().get(header::CONTENT_TYPE).is_some_and(|is| is == "application/problem+json");
        let field = |field| {
            let problem: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
            Some(problem.get(field)?.as_str()?.to_owned())
        };
        let (outcome, kind) = if is_a_problem { (field("outcome"), field("type")) } else { (None, None) };
        let kind = kind.and_then(|kind| Some(kind.split_once("/problem/#")?.1.to_owned()));
        Ok(Observed::Response { status: self.head.status().as_u16(), outcome, kind })
    }
}

impl Body {
    async fn frame(&mut self) -> Option<Result<Bytes, Failure>> {
        match self {
            Self::Http1(body) => {
                Some(body.frame().await?.map(|frame| frame.into_data().unwrap_or_default()).map_err(Failure::from))
            }
            Self::Http2(body) => {
                let data = body.data().await?.map_err(Failure::from);
                if let Ok(data) = &data {
                    let _ = body.flow_control().release_capacity(data.len());
                }
                Some(data)
            }
        }
    }
}

// === impl Failure ===

impl From<io::Error> for Failure {
    fn from(_: io::Error) -> Self {
        Self::Broken
    }
}

impl From<hyper::Error> for Failure {
    fn from(_: hyper::Error) -> Self {
        Self::Broken
    }
}

impl From<h2::Error> for Failure {
    fn from(_: h2::Error) -> Self {
        Self::Broken
    }
}
