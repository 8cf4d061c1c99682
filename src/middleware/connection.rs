//! Whether the client of a request is still connected.

use std::{fmt, sync::Arc};

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
#[derive(Clone)]
pub struct ClientConnection(Arc<dyn Fn() -> bool + Send + Sync>);

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

impl fmt::Debug for ClientConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientConnection").finish_non_exhaustive()
    }
}
