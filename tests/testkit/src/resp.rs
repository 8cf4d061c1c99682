//! The part of the Redis protocol that a test client and the proxy need.

use std::{io, net::SocketAddr};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::process::TIMEOUT;

/// A reply of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// `+OK`.
    Status(String),
    /// `-ERR …`, without the sign.
    Error(String),
    /// `:1`.
    Integer(i64),
    /// A bulk string.
    Bulk(Vec<u8>),
    /// No value.
    Nil,
    /// An array.
    Array(Vec<Self>),
    /// `>`: an out-of-band message of RESP3.
    Push(Vec<Self>),
}

/// A plain connection to a server, for checks by a test.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

/// The bytes are not RESP.
#[derive(Debug)]
pub(crate) struct NotResp;

// === impl Reply ===

impl Reply {
    /// The text of a status, an error or a bulk string.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Status(text) | Self::Error(text) => Some(text),
            Self::Bulk(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// The number, if the reply is an integer.
    #[must_use]
    pub fn integer(&self) -> Option<i64> {
        match self {
            Self::Integer(number) => Some(*number),
            other => other.text()?.parse().ok(),
        }
    }

    /// The elements of an array; empty for other replies.
    #[must_use]
    pub fn items(&self) -> &[Self] {
        match self {
            Self::Array(items) | Self::Push(items) => items,
            _ => &[],
        }
    }

    /// The texts of an array, sorted, to compare sets of names.
    #[must_use]
    pub fn texts(&self) -> Vec<&str> {
        let mut texts: Vec<_> = self.items().iter().filter_map(Self::text).collect();
        texts.sort_unstable();
        texts
    }

    /// Parses the first reply and its length. `None` if it is incomplete.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, NotResp> {
        Self::parse_nested(bytes, 0)
    }

    fn parse_nested(bytes: &[u8], depth: usize) -> Result<Option<(Self, usize)>, NotResp> {
        let Some(&kind) = bytes.first() else { return Ok(None) };
        if depth > 16 || !b"+-:$*_,#!=(%~>".contains(&kind) {
            return Err(NotResp);
        }
        let Some(end) = bytes.windows(2).position(|two| two == b"\r\n") else {
            return if bytes.len() > 64 * 1024 { Err(NotResp) } else { Ok(None) };
        };
        let line = std::str::from_utf8(&bytes[1..end]).map_err(|_| NotResp)?;
        let number = || line.parse::<i64>().map_err(|_| NotResp);
        let end = end + 2;
        let reply = match kind {
            b'+' | b',' | b'#' | b'(' => Self::Status(line.to_owned()),
            b'-' => Self::Error(line.to_owned()),
            b':' => Self::Integer(number()?),
            b'_' => Self::Nil,
            b'$' | b'!' | b'=' => {
                let Ok(length) = usize::try_from(number()?) else { return Ok(Some((Self::Nil, end))) };
                let Some(bulk) = bytes.get(end..end.saturating_add(length).saturating_add(2)) else { return Ok(None) };
                return Ok(Some((Self::Bulk(bulk[..length].to_vec()), end + length + 2)));
            }
            _ => {
                let Ok(count) = usize::try_from(number()?) else { return Ok(Some((Self::Nil, end))) };
                let count = if kind == b'%' { count.saturating_mul(2) } else { count };
                let (mut items, mut at) = (Vec::new(), end);
                for _ in 0..count {
                    let Some((item, length)) = Self::parse_nested(&bytes[at..], depth + 1)? else { return Ok(None) };
                    items.push(item);
                    at += length;
                }
                let array = if kind == b'>' { Self::Push(items) } else { Self::Array(items) };
                return Ok(Some((array, at)));
            }
        };
        Ok(Some((reply, end)))
    }
}

/// Encodes a command.
pub(crate) fn encode<T: AsRef<[u8]>>(parts: &[T]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", parts.len()).into_bytes();
    for part in parts {
        let part = part.as_ref();
        bytes.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
        bytes.extend_from_slice(part);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

// === impl Connection ===

impl Connection {
    /// Connects.
    ///
    /// # Errors
    ///
    /// Fails if no server listens there.
    pub async fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, read: Vec::new() })
    }

    /// Sends a command and reads the next reply.
    ///
    /// # Errors
    ///
    /// Fails if the connection breaks or no reply arrives within a minute.
    pub async fn command(&mut self, parts: &[&str]) -> io::Result<Reply> {
        self.send(parts).await?;
        self.next().await
    }

    /// Sends a command.
    ///
    /// # Errors
    ///
    /// Fails if the connection breaks.
    pub async fn send(&mut self, parts: &[&str]) -> io::Result<()> {
        self.stream.write_all(&encode(parts)).await
    }

    /// Reads the next reply or message.
    ///
    /// # Errors
    ///
    /// Fails if the connection breaks or nothing arrives within a minute.
    pub async fn next(&mut self) -> io::Result<Reply> {
        loop {
            match Reply::parse(&self.read) {
                Ok(Some((reply, length))) => {
                    self.read.drain(..length);
                    return Ok(reply);
                }
                Ok(None) => {}
                Err(NotResp) => return Err(io::Error::new(io::ErrorKind::InvalidData, "not the protocol of Redis")),
            }
            let read = timeout(TIMEOUT, self.stream.read_buf(&mut self.read)).await;
            if read.map_err(|_| io::ErrorKind::TimedOut)?? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// The bytes read of an incomplete reply.
    #[must_use]
    pub fn unfinished(&self) -> &[u8] {
        &self.read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parser_reads_every_reply_kind_and_waits_for_the_rest() {
        let bulk = |text: &str| Reply::Bulk(text.as_bytes().to_vec());
        let cases: [(&str, Reply); 8] = [
            ("+OK\r\n", Reply::Status("OK".to_owned())),
            ("-ERR no\r\n", Reply::Error("ERR no".to_owned())),
            (":-5\r\n", Reply::Integer(-5)),
            ("$2\r\n\r\n\r\n", bulk("\r\n")),
            ("$-1\r\n", Reply::Nil),
            ("*0\r\n", Reply::Array(Vec::new())),
            ("*2\r\n*1\r\n:1\r\n$1\r\na\r\n", Reply::Array(vec![Reply::Array(vec![Reply::Integer(1)]), bulk("a")])),
            (">1\r\n+x\r\n", Reply::Push(vec![Reply::Status("x".to_owned())])),
        ];
        for (bytes, reply) in cases {
            let with_more = format!("{bytes}+");
            let (read, length) = Reply::parse(with_more.as_bytes()).expect("it is").expect("whole");
            assert_eq!((&read, length), (&reply, bytes.len()), "{bytes:?}");
            for end in 0..bytes.len() {
                assert!(Reply::parse(&bytes.as_bytes()[..end]).expect("it is").is_none(), "{bytes:?} to {end}");
            }
        }
        assert!(Reply::parse(b"PING\r\n").is_err() && Reply::parse(&[0x4a, 0, 0, 0]).is_err());
        assert_eq!(encode(&["GET", "a"]), b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n");
    }
}
