//! The session of a process, on a connection that is replaced when it breaks.
//!
//! All entries of the process belong to the session, and end with it. A connection is a queue: the
//! servers execute requests in the order in which they are sent, and the next connection of the
//! session begins after the last request of the one before. So no request is executed later than
//! one that was sent after it.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    runtime::Handle,
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until, timeout},
};

use super::{
    error::CallError,
    wire::{self, Frame, MAX_FRAME, Request},
};
use crate::{
    store::{
        line::{OnEvent, SessionEvent},
        remote::{
            credentials::{Credentials, Login},
            link::{Connect, LinkError},
            stream::{self, Stream, Tls},
        },
    },
    sync::Mutex,
};

/// Connects to one of the servers, in turns, and continues the session there.
pub(super) struct Connector {
    this: Weak<Self>,
    servers: Vec<(String, u16)>,
    next: AtomicUsize,
    tls: Option<Tls>,
    /// The time of the session that is asked for.
    wanted: Duration,
    login: Option<Login>,
    session: Mutex<Session>,
    pub(super) on_event: OnceLock<OnEvent>,
}

/// A session.
#[derive(Default)]
struct Session {
    /// Zero: there is none.
    id: i64,
    password: Vec<u8>,
    last_zxid: i64,
    time: Duration,
    /// The last reply.
    heard_at: Option<Instant>,
}

/// Requests that are sent together, and their replies.
pub(super) struct Flight {
    requests: Vec<Request>,
    replies: oneshot::Sender<Replies>,
}

/// The body of a reply, or the error of the server.
pub(super) type Reply = Result<Vec<u8>, i32>;
pub(super) type Replies = Vec<Reply>;

/// A flight without all of its replies.
struct Pending {
    /// The number of its next reply.
    next: i32,
    count: usize,
    replies: Replies,
    reply: oneshot::Sender<Replies>,
}

/// Flights that wait for the connection.
const MAX_WAITING: usize = 1_024;
/// The longest time between two pings.
const MAX_PING: Duration = Duration::from_secs(2);

impl Connector {
    pub(super) fn new(
        servers: Vec<(String, u16)>,
        wanted: Duration,
        tls: Option<Tls>,
        login: Option<Login>,
    ) -> Arc<Self> {
        let next = AtomicUsize::new(fastrand::usize(..servers.len().max(1)));
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            servers,
            next,
            wanted,
            tls,
            login,
            session: Mutex::default(),
            on_event: OnceLock::new(),
        })
    }

    /// The number of the session, and its time.
    pub(super) fn session(&self) -> (i64, Duration) {
        let session = self.session.lock();
        (session.id, session.time)
    }

    pub(super) fn is_private(&self) -> bool {
        self.login.is_some()
    }

    fn event(&self, event: SessionEvent) {
        if let Some(on_event) = self.on_event.get() {
            on_event(event);
        }
    }

    async fn handshake(&self, stream: &mut dyn Stream) -> Result<Duration, CallError> {
        let mut out = Vec::new();
        // Servers that have lost all data refuse a client that has seen later ones.
        let is_over = |session: &Session| session.heard_at.is_some_and(|heard_at| heard_at.elapsed() > session.time);
        if is_over(&self.session.lock()) {
            self.end();
        }
        {
            let session = self.session.lock();
            let wanted = i32::try_from(self.wanted.as_millis()).unwrap_or(i32::MAX);
            wire::handshake(&mut out, session.last_zxid, wanted, session.id, &session.password);
        }
        stream.write_all(&out).await?;
        stream.flush().await?;
        let length = usize::try_from(stream.read_i32().await?).ok().filter(|length| *length <= 1_024);
        let mut frame = vec![0; length.ok_or(CallError::Protocol)?];
        stream.read_exact(&mut frame).await?;
        let connected = wire::connected(&frame).ok_or(CallError::Protocol)?;
        if connected.session == 0 {
            self.end();
            // The next connect begins another one.
            return Err(CallError::SessionEnded);
        }
        let time = Duration::from_millis(connected.timeout_ms.into());
        if time < self.wanted {
            // It would end before the leases that were granted on the one before.
            self.end();
            return Err(CallError::ShortSession { granted: time, wanted: self.wanted });
        }
        let mut session = self.session.lock();
        (session.id, session.password, session.time) = (connected.session, connected.password, time);
        session.heard_at = Some(Instant::now());
        Ok(time)
    }

    fn end(&self) {
        *self.session.lock() = Session::default();
        self.event(SessionEvent::Ended);
    }

    /// Exchanges frames until the connection breaks, or the session is closed.
    async fn serve(
        &self,
        mut stream: Box<dyn Stream>,
        mut flights: mpsc::Receiver<Flight>,
        time: Duration,
        mut out: Vec<u8>,
    ) -> io::Result<()> {
        let ping = (time / 6).min(MAX_PING);
        let (mut number, mut heard_at, mut next_ping) = (0_i32, Instant::now(), Instant::now() + ping);
        let (mut input, mut pending) = (BytesMut::new(), VecDeque::<Pending>::new());
        loop {
            if !out.is_empty() {
                let write = async {
                    stream.write_all(&out).await?;
                    stream.flush().await
                };
                timeout(2 * ping, write).await.map_err(|_| io::ErrorKind::TimedOut)??;
                out.clear();
            }
            tokio::select! {
                flight = flights.recv() => {
                    // The store has another connection, or is gone.
                    let Some(flight) = flight else { return Ok(()) };
                    let others = std::iter::from_fn(|| flights.try_recv().ok());
                    for Flight { requests, replies } in std::iter::once(flight).chain(others) {
                        let next = number.checked_add(1).ok_or(io::ErrorKind::InvalidData)?;
                        for request in &requests {
                            number = number.checked_add(1).ok_or(io::ErrorKind::InvalidData)?;
                            request.write(number, &mut out);
                        }
                        pending.push_back(Pending { next, count: requests.len(), replies: Vec::new(), reply: replies });
                    }
                }
                read = stream.read_buf(&mut input) => {
                    if read? == 0 {
                        return Ok(());
                    }
                    heard_at = Instant::now();
                    self.receive(&mut input, &mut pending).ok_or(io::ErrorKind::InvalidData)?;
                }
                () = sleep_until(next_ping) => {
                    next_ping = Instant::now() + ping;
                    if heard_at.elapsed() > 2 * ping {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    wire::ping(&mut out);
                }
            }
        }
    }

    /// Takes the complete frames. `None`: one of them is not of ZooKeeper, or out of order.
    fn receive(&self, input: &mut BytesMut, pending: &mut VecDeque<Pending>) -> Option<()> {
        while let Some(length) = input.first_chunk().map(|length| u32::from_be_bytes(*length)) {
            let length = usize::try_from(length).ok().filter(|length| *length <= MAX_FRAME)?;
            if input.len() < 4 + length {
                break;
            }
            input.advance(4);
            let frame = input.split_to(length);
            match wire::parse(&frame)? {
                Frame::Pong => {}
                Frame::Event { path } => self.event(SessionEvent::Gone { node: path.to_owned() }),
                Frame::Reply { number, error, .. } if wire::is_of_login(number) => (error == 0).then_some(())?,
                Frame::Reply { number, zxid, error, body } => {
                    let mut session = self.session.lock();
                    session.last_zxid = session.last_zxid.max(zxid);
                    session.heard_at = Some(Instant::now());
                    drop(session);
                    let flight = pending.front_mut().filter(|flight| flight.next == number)?;
                    flight.next += 1;
                    flight.replies.push(if error == 0 { Ok(body.to_vec()) } else { Err(error) });
                    if flight.replies.len() == flight.count {
                        let Pending { replies, reply, .. } = pending.pop_front()?;
                        // The caller may have given up.
                        let _ = reply.send(replies);
                    }
                }
            }
        }
        Some(())
    }
}

impl Connect for Connector {
    type Connection = mpsc::Sender<Flight>;
    type Error = CallError;

    async fn connect(&self, _: &OnceLock<Arc<str>>) -> Result<mpsc::Sender<Flight>, CallError> {
        let (host, port) = &self.servers[self.next.fetch_add(1, Relaxed) % self.servers.len()];
        let mut stream = stream::open(host, *port, self.tls.as_ref()).await?;
        let time = self.handshake(&mut *stream).await?;
        // Watches are of a connection.
        self.event(SessionEvent::Connected);
        let (sender, flights) = mpsc::channel(MAX_WAITING);
        let (this, mut out) = (self.this.upgrade().ok_or(CallError::Closed)?, Vec::new());
        if let Some(login) = &self.login {
            let Credentials { user, password } = login.get().await?;
            wire::login(&mut out, &user, &password);
        }
        Handle::current().spawn(async move { this.serve(stream, flights, time, out).await });
        Ok(sender)
    }

    fn failed(&self, error: Option<CallError>, _: Option<&Arc<str>>) -> CallError {
        error.unwrap_or(LinkError::ConnectTimeout.into())
    }
}

/// Sends requests together, and waits for their replies. `unsent` has them if the connection has
/// ended before.
pub(super) async fn send(
    connection: mpsc::Sender<Flight>,
    unsent: &mut Option<Vec<Request>>,
) -> Result<Replies, CallError> {
    let (replies, received) = oneshot::channel();
    let flight = Flight { requests: unsent.take().unwrap_or_default(), replies };
    if let Err(mpsc::error::SendError(flight)) = connection.send(flight).await {
        *unsent = Some(flight.requests);
        return Err(CallError::Closed);
    }
    received.await.map_err(|_| CallError::Broken)
}

/// Ends the session. Without room in the queue the session ends by itself.
pub(super) fn close(connection: &mpsc::Sender<Flight>) {
    let (replies, _) = oneshot::channel();
    let _ = connection.try_send(Flight { requests: vec![Request::close()], replies });
}
