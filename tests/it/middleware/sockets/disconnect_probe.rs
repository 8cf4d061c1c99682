//! Disconnects that the server does not notice: a request over HTTP/1.1 and one byte more, then a
//! closed socket.

use std::{
    io,
    net::SocketAddr,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Extension, Router,
    body::Body,
    extract::{ConnectInfo, Request, connect_info::Connected},
    middleware::{Next, from_fn},
    routing::get,
    serve::{IncomingStream, Listener},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
};
use tower_lock::{HasLockKey, LockKey, LockLayer, LockManagerLayer, Locked, Rejection, middleware::ClientConnection};
use tower_lock_testkit::{
    app::send,
    http::Http1,
    locks::{one_key, store_and_locks},
    wait::{soon, until},
};

/// A listener whose connections can be checked for a disconnect.
struct ProbedListener(TcpListener);

/// A connection with a duplicated descriptor; both are closed when the server drops it.
struct ProbedIo {
    stream: TcpStream,
    socket: Arc<OwnedFd>,
}

#[derive(Clone)]
struct Peer(ClientConnection);

impl Listener for ProbedListener {
    type Io = ProbedIo;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (ProbedIo, SocketAddr) {
        loop {
            let (stream, address) = Listener::accept(&mut self.0).await;
            if let Ok(socket) = stream.as_fd().try_clone_to_owned() {
                return (ProbedIo { stream, socket: Arc::new(socket) }, address);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl Connected<IncomingStream<'_, ProbedListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, ProbedListener>) -> Self {
        Self(ClientConnection::from_socket(&stream.io().socket))
    }
}

impl AsyncRead for ProbedIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for ProbedIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[derive(Clone)]
struct One;

impl HasLockKey for One {
    fn lock_key(&self) -> impl Into<LockKey> {
        ("k",)
    }
}

/// Guarantee: G7.
#[tokio::test]
async fn handler_does_not_start_after_a_closed_connection() {
    const DISCONNECTED: usize = 20;
    for (is_watched, is_extracted) in [(false, false), (true, false), (true, true)] {
        let (store, locks) = store_and_locks();
        let ran = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&ran);
        let run = async move || {
            counts.fetch_add(1, SeqCst);
            "ran"
        };
        // Nothing has run for the disconnected clients, so none of them blocks the key.
        let (wait, hour) = (Duration::from_secs(60), Duration::from_secs(3600));
        let routes = if is_extracted {
            let route = Router::new().route("/", get(async move |_: Locked<Extension<One>>| run().await));
            route.layer(LockManagerLayer::new(&locks).wait(wait).lock_delay(hour)).layer(Extension(One))
        } else {
            Router::new()
                .route("/", get(run).route_layer(LockLayer::new(&locks, one_key()).wait(wait).lock_delay(hour)))
        };
        let tells = from_fn(move |ConnectInfo(Peer(client)): ConnectInfo<Peer>, mut request: Request, next: Next| {
            if is_watched {
                request.extensions_mut().insert(client);
            }
            next.run(request)
        });
        let app = routes.layer(tells);
        let listener = ProbedListener(TcpListener::bind("127.0.0.1:0").await.expect("a free port"));
        let address = Listener::local_addr(&listener).expect("bound");
        tokio::spawn(async move { axum::serve(listener, app.into_make_service_with_connect_info::<Peer>()).await });

        let held = locks.try_lock(("k",)).await.expect("free");
        let mut ghosts = Vec::new();
        for _ in 0..DISCONNECTED {
            let mut wire = Http1::connect(address).await;
            wire.write("GET / HTTP/1.1\r\nhost: x\r\n\r\nG").await;
            ghosts.push(wire);
        }
        until("all clients wait", async || locks.size().1 == DISCONNECTED).await;
        drop(ghosts);
        let mut honest = Http1::connect(address).await;
        honest.write("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
        until("and one connected client", async || locks.size().1 == DISCONNECTED + 1).await;
        held.release().await.expect("the store is up");
        assert_eq!(soon("a grant", honest.reply(false)).await.status, 200);
        // Without a probe their handlers run.
        assert_eq!(ran.load(SeqCst), if is_watched { 1 } else { DISCONNECTED + 1 });
        until("no request is left", async || store.held_count() == 0 && locks.size() == (0, 0)).await;
    }
}

/// A custom probe is respected, and a socket that the server has dropped is closed.
#[tokio::test]
async fn custom_disconnect_probe_is_respected() {
    let (store, locks) = store_and_locks();
    let ran = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&ran);
    let handler = get(async move || counts.fetch_add(1, SeqCst).to_string());
    let app = Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key())));
    let [(open, _client), (left, client), (dropped, _other)] =
        [(); 3].map(|()| UnixStream::pair().expect("sockets")).map(|(ours, theirs)| (Arc::new(ours), theirs));
    drop(client);
    let of_dropped = ClientConnection::from_socket(&dropped);
    drop(dropped);
    for (what, client, has_gone) in [
        ("open", ClientConnection::from_socket(&open), false),
        ("closed by its client", ClientConnection::from_socket(&left), true),
        ("dropped by its server", of_dropped, true),
        ("custom", ClientConnection::new(|| true), true),
        ("custom", ClientConnection::new(|| false), false),
    ] {
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(client);
        let response = send(&app, request).await;
        let rejection =
            response.extensions().get::<Rejection>().map(|rejection| (rejection.code(), rejection.outcome()));
        let (status, said) = if has_gone { (408, Some(("disconnected", "not-started"))) } else { (200, None) };
        assert_eq!((response.status().as_u16(), rejection), (status, said), "{what}");
        assert!(!response.headers().contains_key("retry-after"), "{what}");
    }
    assert_eq!((ran.load(SeqCst), store.held_count()), (2, 0));
}
