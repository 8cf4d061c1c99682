//! What can go wrong, and when.

use std::{ops::Range, sync::Arc, time::Duration};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the server.
    Up,
    /// To the client.
    Down,
    /// Either way.
    Both,
}

/// What happens to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkFault {
    /// The connection is cut, and the server never hears of it.
    CutBefore,
    /// It is done, and the connection is cut before its reply.
    CutBeforeReply,
    /// It is done, and the connection is cut after so many bytes of its reply.
    CutInReply(usize),
    /// It is done twice, and the second reply is given.
    Double,
    /// It comes so much later, and what is behind it as well.
    Late(Duration),
    /// The connection is cut, and so much later it is done all the same, on another one without a user and a database of its own: it was on its way
    /// when the cut came.
    Orphaned(Duration),
    /// It is done, and so much later a copy of it is done once more, on another connection: a client, a pool or a network that sends again.
    /// The copy finds a connection without a user and without a database of its own.
    Again(Duration),
}

/// What a client asks.
#[derive(Clone, Debug)]
pub struct Request {
    /// On which connection.
    pub connection: u64,
    /// The command and its arguments.
    pub parts: Vec<Vec<u8>>,
}

/// What a server says to those who listen.
#[derive(Clone, Debug)]
pub struct Push {
    /// On which connection.
    pub connection: u64,
    /// On which channel.
    pub channel: Vec<u8>,
    /// What.
    pub payload: Vec<u8>,
}

/// What goes wrong by chance, per mille. The same seed throws the same rng; what it hits depends on who comes first.
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

    /// How many replies it has on a connection that listens, if it is about that.
    pub(super) fn confirmations(&self) -> Option<usize> {
        let is_about_listening = self.name().ends_with("SUBSCRIBE");
        is_about_listening.then(|| self.parts.len().saturating_sub(1))
    }

    /// Whether it changes the connection rather than what the server keeps: no client sends that twice.
    fn changes_connection(&self) -> bool {
        let others =
            ["HELLO", "AUTH", "SELECT", "CLIENT", "RESET", "QUIT", "MULTI", "EXEC", "DISCARD", "WATCH", "MONITOR"];
        self.confirmations().is_some() || others.contains(&self.name().as_str())
    }
}

// === impl Armed ===

impl ArmedFault {
    pub(super) fn new(is_it: impl Fn(&Request) -> bool + Send + Sync + 'static, fault: NetworkFault) -> Self {
        Self { matches: Box::new(is_it), fault }
    }

    pub(super) fn take(armed: &mut Vec<Self>, request: &Request) -> Option<NetworkFault> {
        let at = armed.iter().position(|armed| (armed.matches)(request))?;
        Some(armed.remove(at).fault)
    }
}

// === impl Chaos ===

impl Chaos {
    /// Nothing goes wrong, by this rng.
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

    /// So many requests of a thousand never arrive, and as many are done and never answered: the connection is cut.
    pub fn cut(self, per_mille: u32) -> Self {
        Self { cut: per_mille, cut_before_reply: per_mille, ..self }
    }

    /// So many are done twice.
    pub fn double(self, per_mille: u32) -> Self {
        Self { double: per_mille, ..self }
    }

    /// So many come later, by this much at the most.
    pub fn late(self, per_mille: u32, at_most: Duration) -> Self {
        Self { late: per_mille, late_at_most: at_most, ..self }
    }

    /// So many are done once more, so much later.
    pub fn again(self, per_mille: u32, after: Range<Duration>) -> Self {
        Self { again: per_mille, again_after: after, ..self }
    }

    /// So many are done so much later, and their connection is cut at once.
    pub fn orphaned(self, per_mille: u32, after: Range<Duration>) -> Self {
        Self { orphaned: per_mille, orphaned_after: after, ..self }
    }

    /// So many messages are lost.
    pub fn drop_pushes(self, per_mille: u32) -> Self {
        Self { drop_pushes: per_mille, ..self }
    }

    /// So many messages come twice.
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
