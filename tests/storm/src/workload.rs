//! The requests of a storm, generated from a seed.

use std::{fmt, time::Duration};

use fastrand::Rng;
use serde::Deserialize;

/// One request: its path, the work of its handler, and when its client disconnects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Its number, from zero.
    pub number: u64,
    /// The protocol of its client.
    pub protocol: Protocol,
    /// The instance that gets it, modulo the live ones.
    pub instance: usize,
    /// The subject that it locks.
    pub subject: u64,
    /// How long it waits.
    pub patience: Patience,
    /// The work of its handler.
    pub work: Work,
    /// How its handler takes the lock.
    pub lock_path: LockPath,
    /// When its client disconnects. `None`: after the response.
    pub disconnect: Option<Disconnect>,
}

/// The protocol of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1: a connection per request, kept for the next one.
    Http1,
    /// HTTP/2: many requests share a connection.
    Http2,
}

/// How a handler takes its lock, and the layers around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockPath {
    /// A layer outside the lock turns a panic into a response.
    pub is_caught: bool,
    /// The handler is cancelled with its client.
    pub is_dropped: bool,
    /// The lock is taken by an extractor, not by a layer.
    pub is_extracted: bool,
}

/// How long a request waits for a busy key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Not at all.
    FailFast,
    /// A few milliseconds.
    Briefly,
    /// Without a limit.
    Wait,
}

/// The work of a handler, sent with the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Work {
    /// The time it sleeps.
    #[serde(default)]
    pub work_ms: u64,
    /// The time it blocks its thread, between the last check of the lock and the write. It cannot
    /// be aborted meanwhile.
    #[serde(default)]
    pub block_ms: u64,
    /// The number of frames of a streaming response, each after the work. Zero: no stream.
    #[serde(default)]
    pub frames: u64,
    /// Whether it panics.
    pub panics: Option<Panics>,
}

/// When a handler panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Panics {
    /// After the work, before the write.
    Before,
    /// After the write.
    After,
}

/// When and how a client disconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disconnect {
    /// When it disconnects.
    pub point: DisconnectPoint,
    /// How it disconnects.
    pub kind: DisconnectKind,
}

/// When a client disconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisconnectPoint {
    /// After a part of its request was sent. Over HTTP/2: after the head, before the body.
    WhileSending {
        /// The part in percent.
        sent: usize,
        /// How long it waits afterwards, so that the part is read.
        after: Duration,
    },
    /// This long after the request, if there is no response by then.
    After(Duration),
    /// With the first frame of the body.
    InBody,
    /// After the complete response.
    AfterResponse,
}

/// How a client disconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisconnectKind {
    /// The connection is closed.
    Close,
    /// The connection is reset.
    Abort,
    /// Over HTTP/2: only the stream is reset.
    Reset,
}

// === impl Plan ===

impl Workload {
    /// The number of subjects.
    pub const SUBJECTS: u64 = 50;

    /// Generates requests. One in a hundred panics, one in a hundred disconnects.
    pub fn generate(seed: u64, requests: u64) -> impl Iterator<Item = Self> {
        let mut rng = Rng::with_seed(seed);
        (0..requests).map(move |number| Self::draw(number, &mut rng))
    }

    fn draw(number: u64, rng: &mut Rng) -> Self {
        let protocol = if rng.bool() { Protocol::Http1 } else { Protocol::Http2 };
        let mut patience = match rng.u8(0..20) {
            0..9 => Patience::Wait,
            9..11 => Patience::Briefly,
            _ => Patience::FailFast,
        };
        let mut work = match rng.u8(0..5) {
            0..2 => Work::default(),
            2..4 => Work { work_ms: rng.u64(1..4), ..Work::default() },
            _ => Work { work_ms: rng.u64(0..3), frames: rng.u64(1..4), ..Work::default() },
        };
        let mut disconnect = (rng.u8(0..100) == 0).then(|| Disconnect::draw(protocol, rng));
        match disconnect.as_mut().map(|disconnect| &mut disconnect.point) {
            // A section that is long enough for a disconnect within it.
            Some(DisconnectPoint::After(limit)) if rng.bool() => {
                *limit = Duration::from_millis(rng.u64(100..500));
                patience = Patience::Wait;
                work = Work { work_ms: rng.u64(100..300), ..Work::default() };
            }
            Some(DisconnectPoint::InBody) => {
                patience = Patience::Wait;
                work = Work { work_ms: rng.u64(1..20), frames: rng.u64(2..5), ..work };
            }
            _ => {}
        }
        if rng.u8(0..100) == 0 {
            work.panics = Some(if rng.bool() { Panics::Before } else { Panics::After });
        }
        Self {
            number,
            protocol,
            instance: rng.usize(..),
            subject: rng.u64(0..Self::SUBJECTS),
            patience,
            work,
            lock_path: LockPath {
                is_caught: rng.bool(),
                is_dropped: rng.u8(0..3) == 0,
                is_extracted: rng.u8(0..3) == 0,
            },
            disconnect,
        }
    }

    /// Lets one handler in a hundred take seconds: longer than a failover.
    #[must_use]
    pub fn with_slow_handlers(mut self) -> Self {
        if self.number.is_multiple_of(100) && self.work.frames == 0 {
            (self.patience, self.work.work_ms) = (Patience::Wait, 1_000 + self.number / 100 % 3 * 1_000);
        }
        self
    }

    /// Lets one request in four wait for the subject zero, so that requests always wait for it.
    #[must_use]
    pub fn with_hot_subject(mut self) -> Self {
        if self.number.is_multiple_of(4) {
            (self.subject, self.patience, self.disconnect) = (0, Patience::Wait, None);
            self.work = Work { work_ms: 1, ..Work::default() };
        }
        self
    }

    /// The path and query.
    #[must_use]
    pub fn path(&self) -> String {
        let Self { lock_path: way, patience, subject, work, .. } = self;
        format!("{way}/{patience}/{subject}?{work}")
    }

    /// The name of the request.
    #[must_use]
    pub fn name(&self) -> String {
        format!("r{}", self.number)
    }
}

// === impl Way ===

impl LockPath {
    /// All combinations.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..8).map(|number| Self {
            is_caught: number & 1 != 0,
            is_dropped: number & 2 != 0,
            is_extracted: number & 4 != 0,
        })
    }
}

/// The start of a path.
impl fmt::Display for LockPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { is_caught, is_dropped, is_extracted } = *self;
        let words = [(is_caught, "/caught"), (is_dropped, "/dropped"), (is_extracted, "/extracted")];
        words.iter().filter(|(is_so, _)| *is_so).try_for_each(|(_, word)| f.write_str(word))
    }
}

// === impl Disconnect ===

impl Disconnect {
    /// Closes the connection after this time.
    #[must_use]
    pub fn after(limit: Duration) -> Self {
        Self { point: DisconnectPoint::After(limit), kind: DisconnectKind::Close }
    }

    fn draw(protocol: Protocol, rng: &mut Rng) -> Self {
        let when = match rng.u8(0..6) {
            0 => DisconnectPoint::WhileSending {
                sent: rng.usize(0..100),
                after: Duration::from_micros(rng.u64(0..3_000)),
            },
            // From some microseconds to half a second.
            1..4 => DisconnectPoint::After(Duration::from_micros((1 << rng.u32(7..19)) + rng.u64(0..1_000))),
            4 => DisconnectPoint::InBody,
            _ => DisconnectPoint::AfterResponse,
        };
        let how = match (protocol, rng.u8(0..4)) {
            (Protocol::Http2, 0..2) => DisconnectKind::Reset,
            (_, 0 | 2) => DisconnectKind::Close,
            _ => DisconnectKind::Abort,
        };
        Self { point: when, kind: how }
    }
}

impl fmt::Display for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FailFast => "refuse",
            Self::Briefly => "briefly",
            Self::Wait => "wait",
        })
    }
}

/// A query string, which [`Deserialize`] reads.
impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { work_ms, block_ms, frames, panics } = self;
        write!(f, "work_ms={work_ms}&block_ms={block_ms}&frames={frames}")?;
        match panics {
            None => Ok(()),
            Some(Panics::Before) => f.write_str("&panics=before"),
            Some(Panics::After) => f.write_str("&panics=after"),
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::{extract::Query, http::Uri};

    use super::*;

    #[test]
    fn workload_is_deterministic_per_seed() {
        let storm = |seed| Workload::generate(seed, 1_000).collect::<Vec<_>>();
        assert_eq!(storm(7), storm(7));
        assert_eq!(
            storm(7)[..100],
            Workload::generate(7, 100).collect::<Vec<_>>(),
            "a longer workload starts with the same requests"
        );
        assert_ne!(storm(7), storm(8));
    }

    #[test]
    fn workload_covers_every_kind_of_request() {
        let plans: Vec<_> = Workload::generate(1, 10_000).collect();
        let count = |is_it: fn(&Workload) -> bool| plans.iter().filter(|workload| is_it(workload)).count();
        let is_about = |number: usize, expected: usize| (expected / 2..expected * 2).contains(&number);
        let disconnect = |when: fn(&DisconnectPoint) -> bool| {
            plans
                .iter()
                .filter(|workload| workload.disconnect.is_some_and(|disconnect| when(&disconnect.point)))
                .count()
        };
        for (number, expected) in [
            (count(|workload| workload.protocol == Protocol::Http1), 5_000),
            (count(|workload| workload.protocol == Protocol::Http2), 5_000),
            (count(|workload| workload.patience == Patience::Wait), 4_500),
            (count(|workload| workload.patience == Patience::Briefly), 1_000),
            (count(|workload| workload.patience == Patience::FailFast), 4_500),
            (count(|workload| workload.work.frames > 0), 2_000),
            (count(|workload| workload.work.panics.is_some()), 100),
            (count(|workload| workload.work.panics == Some(Panics::After) && workload.lock_path.is_caught), 25),
            (count(|workload| workload.lock_path.is_dropped), 3_333),
            (count(|workload| workload.lock_path.is_extracted), 3_333),
            (disconnect(|_| true), 100),
            (disconnect(|when| matches!(when, DisconnectPoint::WhileSending { .. })), 16),
            (disconnect(|when| matches!(when, DisconnectPoint::After(_))), 50),
            (disconnect(|when| *when == DisconnectPoint::InBody), 16),
            (disconnect(|when| *when == DisconnectPoint::AfterResponse), 16),
            (
                count(|workload| {
                    workload.disconnect.is_some_and(|disconnect| disconnect.kind == DisconnectKind::Reset)
                }),
                25,
            ),
        ] {
            assert!(is_about(number, expected), "{number}, and not {expected}");
        }
        let resets_what_it_cannot = |workload: &Workload| {
            workload.protocol == Protocol::Http1
                && workload.disconnect.is_some_and(|disconnect| disconnect.kind == DisconnectKind::Reset)
        };
        assert_eq!(count(resets_what_it_cannot), 0);
        let subjects: std::collections::BTreeSet<_> = plans.iter().map(|workload| workload.subject).collect();
        assert_eq!(subjects.len(), usize::try_from(Workload::SUBJECTS).expect("a few"));
    }

    #[test]
    fn handler_parses_the_planned_work() {
        for workload in Workload::generate(3, 1_000) {
            let uri: Uri = workload.path().parse().expect("a path");
            let Query(work) = Query::<Work>::try_from_uri(&uri).expect("all of it");
            assert_eq!(work, workload.work, "{uri}");
        }
    }
}
