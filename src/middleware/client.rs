//! The client of a request: whether it is still connected, and which one it is.

use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

use http::Extensions;

/// Probe that detects whether the client of a request is still connected.
///
/// A [`LockLayer`](crate::LockLayer) finds the probe in the extensions of the request and calls it
/// once, when the lock is granted. If the client has disconnected, the layer does not start the
/// handler.
///
/// A server that drops the request when its client disconnects needs no probe. Over HTTP/1.1 hyper
/// does not notice a disconnect while bytes of the connection are unread. A request that is
/// followed by one more byte therefore waits and runs although its socket is closed.
/// [`from_socket`](Self::from_socket) is a probe that sees the end of the connection behind unread
/// bytes. The server has to insert it, from a custom listener;
/// `tests/it/middleware/sockets/disconnect_probe.rs` has one for `axum::serve`.
///
/// A probe does not see a disconnect from a proxy, because the proxy keeps its own connection. It
/// does not see the end of a single stream of HTTP/2 either, but the server does. A client that
/// closes its half of the connection after the request counts as disconnected, as in hyper by
/// default.
///
/// Insert clones of one probe into all requests of a connection. Two probes are equal if they are
/// clones of each other: the handlers that finish after a disconnect are counted for each
/// connection, unless the request has a [`ClientKey`].
#[derive(Clone)]
pub struct ClientConnection(Arc<dyn Fn() -> bool + Send + Sync>);

/// The client of a request, as the service knows it: an account, a tenant, an API key.
///
/// A handler [finishes](crate::LockLayer::on_disconnect) after its client has disconnected, and the
/// number of such handlers is bounded. A layer finds this value in the extensions of the request,
/// and gives one client only a third of what its route has left. A client that resets many requests
/// then leaves capacity for the others. The keys that waiting requests of
/// [`key::all`](crate::key::all) hold are bounded in the same way. Without a key, requests are
/// counted by their [`ClientConnection`]; without both, by their route alone.
///
/// Do not use an address: behind a proxy all clients have the same one.
///
/// ```
/// # use axum::{extract::Request, middleware::Next, response::Response};
/// # use tower_lock::middleware::ClientKey;
/// # #[derive(Clone)] struct User { id: u64 }
/// // A middleware of Axum, between the authentication and the lock layer.
/// async fn set_client(mut request: Request, next: Next) -> Response {
///     if let Some(user) = request.extensions().get::<User>() {
///         let client = ClientKey::new(user.id.to_string());
///         request.extensions_mut().insert(client);
///     }
///     next.run(request).await
/// }
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ClientKey(Arc<str>);

/// The client that a share is counted for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum ClientId {
    Key(ClientKey),
    Connection(ClientConnection),
}

impl ClientKey {
    /// Creates the key of a client from its name.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }
}

impl ClientId {
    pub(super) fn of(extensions: &Extensions) -> Option<Self> {
        let key = extensions.get().cloned().map(Self::Key);
        key.or_else(|| extensions.get().cloned().map(Self::Connection))
    }
}

impl ClientConnection {
    /// Creates a probe from a function that returns whether the client has disconnected.
    ///
    /// The function must not block.
    pub fn new(is_closed: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(is_closed))
    }

    /// Creates a probe from a socket. The client has disconnected once its peer has closed the
    /// socket, or once the `Arc` was dropped. Linux and Android only.
    ///
    /// The probe does not keep the socket open. Pass a value that the server drops with the
    /// connection, for example a duplicate of the descriptor that is stored beside the stream.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub fn from_socket<S: std::os::fd::AsFd + Send + Sync + 'static>(socket: &Arc<S>) -> Self {
        let socket = Arc::downgrade(socket);
        Self::new(move || socket.upgrade().is_none_or(|socket| is_hung_up(&*socket)))
    }

    pub(super) fn is_closed(&self) -> bool {
        (self.0)()
    }
}

/// Whether the peer has shut its half of the connection down, also if bytes are left to read. Does
/// not block.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn is_hung_up(socket: &impl std::os::fd::AsFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    // An unknown state does not reject the request.
    poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents().intersects(closed)
}

impl PartialEq for ClientConnection {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ClientConnection {}

impl Hash for ClientConnection {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).cast::<()>().hash(state);
    }
}

impl fmt::Debug for ClientKey {
    /// Without the name, which may be personal data.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientKey").finish_non_exhaustive()
    }
}

impl fmt::Debug for ClientConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientConnection").finish_non_exhaustive()
    }
}
