//! Reports to the checker and its replies, one line each.

use std::{
    fmt,
    str::{FromStr, SplitAsciiWhitespace},
};

/// A report to the checker. Names contain no spaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// A client is about to send a request.
    Request {
        /// The name of the request.
        request: String,
    },
    /// A handler runs under a lock.
    Enter {
        /// The unique name of the section.
        section: String,
        /// The locked key.
        key: String,
        /// Its fencing token.
        token: u64,
        /// The name of the process.
        process: String,
        /// The name of the request.
        request: String,
        /// The time by [`now`](crate::now), read before the deadline.
        at: u64,
        /// The deadline of the lock.
        deadline: u64,
    },
    /// A section has ended, and its lock is not yet released.
    Exit {
        /// The name of the section.
        section: String,
        /// The time by [`now`](crate::now).
        at: u64,
    },
    /// A section was aborted: by a panic, a disconnect or a lost lock.
    Abort {
        /// The name of the section.
        section: String,
        /// The time by [`now`](crate::now).
        at: u64,
        /// No other section may start before: the end of the lock-delay.
        until: u64,
    },
    /// A write to the resource.
    Write {
        /// The key.
        key: String,
        /// The fencing token.
        token: u64,
    },
    /// A client has a complete response.
    Response {
        /// The name of the request.
        request: String,
        /// The status.
        status: u16,
        /// `outcome` of the problem details, or `-`.
        outcome: String,
    },
    /// A client has left before its response was complete.
    Left {
        /// The name of the request.
        request: String,
    },
    /// A waiting client has lost its connection or stream.
    Broken {
        /// The name of the request.
        request: String,
    },
    /// Reports nothing: its reply confirms that all earlier reports have arrived.
    Flush,
    /// The end of the storm; the reply is the summary.
    Finish,
}

/// The reply of the checker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Recorded.
    Ok,
    /// The write was accepted.
    Accepted,
    /// The write was refused: a larger token has written before.
    Refused,
    /// The reply to [`Report::Finish`]: the summary as JSON in one line.
    Summary(String),
    /// The line was no report.
    Invalid,
}

/// The line is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidReport;

// === impl Report ===

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request { request } => write!(f, "REQUEST {request}"),
            Self::Enter { section, key, token, process, request, at, deadline } => {
                write!(f, "ENTER {section} {key} {token} {process} {request} {at} {deadline}")
            }
            Self::Exit { section, at } => write!(f, "EXIT {section} {at}"),
            Self::Abort { section, at, until } => write!(f, "ABORT {section} {at} {until}"),
            Self::Write { key, token } => write!(f, "WRITE {key} {token}"),
            Self::Response { request, status, outcome } => write!(f, "RESPONSE {request} {status} {outcome}"),
            Self::Left { request } => write!(f, "LEFT {request}"),
            Self::Broken { request } => write!(f, "BROKEN {request}"),
            Self::Flush => f.write_str("FLUSH"),
            Self::Finish => f.write_str("FINISH"),
        }
    }
}

impl FromStr for Report {
    type Err = InvalidReport;

    fn from_str(line: &str) -> Result<Self, InvalidReport> {
        let mut words = line.split_ascii_whitespace();
        let report = match words.next().ok_or(InvalidReport)? {
            "REQUEST" => Self::Request { request: word(&mut words)? },
            "ENTER" => Self::Enter {
                section: word(&mut words)?,
                key: word(&mut words)?,
                token: word(&mut words)?,
                process: word(&mut words)?,
                request: word(&mut words)?,
                at: word(&mut words)?,
                deadline: word(&mut words)?,
            },
            "EXIT" => Self::Exit { section: word(&mut words)?, at: word(&mut words)? },
            "ABORT" => Self::Abort { section: word(&mut words)?, at: word(&mut words)?, until: word(&mut words)? },
            "WRITE" => Self::Write { key: word(&mut words)?, token: word(&mut words)? },
            "RESPONSE" => {
                Self::Response { request: word(&mut words)?, status: word(&mut words)?, outcome: word(&mut words)? }
            }
            "LEFT" => Self::Left { request: word(&mut words)? },
            "BROKEN" => Self::Broken { request: word(&mut words)? },
            "FLUSH" => Self::Flush,
            "FINISH" => Self::Finish,
            _ => return Err(InvalidReport),
        };
        if words.next().is_some() { Err(InvalidReport) } else { Ok(report) }
    }
}

fn word<T: FromStr>(words: &mut SplitAsciiWhitespace<'_>) -> Result<T, InvalidReport> {
    words.next().and_then(|word| word.parse().ok()).ok_or(InvalidReport)
}

// === impl Reply ===

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Accepted => "accepted",
            Self::Refused => "refused",
            Self::Summary(json) => json,
            Self::Invalid => "not understood",
        })
    }
}

impl From<&str> for Reply {
    fn from(line: &str) -> Self {
        match line {
            "ok" => Self::Ok,
            "accepted" => Self::Accepted,
            "refused" => Self::Refused,
            json if json.starts_with('{') => Self::Summary(json.to_owned()),
            _ => Self::Invalid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_round_trip_and_other_lines_are_invalid() {
        let text = str::to_owned;
        let reports = [
            Report::Request { request: text("r1") },
            Report::Enter {
                section: text("a-1"),
                key: text("subject:7"),
                token: u64::MAX,
                process: text("a"),
                request: text("r1"),
                at: 1,
                deadline: 2,
            },
            Report::Exit { section: text("a-1"), at: 3 },
            Report::Abort { section: text("a-2"), at: 3, until: 4 },
            Report::Write { key: text("subject:7"), token: 4 },
            Report::Response { request: text("r1"), status: 409, outcome: text("not-started") },
            Report::Left { request: text("r1") },
            Report::Broken { request: text("r1") },
            Report::Flush,
            Report::Finish,
        ];
        for report in reports {
            let line = report.to_string();
            assert_eq!(line.parse(), Ok(report));
            assert_eq!(format!("{line} more").parse::<Report>(), Err(InvalidReport));
            if let Some((less, _)) = line.rsplit_once(' ') {
                assert_eq!(less.parse::<Report>(), Err(InvalidReport), "{less}");
            }
        }
        for line in ["", "HELLO", "EXIT a-1 soon", "RESPONSE r1 70000 -"] {
            assert_eq!(line.parse::<Report>(), Err(InvalidReport), "{line}");
        }
        for answer in [Reply::Ok, Reply::Accepted, Reply::Refused, Reply::Summary(text("{}"))] {
            assert_eq!(Reply::from(&*answer.to_string()), answer);
        }
    }
}
