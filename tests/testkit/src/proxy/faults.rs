//! The faults that the proxy injects, and their conditions.

use std::{ops::Range, sync::Arc, time::Duration};

/// The direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the server.
    Up,
    /// To the client.
    Down,
    /// Both directions.
    Both,
}

/// The fault of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkFault {
    /// The connection is cut before the server gets the request.
    CutBefore,
    /// The server replies with an error, and does not run the request.
    Refused,
    /// The server runs the request, and the connection is cut before the reply.
    CutBeforeReply,
    /// The server runs the request, and the connection is cut after this many bytes of the reply.
    CutInReply(usize),
    /// The server runs the request twice; the client gets the second reply.
    Double,
    /// The request and all later ones arrive with this delay.
    Late(Duration),
    /// The connection is cut, and the request runs after this time on another connection without a
    /// user and a database. It was in flight at the cut.
    Orphaned(Duration),
    /// The request runs, and after this time a copy of it runs on another connection: a client, a
    /// pool or a network sent it again. That connection has no user and no database selected.
    Again(Duration),
}

/// A request of a client.
#[derive(Clone, Debug)]
pub struct Request {
    /// The number of its connection.
    pub connection: u64,
    /// The command and its arguments.
    pub parts: Vec<Vec<u8>>,
}

/// A message of the server to a subscriber.
#[derive(Clone, Debug)]
pub struct Push {
    /// The number of its connection.
    pub connection: u64,
    /// The channel of the message.
    pub channel: Vec<u8>,
    /// The content of the message.
    pub payload: Vec<u8>,
}

/// Random faults, in parts per thousand. The seed fixes the random numbers; which request they hit
/// depends on the order of arrival.
#[derive(Clone, Debug)]
#[must_use = "nothing goes wrong yet"]
pub struct Chaos {
    rng: fastrand::Rng,
    cut: u32,
    cut_before_reply: u32,
    double: u32,
    late: u32,
    late_at_most: Duration,
    again: u32,
    again_after: Range<Duration>,
    orphaned: u32,
    orphaned_after: Range<Duration>,
    drop_pushes: u32,
    double_pushes: u32,
}

pub(super) type Pushes = Arc<dyn Fn(&Push) -> Vec<Vec<u8>> + Send + Sync>;

pub(super) struct ArmedFault {
    matches: Box<dyn Fn(&Request) -> bool + Send + Sync>,
    fault: NetworkFault,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WireState {
    pub(super) up: PathState,
    pub(super) down: PathState,
    pub(super) is_cut: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PathState {
    pub(super) delay: Duration,
    pub(super) block: Block,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Block {
    #[default]
    Open,
    Hold,
    Swallow,
}

// === impl Request ===

impl Request {
    /// The name of the command, in upper case.
    #[must_use]
    pub fn name(&self) -> String {
        self.parts.first().map(|name| String::from_utf8_lossy(name).to_ascii_uppercase()).unwrap_or_default()
    }

    /// The number of replies that a subscribe or unsubscribe command has on its connection.
    pub(super) fn confirmations(&self) -> Option<usize> {
        let is_subscription = self.name().ends_with("SUBSCRIBE");
        is_subscription.then(|| self.parts.len().saturating_sub(1))
    }

    /// Whether the request changes the state of the connection, not of the server. A client never
    /// repeats such a request on another connection.
    fn changes_connection(&self) -> bool {
        let others =
            ["HELLO", "AUTH", "SELECT", "CLIENT", "RESET", "QUIT", "MULTI", "EXEC", "DISCARD", "WATCH", "MONITOR"];
        self.confirmations().is_some() || others.contains(&self.name().as_str())
    }
}

// === impl Armed ===

impl ArmedFault {
    pub(super) fn new(matches: impl Fn(&Request) -> bool + Send + Sync + 'static, fault: NetworkFault) -> Self {
        Self { matches: Box::new(matches), fault }
    }

    pub(super) fn take(armed: &mut Vec<Self>, request: &Request) -> Option<NetworkFault> {
        let at = armed.iter().position(|armed| (armed.matches)(request))?;
        Some(armed.remove(at).fault)
    }
}

// === impl Chaos ===

impl Chaos {
    /// No faults, with this seed.
    pub fn new(seed: u64) -> Self {
        Self {
            rng: fastrand::Rng::with_seed(seed),
            cut: 0,
            cut_before_reply: 0,
            double: 0,
            late: 0,
            late_at_most: Duration::ZERO,
            again: 0,
            again_after: Duration::ZERO..Duration::ZERO,
            orphaned: 0,
            orphaned_after: Duration::ZERO..Duration::ZERO,
            drop_pushes: 0,
            double_pushes: 0,
        }
    }

    /// Loses this many requests in a thousand before they run, and as many replies: the connection
    /// is cut.
    pub fn cut(self, per_mille: u32) -> Self {
        Self { cut: per_mille, cut_before_reply: per_mille, ..self }
    }

    /// Runs this many requests in a thousand twice.
    pub fn double(self, per_mille: u32) -> Self {
        Self { double: per_mille, ..self }
    }

    /// Delays this many requests in a thousand, by at most this time.
    pub fn late(self, per_mille: u32, at_most: Duration) -> Self {
        Self { late: per_mille, late_at_most: at_most, ..self }
    }

    /// Repeats this many requests in a thousand after a time in this range.
    pub fn again(self, per_mille: u32, after: Range<Duration>) -> Self {
        Self { again: per_mille, again_after: after, ..self }
    }

    /// Cuts the connections of this many requests in a thousand, and runs these requests after a
    /// time in this range.
    pub fn orphaned(self, per_mille: u32, after: Range<Duration>) -> Self {
        Self { orphaned: per_mille, orphaned_after: after, ..self }
    }

    /// Drops this many messages in a thousand.
    pub fn drop_pushes(self, per_mille: u32) -> Self {
        Self { drop_pushes: per_mille, ..self }
    }

    /// Duplicates this many messages in a thousand.
    pub fn double_pushes(self, per_mille: u32) -> Self {
        Self { double_pushes: per_mille, ..self }
    }

    pub(super) fn for_request(&mut self, request: &Request) -> Option<NetworkFault> {
        let Self { cut, cut_before_reply, late, .. } = *self;
        let [double, again, orphaned] =
            if request.changes_connection() { [0; 3] } else { [self.double, self.again, self.orphaned] };
        let late_by = self.late_at_most.mul_f64(self.rng.f64());
        let again_after = self.within(self.again_after.clone());
        let orphaned_after = self.within(self.orphaned_after.clone());
        let faults = [
            (cut, NetworkFault::CutBefore),
            (cut_before_reply, NetworkFault::CutBeforeReply),
            (late, NetworkFault::Late(late_by)),
            (double, NetworkFault::Double),
            (again, NetworkFault::Again(again_after)),
            (orphaned, NetworkFault::Orphaned(orphaned_after)),
        ];
        self.draw(&faults)
    }

    pub(super) fn for_push(&mut self) -> usize {
        let copies = [(self.drop_pushes, 0), (self.double_pushes, 2)];
        self.draw(&copies).unwrap_or(1)
    }

    fn within(&mut self, Range { start, end }: Range<Duration>) -> Duration {
        start + end.saturating_sub(start).mul_f64(self.rng.f64())
    }

    fn draw<T: Copy>(&mut self, faces: &[(u32, T)]) -> Option<T> {
        let mut left = self.rng.u32(0..1_000);
        for (per_mille, face) in faces {
            match left.checked_sub(*per_mille) {
                None => return Some(*face),
                Some(rest) => left = rest,
            }
        }
        None
    }
}
