//! What is told to the referee, and what it says: a line each.

use std::{
    fmt,
    str::{FromStr, SplitAsciiWhitespace},
};

/// What somebody tells the referee. No name has a space in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// A client is about to send a request.
    Ask {
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
    Fall {
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
    Answer {
        /// To which request.
        request: String,
        /// The status.
        status: u16,
        /// `outcome` of the problem details, `-` if there is none.
        outcome: String,
    },
    /// A client has left before its answer was complete.
    Gone {
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
    /// It is over: what was seen, please.
    Finish,
}

/// What the referee answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Taken down.
    Ok,
    /// Written.
    Accepted,
    /// Not written: somebody with a larger token was there before.
    Refused,
    /// To [`Report::Finish`]: what was seen, as JSON in one line.
    Summary(String),
    /// To what is none of these.
    NotUnderstood,
}

/// It is none of these lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotUnderstood;

// === impl Report ===

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ask { request } => write!(f, "ASK {request}"),
            Self::Enter { section, key, token, process, request, at, deadline } => {
                write!(f, "ENTER {section} {key} {token} {process} {request} {at} {deadline}")
            }
            Self::Exit { section, at } => write!(f, "EXIT {section} {at}"),
            Self::Fall { section, at, until } => write!(f, "FALL {section} {at} {until}"),
            Self::Write { key, token } => write!(f, "WRITE {key} {token}"),
            Self::Answer { request, status, outcome } => write!(f, "ANSWER {request} {status} {outcome}"),
            Self::Gone { request } => write!(f, "GONE {request}"),
            Self::Broken { request } => write!(f, "BROKEN {request}"),
            Self::Flush => f.write_str("FLUSH"),
            Self::Finish => f.write_str("FINISH"),
        }
    }
}

impl FromStr for Report {
    type Err = NotUnderstood;

    fn from_str(line: &str) -> Result<Self, NotUnderstood> {
        let mut words = line.split_ascii_whitespace();
        let report = match words.next().ok_or(NotUnderstood)? {
            "ASK" => Self::Ask { request: word(&mut words)? },
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
            "FALL" => Self::Fall { section: word(&mut words)?, at: word(&mut words)?, until: word(&mut words)? },
            "WRITE" => Self::Write { key: word(&mut words)?, token: word(&mut words)? },
            "ANSWER" => {
                Self::Answer { request: word(&mut words)?, status: word(&mut words)?, outcome: word(&mut words)? }
            }
            "GONE" => Self::Gone { request: word(&mut words)? },
            "BROKEN" => Self::Broken { request: word(&mut words)? },
            "FLUSH" => Self::Flush,
            "FINISH" => Self::Finish,
            _ => return Err(NotUnderstood),
        };
        if words.next().is_some() { Err(NotUnderstood) } else { Ok(report) }
    }
}

fn word<T: FromStr>(words: &mut SplitAsciiWhitespace<'_>) -> Result<T, NotUnderstood> {
    words.next().and_then(|word| word.parse().ok()).ok_or(NotUnderstood)
}

// === impl Answer ===

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Accepted => "accepted",
            Self::Refused => "refused",
            Self::Summary(json) => json,
            Self::NotUnderstood => "not understood",
        })
    }
}

impl From<&str> for Answer {
    fn from(line: &str) -> Self {
        match line {
            "ok" => Self::Ok,
            "accepted" => Self::Accepted,
            "refused" => Self::Refused,
            json if json.starts_with('{') => Self::Summary(json.to_owned()),
            _ => Self::NotUnderstood,
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
            Report::Ask { request: text("r1") },
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
            Report::Fall { section: text("a-2"), at: 3, until: 4 },
            Report::Write { key: text("subject:7"), token: 4 },
            Report::Answer { request: text("r1"), status: 409, outcome: text("not-started") },
            Report::Gone { request: text("r1") },
            Report::Broken { request: text("r1") },
            Report::Flush,
            Report::Finish,
        ];
        for report in reports {
            let line = report.to_string();
            assert_eq!(line.parse(), Ok(report));
            assert_eq!(format!("{line} more").parse::<Report>(), Err(NotUnderstood));
            if let Some((less, _)) = line.rsplit_once(' ') {
                assert_eq!(less.parse::<Report>(), Err(NotUnderstood), "{less}");
            }
        }
        for line in ["", "HELLO", "EXIT a-1 soon", "ANSWER r1 70000 -"] {
            assert_eq!(line.parse::<Report>(), Err(NotUnderstood), "{line}");
        }
        for answer in [Answer::Ok, Answer::Accepted, Answer::Refused, Answer::Summary(text("{}"))] {
            assert_eq!(Answer::from(&*answer.to_string()), answer);
        }
    }
}
