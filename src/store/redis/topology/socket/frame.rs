//! Where a reply ends. Pure.

use crate::limits::{MAX_RECORD_BODY_BYTES, MAX_RECORD_HEAD_BYTES};

/// The most bytes of one reply or one message. The longest expected one is a record. A faulty
/// server, or foreign data in a lock, must not exhaust the memory of this process.
pub(super) const MAX_REPLY_BYTES: usize = 2 << 20;
const _: () = assert!(MAX_RECORD_HEAD_BYTES + MAX_RECORD_BODY_BYTES < MAX_REPLY_BYTES);

/// Finds the end of the first reply of a buffer that grows. A value is a line, or a line with a
/// length and that many bytes, or a line with a number and that many values.
#[derive(Debug)]
pub(crate) struct FrameLength {
    /// The bytes of the values that are complete.
    complete: usize,
    /// The values that follow.
    values_left: usize,
}

impl Default for FrameLength {
    fn default() -> Self {
        Self { complete: 0, values_left: 1 }
    }
}

/// The bytes are no reply that ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Invalid {
    /// The reply has more than [`MAX_REPLY_BYTES`].
    TooLong,
    /// No value of RESP2 begins like this. Its end is not known, so that what follows cannot be
    /// assigned to the calls.
    OtherProtocol,
}

impl FrameLength {
    /// The length of the first reply. `None`: more bytes are needed.
    pub(crate) fn of(&mut self, buffer: &[u8]) -> Result<Option<usize>, Invalid> {
        while self.values_left > 0 {
            let Some((&kind, rest)) = buffer.get(self.complete..).and_then(<[u8]>::split_first) else { break };
            if !b"+-:$*".contains(&kind) {
                return Err(Invalid::OtherProtocol);
            }
            let Some(line) = rest.iter().position(|&byte| byte == b'\n') else { break };
            let number = || std::str::from_utf8(&rest[..line]).ok()?.trim_end().parse::<i64>().ok();
            // A negative number is that of no value. An invalid one is that of a line.
            let count =
                if b"$*".contains(&kind) { number().and_then(|count| usize::try_from(count).ok()) } else { None };
            let (text, values) = match (kind, count) {
                (b'$', Some(length)) => (length.saturating_add(2), 0),
                (b'*', Some(values)) => (0, values),
                _ => (0, 0),
            };
            if text > MAX_REPLY_BYTES {
                return Err(Invalid::TooLong);
            }
            let end = self.complete + line + 2 + text;
            if buffer.len() < end {
                break;
            }
            self.complete = end;
            self.values_left = (self.values_left - 1).saturating_add(values);
        }
        let length = self.complete;
        if self.values_left == 0 {
            *self = Self::default();
            Ok(Some(length))
        } else if buffer.len() > MAX_REPLY_BYTES {
            Err(Invalid::TooLong)
        } else {
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_ends_where_the_next_one_begins() {
        let text = "x".repeat(1000);
        let long = format!("${}\r\n{text}\r\n", text.len());
        for reply in [
            "+OK\r\n",
            "-ERR no 3\r\n",
            ":-1\r\n",
            "$-1\r\n",
            "*-1\r\n",
            "$0\r\n\r\n",
            "*0\r\n",
            "*2\r\n:1\r\n*1\r\n$3\r\na\nb\r\n",
            "*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\n12\r\n",
            &long,
        ] {
            let (mut frame, two) = (FrameLength::default(), reply.repeat(2));
            for length in 0..reply.len() {
                assert_eq!(frame.of(&two.as_bytes()[..length]).expect("short"), None, "{reply:?} {length}");
            }
            assert_eq!(frame.of(two.as_bytes()).expect("short"), Some(reply.len()), "{reply:?}");
            assert_eq!(frame.of(&two.as_bytes()[reply.len()..]).expect("short"), Some(reply.len()), "{reply:?}");
        }
    }

    #[test]
    fn endless_reply_is_too_long() {
        let line = "x".repeat(MAX_REPLY_BYTES + 1);
        let nested = "*1\r\n".repeat(MAX_REPLY_BYTES / 4 + 1);
        let many = format!("*4000000\r\n{}", ":1\r\n".repeat(MAX_REPLY_BYTES / 4 + 1));
        let announced = "$1073741824\r\n".to_owned();
        for reply in [format!("+{line}"), nested, many, announced] {
            assert_eq!(FrameLength::default().of(reply.as_bytes()), Err(Invalid::TooLong), "{}", &reply[..10]);
        }
    }

    #[test]
    fn values_of_other_protocols_have_no_end() {
        for reply in ["HTTP/1.1 400 Bad Request\r\n", "\x15\x03", "%1\r\n", "*1\r\nx", "_\r\n", "*1\r\n_\r\n:1\r\n"] {
            assert_eq!(FrameLength::default().of(reply.as_bytes()), Err(Invalid::OtherProtocol), "{reply:?}");
        }
    }
}
