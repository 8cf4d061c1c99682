//! What is told to the checker, and what it says: a line each.

use std::{
    fmt,
    str::{FromStr, SplitAsciiWhitespace},
};

/// What somebody tells the checker. No name has a space in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// A client is about to send a request.
    Request {
        /// Its name.
        request: String,
    },
    /// A handler runs under a lock.
    Enter {
        /// The name of this section, used once.
        section: String,
        /// What is locked.
        key: String,
        /// Its fencing token.
        token: u64,
        /// In which process.
        process: String,
        /// For which request.
        request: String,
        /// When, by [`now`](crate::now). Read before the deadline was.
        at: u64,
        /// Until when it has the lock for certain, as it believes.
        deadline: u64,
    },
    /// A section is over, and its lock not yet given back.
    Exit {
        /// Its name.
        section: String,
        /// When, by [`now`](crate::now).
        at: u64,
    },
    /// A section was broken off, by whatever: a panic, a client that left, a lock that was lost.
    Abort {
        /// Its name.
        section: String,
        /// When, by [`now`](crate::now).
        at: u64,
        /// Until when nobody else is to begin: a lock-delay later.
        until: u64,
    },
    /// Something is to be written.
    Write {
        /// Where.
        key: String,
        /// Under which fencing token.
        token: u64,
    },
    /// A client has its answer.
    Response {
        /// To which request.
        request: String,
        /// The status.
        status: u16,
        /// `outcome` of the problem details, `-` if there is none.
        outcome: String,
    },
    /// A client has left before its answer was complete.
    Left {
        /// The request.
        request: String,
    },
    /// A client that did not leave has lost its connection, or its stream of one.
    Broken {
        /// The request.
        request: String,
    },
    /// Says nothing: whoever has the answer knows that everything before it has arrived.
    Flush,
    /// It is over: what was observed, please.
    Finish,
}

/// What the checker answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Taken down.
    Ok,
    /// Written.
    Accepted,
    /// Not written: somebody with a larger token was there before.
    Refused,
    /// To [`Report::Finish`]: what was observed, as JSON in one line.
    Summary(String),
    /// To what is none of these.
    Invalid,
}

/// It is none of these lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidReport;

// === impl Report ===

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request { request } => write!(f, "ASK {request}"),
            Self::Enter { section, key, token, process, request, at, deadline } => {
                write!(f, "ENTER {section} {key} {token} {process} {request} {at} {deadline}")
            }
            Self::Exit { section, at } => write!(f, "EXIT {section} {at}"),
            Self::Abort { section, at, until } => write!(f, "FALL {section} {at} {until}"),
            Self::Write { key, token } => write!(f, "WRITE {key} {token}"),
            Self::Response { request, status, outcome } => write!(f, "ANSWER {request} {status} {outcome}"),
            Self::Left { request } => write!(f, "GONE {request}"),
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
            "ASK" => Self::Request { request: word(&mut words)? },
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
            "FALL" => Self::Abort { section: word(&mut words)?, at: word(&mut words)?, until: word(&mut words)? },
            "WRITE" => Self::Write { key: word(&mut words)?, token: word(&mut words)? },
            "ANSWER" => {
                Self::Response { request: word(&mut words)?, status: word(&mut words)?, outcome: word(&mut words)? }
            }
            "GONE" => Self::Left { request: word(&mut words)? },
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

// === impl Answer ===

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
        for line in ["", "HELLO", "EXIT a-1 soon", "ANSWER r1 70000 -"] {
            assert_eq!(line.parse::<Report>(), Err(InvalidReport), "{line}");
        }
        for answer in [Reply::Ok, Reply::Accepted, Reply::Refused, Reply::Summary(text("{}"))] {
            assert_eq!(Reply::from(&*answer.to_string()), answer);
        }
    }
}
