//! Whether the client of a request is still connected.

use std::{fmt, sync::Arc};

/// A probe for the connection of a request.
/// A [`LockLayer`](crate::LockLayer) finds it in the extensions of the request and calls it once,
/// when the lock is granted. It does not start a handler whose client has disconnected.
///
/// Most servers drop the request when its client disconnects, and need no probe. Over HTTP/1.1,
/// however, hyper does not notice a disconnect while unread bytes are left: a request that is
/// followed by one more byte waits and runs although its socket is closed. A probe sees the end of
/// the connection behind these bytes. [`from_socket`](Self::from_socket) is a probe for sockets.
/// The server has to insert it, from a custom listener; `tests/it/sockets/disconnect_probe.rs` has
/// one for `axum::serve`.
///
/// A probe cannot see clients behind a proxy, which keeps its own connection, nor single streams of
/// HTTP/2, whose end the server notices itself. A client that closes its half of the connection
/// after the request counts as disconnected, as it does in hyper by default.
#[derive(Clone)]
pub struct ClientConnection(Arc<dyn Fn() -> bool + Send + Sync>);

impl ClientConnection {
    /// Creates a probe from a function. It must not block.
    pub fn new(is_closed: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(is_closed))
    }

    /// Creates a probe from a socket: disconnected once the peer has closed it, or once it was
    /// dropped.
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
