//! A socket of a server: calls go out, replies and messages come in.
//!
//! A call is written where it is polled, so a lone call passes no other task on its way out. One
//! task reads. A reply wakes its caller and nothing else: both run on the same worker.

pub(crate) mod frame;
#[cfg(all(test, tower_lock_shuttle))]
mod shuttle_tests;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    error::Error,
    future::poll_fn,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use deadpool_redis::redis::{Cmd, RedisError, RedisResult, Value, parse_redis_value};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    runtime::Handle,
    sync::Notify,
    task::AbortHandle,
};

use self::frame::{FrameLength, Invalid, MAX_REPLY_BYTES};
use crate::{
    store::remote::stream::Stream,
    sync::{Mutex, oneshot::Oneshot},
};

/// The most calls on a socket that wait for a reply. Further ones fail.
const MAX_PENDING: usize = 8192;
/// The most bytes that wait for a slow server. Further calls fail.
const MAX_UNSENT_BYTES: usize = 16 << 20;
/// The size of a buffer between calls.
const BUFFER_BYTES: usize = 16 << 10;

/// A connected socket. Its last clone closes it.
#[derive(Clone)]
pub(crate) struct Socket {
    state: Arc<Mutex<State>>,
    reader: Arc<ReaderTask>,
}

/// Receives the reply to a call.
type Caller = Arc<Oneshot<RedisResult<Value>>>;

/// Receives the channel and the payload of each message. It must not block.
pub(crate) type OnMessage = Box<dyn FnMut(&[u8], &[u8]) + Send>;

struct State {
    /// `None`: the connection has ended.
    stream: Option<Box<dyn Stream>>,
    /// Encoded calls, the first `sent` bytes of which are sent.
    unsent: Vec<u8>,
    sent: usize,
    /// In the order of the calls, which is that of the replies.
    pending: VecDeque<Pending>,
    /// The task that reads. It also goes on writing when the server accepts more bytes.
    reader: Waker,
    /// An error that the server sent before any call: the reason why it closes the connection.
    reason: Option<RedisError>,
    /// A write has failed: a part of a call may be sent, and no other one may follow it.
    is_write_broken: bool,
    /// Why the connection has ended.
    end: Option<RedisError>,
    ended: Arc<Notify>,
}

/// Commands that were sent together.
struct Pending {
    replies_left: usize,
    /// The first replies of several.
    replies: Vec<Value>,
    caller: Caller,
}

/// Reads until the connection ends.
struct Reader {
    state: Arc<Mutex<State>>,
    buffer: Vec<u8>,
    /// The bytes of the buffer that were read.
    filled: usize,
    frame: FrameLength,
    on_message: Option<OnMessage>,
}

struct ReaderTask(AbortHandle);

impl Socket {
    /// Reads in a task of this runtime. Without `on_message`, the server sends nothing but replies.
    pub(crate) fn open(stream: Box<dyn Stream>, on_message: Option<OnMessage>) -> Self {
        let (socket, reader) = Self::parts(stream, on_message);
        let task = Handle::current().spawn(reader).abort_handle();
        Self { state: socket, reader: Arc::new(ReaderTask(task)) }
    }

    fn parts(stream: Box<dyn Stream>, on_message: Option<OnMessage>) -> (Arc<Mutex<State>>, Reader) {
        let state = Arc::new(Mutex::new(State {
            stream: Some(stream),
            unsent: Vec::new(),
            sent: 0,
            pending: VecDeque::new(),
            reader: Waker::noop().clone(),
            reason: None,
            is_write_broken: false,
            end: None,
            ended: Arc::default(),
        }));
        let reader = Reader {
            state: Arc::clone(&state),
            buffer: Vec::new(),
            filled: 0,
            frame: FrameLength::default(),
            on_message,
        };
        (state, reader)
    }

    /// Sends commands together. The reply has those of all of them, if there are several.
    pub(crate) async fn call(&self, commands: &[Cmd]) -> RedisResult<Value> {
        let caller = self.state.lock().send(commands)?;
        poll_fn(|cx| caller.poll_recv(cx)).await?.extract_error()
    }

    /// Sends commands together. An error is the reply to its command alone.
    pub(crate) async fn call_each(&self, commands: &[Cmd]) -> RedisResult<Vec<RedisResult<Value>>> {
        let caller = self.state.lock().send(commands)?;
        let reply = poll_fn(|cx| caller.poll_recv(cx)).await?;
        Ok(match reply {
            Value::Array(replies) if commands.len() > 1 => replies.into_iter().map(Value::extract_error).collect(),
            reply => vec![reply.extract_error()],
        })
    }

    /// The error that the server sent in place of a reply, before it closed the connection.
    pub(crate) fn closing_reason(&self) -> Option<RedisError> {
        self.state.lock().reason.clone()
    }

    /// Ends the connection: its replies are out of step with its calls.
    pub(crate) fn close(&self) {
        end(&self.state, &aborted("the server sent a reply that belongs to no call"));
        self.reader.0.abort();
    }

    /// Waits for the end of the connection.
    pub(crate) async fn ended(&self) {
        let ended = {
            let state = self.state.lock();
            // Under the mutex: a later end notifies it.
            state.end.is_none().then(|| Arc::clone(&state.ended).notified_owned())
        };
        if let Some(ended) = ended {
            ended.await;
        }
    }
}

impl State {
    /// Writes commands, as far as the server accepts them now.
    fn send(&mut self, commands: &[Cmd]) -> RedisResult<Caller> {
        if let Some(error) = &self.end {
            return Err(error.clone());
        }
        if self.is_write_broken {
            return Err(aborted("an earlier call could not be sent"));
        }
        if self.pending.len() >= MAX_PENDING || self.unsent.len() >= MAX_UNSENT_BYTES {
            // Of this kind, a caller knows that nothing was sent, and keeps the connection.
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "too many calls wait for the server").into());
        }
        for command in commands {
            command.write_packed_command(&mut self.unsent);
        }
        self.flush();
        let caller = Caller::default();
        self.pending.push_back(Pending {
            replies_left: commands.len(),
            replies: Vec::new(),
            caller: Arc::clone(&caller),
        });
        Ok(caller)
    }

    fn flush(&mut self) {
        let Self { stream: Some(stream), unsent, sent, reader, is_write_broken, .. } = self else { return };
        // A caller may be gone when the server accepts more bytes.
        let mut cx = Context::from_waker(reader);
        while *sent < unsent.len() {
            match Pin::new(&mut *stream).poll_write(&mut cx, &unsent[*sent..]) {
                Poll::Ready(Ok(count)) if count > 0 => *sent += count,
                // The server has closed the connection. It may have sent a reason, which can still
                // be read.
                Poll::Ready(_) => {
                    *is_write_broken = true;
                    break;
                }
                Poll::Pending => {
                    if *sent > unsent.len() / 2 {
                        unsent.drain(..std::mem::take(sent));
                    }
                    return;
                }
            }
        }
        // TLS has bytes that the server has not accepted yet.
        if let Poll::Ready(Err(_)) = Pin::new(stream).poll_flush(&mut cx) {
            *is_write_broken = true;
        }
        unsent.clear();
        unsent.shrink_to(BUFFER_BYTES);
        *sent = 0;
    }

    /// Takes the next reply. Returns the caller to which all its replies can be sent.
    fn receive(&mut self, reply: Value) -> Result<Option<(Caller, Value)>, RedisError> {
        let Some(call) = self.pending.front_mut() else {
            let error = reply.extract_error().err();
            let is_reason = error.is_some();
            self.reason = self.reason.take().or(error);
            return if is_reason { Ok(None) } else { Err(aborted("the server sent a reply without a call")) };
        };
        call.replies_left -= 1;
        if call.replies_left == 0 && call.replies.is_empty() {
            return Ok(self.pending.pop_front().map(|call| (call.caller, reply)));
        }
        call.replies.push(reply);
        let is_complete = call.replies_left == 0;
        let call = is_complete.then(|| self.pending.pop_front()).flatten();
        Ok(call.map(|call| (call.caller, Value::Array(call.replies))))
    }
}

impl Reader {
    /// Reads what the server has sent. Returns why the connection has ended.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<RedisError> {
        loop {
            if self.buffer.len() == self.filled {
                self.buffer.resize((2 * self.filled).max(BUFFER_BYTES), 0);
            }
            let mut buffer = ReadBuf::new(&mut self.buffer[self.filled..]);
            {
                let mut state = self.state.lock();
                if !state.reader.will_wake(cx.waker()) {
                    state.reader = cx.waker().clone();
                }
                state.flush();
                let Some(stream) = &mut state.stream else { return Poll::Ready(aborted("closed")) };
                if let Err(error) = ready!(Pin::new(stream).poll_read(cx, &mut buffer)) {
                    return Poll::Ready(error.into());
                }
            }
            let count = buffer.filled().len();
            if count == 0 {
                return Poll::Ready(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            self.filled += count;
            if let Err(error) = self.deliver() {
                return Poll::Ready(error);
            }
        }
    }

    /// Delivers the complete replies and messages of the buffer.
    fn deliver(&mut self) -> Result<(), RedisError> {
        let mut start = 0;
        loop {
            let length = match self.frame.of(&self.buffer[start..self.filled]) {
                Ok(Some(length)) => length,
                Ok(None) => break,
                Err(Invalid::TooLong) => {
                    let kib = MAX_REPLY_BYTES >> 10;
                    return Err(aborted(format!("the server sent a reply of more than {kib} KiB")));
                }
                Err(Invalid::OtherProtocol) => return Err(other_protocol(&self.buffer[start..self.filled])),
            };
            let frame = &self.buffer[start..start + length];
            start += length;
            let value = parse(frame)?;
            if let Some(on_message) = &mut self.on_message
                && let Some((channel, payload)) = message(&value)
            {
                on_message(channel, payload);
                continue;
            }
            let reply = self.state.lock().receive(value)?;
            // After the mutex is unlocked: the waker may be code of users.
            if let Some((caller, reply)) = reply {
                drop(caller.send(Ok(reply)));
            }
        }
        self.buffer.copy_within(start..self.filled, 0);
        self.filled -= start;
        if self.filled < BUFFER_BYTES && self.buffer.len() > BUFFER_BYTES {
            self.buffer.truncate(BUFFER_BYTES);
            self.buffer.shrink_to_fit();
        }
        Ok(())
    }
}

/// Ends the connection, unless it has ended. All its calls fail.
fn end(state: &Mutex<State>, error: &RedisError) {
    let mut state = state.lock();
    let stream = state.stream.take();
    let pending = std::mem::take(&mut state.pending);
    state.end.get_or_insert_with(|| error.clone());
    state.unsent = Vec::new();
    let ended = Arc::clone(&state.ended);
    drop(state);
    drop(stream);
    for call in pending {
        drop(call.caller.send(Err(error.clone())));
    }
    ended.notify_waiters();
}

impl Future for Reader {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let error = ready!(self.poll_read(cx));
        end(&self.state, &error);
        Poll::Ready(())
    }
}

impl Drop for Reader {
    /// With its runtime, or by its last caller.
    fn drop(&mut self) {
        end(&self.state, &aborted("the runtime of the connection has ended"));
    }
}

impl Drop for ReaderTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The parser of the library needs a buffer and four allocations for each reply. Most replies are
/// one text.
fn parse(frame: &[u8]) -> RedisResult<Value> {
    let text = || {
        let (line, text) =
            frame.strip_prefix(b"$")?.split_at_checked(frame.iter().position(|&byte| byte == b'\r')? + 1)?;
        (!line.starts_with(b"-")).then(|| text.strip_suffix(b"\r\n")).flatten()
    };
    match text() {
        Some(text) => Ok(Value::BulkString(text.to_vec())),
        None => parse_redis_value(frame),
    }
}

/// The channel and the payload of a message. `None`: a reply, which can be an array on a connection
/// for messages, too. After a flush the server sends a message without a payload, which no client
/// can send: its channel is empty here. One with several payloads is about keys that this
/// connection has not read.
fn message(value: &Value) -> Option<(&[u8], &[u8])> {
    match value {
        Value::Array(fields) => match &fields[..] {
            [Value::BulkString(kind), Value::BulkString(channel), Value::BulkString(payload)] if kind == b"message" => {
                Some((channel, payload))
            }
            [Value::BulkString(kind), Value::BulkString(_), Value::Nil] if kind == b"message" => Some((b"", b"")),
            [Value::BulkString(kind), Value::BulkString(channel), Value::Array(_)] if kind == b"message" => {
                Some((channel, b""))
            }
            _ => None,
        },
        _ => None,
    }
}

/// The error of the library for these bytes, which names what they are.
fn other_protocol(bytes: &[u8]) -> RedisError {
    let no_resp2 = || aborted("the server sent a value of RESP3, which was not requested");
    parse_redis_value(bytes).err().unwrap_or_else(no_resp2)
}

/// A connection with this error is replaced.
fn aborted(text: impl Into<Box<dyn Error + Send + Sync>>) -> RedisError {
    io::Error::new(io::ErrorKind::ConnectionAborted, text).into()
}
