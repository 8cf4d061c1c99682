//! Whether the client of a request is there still, where the server can tell.

use std::{fmt, sync::Arc};

/// Tells whether the connection of a request is closed. In the extensions of the request, a [`LockLayer`](crate::LockLayer) asks it once, when the lock
/// is granted: a handler is not started for a client that has gone.
///
/// A server drops a request whose client leaves, and that is enough where it notices. Over HTTP/1.1 hyper does not while bytes of the connection
/// are left to be read: a request and one byte more, and the request waits and runs for nobody, without an open socket on the other side. A probe
/// sees the end of the connection behind these bytes. One for sockets is [`of_socket`](Self::of_socket); the server has to hand
/// the socket to it, from a listener of your own (`tests/it/sockets/disconnect_probe.rs` has one for `axum::serve`).
///
/// It cannot tell of a client behind a proxy, which keeps its own connection, nor of one stream of HTTP/2, of which the server hears by itself. A client
/// that closes its half of the connection after the request is taken for one that has gone, as hyper takes it by default.
#[derive(Clone)]
pub struct ClientConnection(Arc<dyn Fn() -> bool + Send + Sync>);

impl ClientConnection {
    /// By a probe of your own. It must answer at once.
    pub fn new(is_closed: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(is_closed))
    }

    /// By the state of its socket: the other side has closed it, or it is gone here.
    ///
    /// It keeps no socket open: hand it what the server drops with the connection, a duplicate of the descriptor beside the stream for one.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub fn of_socket<S: std::os::fd::AsFd + Send + Sync + 'static>(socket: &Arc<S>) -> Self {
        let socket = Arc::downgrade(socket);
        Self::new(move || socket.upgrade().is_none_or(|socket| has_hung_up(&*socket)))
    }

    pub(super) fn is_closed(&self) -> bool {
        (self.0)()
    }
}

/// The other side sends nothing more, whatever is left to be read. Never waits.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn has_hung_up(socket: &impl std::os::fd::AsFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut asked = [PollFd::new(socket, PollFlags::RDHUP)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    // What cannot be told is no reason to turn anybody away.
    poll(&mut asked, Some(&at_once)).is_ok() && asked[0].revents().intersects(gone)
}

impl fmt::Debug for ClientConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientConnection").finish_non_exhaustive()
    }
}
