//! A connection to a server, for tests without one.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use deadpool_redis::redis::{Cmd, Value, cmd, parse_redis_value};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::super::frame::FrameLength;
use crate::sync::Mutex;

/// The bytes that the client can write before the server reads.
const ROOM: usize = 100;

/// Both ends. The server replies to `ECHO`, and with an error to another command.
#[derive(Clone, Default)]
pub(in crate::store::redis::topology::socket) struct Wire(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Written and not flushed, as TLS keeps what the socket does not accept.
    unflushed: Vec<u8>,
    to_server: Vec<u8>,
    unread: Vec<u8>,
    to_client: Vec<u8>,
    frame: FrameLength,
    is_closed: bool,
    refuses_writes: bool,
    client: Option<Waker>,
    server: Option<Waker>,
}

impl Wire {
    pub(in crate::store::redis::topology::socket) fn echo(text: &str) -> Cmd {
        let mut echo = cmd("ECHO");
        echo.arg(text);
        echo
    }

    /// Whether writes fail, as without memory in the kernel.
    pub(in crate::store::redis::topology::socket) fn refuse_writes(&self, refuses_writes: bool) {
        self.0.lock().refuses_writes = refuses_writes;
    }

    /// Reads and replies. Returns the number of replies.
    pub(in crate::store::redis::topology::socket) fn serve(&self) -> usize {
        let mut state = self.0.lock();
        let State { to_server, unread, to_client, frame, .. } = &mut *state;
        unread.append(to_server);
        let mut replies = 0;
        while let Some(length) = frame.of(unread).expect("short").filter(|_| !unread.is_empty()) {
            let call: Vec<u8> = unread.drain(..length).collect();
            let Ok(Value::Array(parts)) = parse_redis_value(&call) else { panic!("no command: {call:?}") };
            match &parts[..] {
                [Value::BulkString(_), Value::BulkString(text)] => {
                    to_client.extend(format!("${}\r\n", text.len()).bytes());
                    to_client.extend(text.iter().chain(b"\r\n"));
                }
                _ => to_client.extend(b"-ERR unknown command\r\n"),
            }
            replies += 1;
        }
        let client = state.client.take();
        drop(state);
        client.into_iter().for_each(Waker::wake);
        replies
    }

    pub(in crate::store::redis::topology::socket) fn reply(&self, bytes: &[u8]) {
        let mut state = self.0.lock();
        state.to_client.extend(bytes);
        let client = state.client.take();
        drop(state);
        client.into_iter().for_each(Waker::wake);
    }

    /// The server closes the connection.
    pub(in crate::store::redis::topology::socket) fn close(&self) {
        self.0.lock().is_closed = true;
        self.reply(b"");
    }

    /// Whether the client has closed the connection.
    pub(in crate::store::redis::topology::socket) fn is_dropped(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Waits until the client has written.
    #[cfg(tower_lock_shuttle)]
    pub(in crate::store::redis::topology::socket) fn poll_written(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        if state.to_server.is_empty() {
            state.server = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(())
    }
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut state = self.0.lock();
        if state.to_client.is_empty() && !state.is_closed {
            state.client = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let count = state.to_client.len().min(buffer.remaining());
        buffer.put_slice(&state.to_client[..count]);
        state.to_client.drain(..count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.0.lock();
        if state.is_closed || state.refuses_writes {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = bytes.len().min(ROOM - (state.unflushed.len() + state.to_server.len()).min(ROOM));
        if count == 0 {
            state.client = Some(cx.waker().clone());
            drop(state);
            let _ = self.poll_flush(cx);
            return Poll::Pending;
        }
        state.unflushed.extend(&bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.0.lock();
        let State { unflushed, to_server, server, .. } = &mut *state;
        to_server.append(unflushed);
        let server = server.take();
        drop(state);
        server.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
