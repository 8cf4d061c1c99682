//! Checks mutual exclusion and the order of fencing tokens, by the true time.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tower_lock::{__internals::proto::BootInstant, AcquisitionId, LockKey};
use tower_lock_testkit::exclusion::{Sections, Violation};

use crate::process::Section;

/// The clock of a process, with its own start and rate.
#[derive(Clone, Copy, Debug)]
pub struct LocalClock {
    base: u64,
    rate: f64,
}

/// Observes all sections and knows the true time.
#[derive(Debug, Default)]
pub struct Checker {
    keys: HashMap<LockKey, KeyHistory>,
    /// Acquisitions without guarantees: an operator revoked their keys.
    pub excused: HashSet<AcquisitionId>,
    /// Redis lost data or its clock was set: only the order of fencing tokens is checked.
    pub lenient: bool,
    /// The number of sections that started.
    pub sections: u64,
}

#[derive(Debug, Default)]
struct KeyHistory {
    sections: Sections<OpenSection>,
    /// Until when the key must stay blocked, by which acquisition, and why: by one that held it
    /// alone, and by one that held it with others, whose place is blocked.
    blocked: [Option<(u64, AcquisitionId, &'static str)>; 2],
}

#[derive(Debug)]
struct OpenSection {
    section: Arc<Section>,
    clock: LocalClock,
    process: u64,
}

impl LocalClock {
    /// A clock with this start and rate.
    pub fn new(base: u64, rate: f64) -> Self {
        Self { base, rate }
    }

    /// The local time at this true time, in nanoseconds.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "some minutes"
    )]
    pub fn at(&self, now: u64) -> BootInstant {
        BootInstant::from_nanos(self.base + (now as f64 * self.rate) as u64)
    }

    /// The latest true time at which the clock shows this instant.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "some minutes"
    )]
    pub fn when(&self, instant: BootInstant) -> u64 {
        let since = instant.saturating_duration_since(BootInstant::from_nanos(self.base)).as_nanos() as f64;
        (since / self.rate) as u64 + 2
    }
}

/// Whether a section may begin while another one is open: both hold the key with others. Only
/// readers run under one grant.
fn may_overlap(open: &AcquisitionId, begins: &AcquisitionId) -> bool {
    open.max_holders() > 1 && (open != begins || begins.max_holders() == READERS)
}

/// The limit of readers.
const READERS: u16 = 1_024;

/// Tolerance for the rounding of the server clock.
const ROUNDING: u64 = 3_000_000;

impl Checker {
    /// A checker that observes from the start.
    pub fn new(lenient: bool) -> Self {
        Self { lenient, ..Self::default() }
    }

    /// Records the start of a section.
    ///
    /// # Errors
    ///
    /// Returns the violation: an overlap, a start that is too early, or a token that does not rise.
    pub fn begins(&mut self, now: u64, process: u64, clock: LocalClock, section: &Arc<Section>) -> Result<(), String> {
        self.sections += 1;
        let id = &section.grant.id;
        let state = self.keys.entry(section.grant.key.clone()).or_default();
        let excused = self.lenient || self.excused.contains(id);
        let token = section.token.as_u64();
        let left = |open: &OpenSection| open.section.remaining(open.clock.at(now));
        let holds = |open: &OpenSection| !left(open).is_zero() && !self.excused.contains(&open.section.grant.id);
        let is_shared = id.max_holders() > 1;
        let overlaps = |open: &OpenSection| holds(open) && !(is_shared && may_overlap(&open.section.grant.id, id));
        // The tokens of those that hold a key with others are not compared.
        let violation = if is_shared { None } else { state.sections.violation(token, overlaps) };
        let overlap = || state.sections.open().find(|open| is_shared && overlaps(open)).map(Violation::Overlap);
        let violation = violation.or_else(overlap).map(|violation| match violation {
            Violation::Overlap(open) => {
                format!("two are in: {id} begins while {} has {:?} left", open.section.grant.id, left(open))
            }
            Violation::TokenNotRising(last) => format!("{id} begins with token {token} after {last}"),
        });
        let holders: HashSet<_> =
            state.sections.open().filter(|open| holds(open)).map(|open| &open.section.grant.id).collect();
        let most = holders.iter().map(|other| other.max_holders()).chain([id.max_holders()]).max().unwrap_or(1);
        let count = holders.len() + usize::from(!holders.contains(id));
        let too_many = (is_shared && count > usize::from(most)).then(|| format!("{id} begins beside {holders:?}"));
        let is_blocked_by = |blocked: &&(u64, AcquisitionId, _)| {
            let (until, other, _) = blocked;
            now + ROUNDING < *until && !self.excused.contains(other) && !(is_shared && other.max_holders() > 1)
        };
        let early = state.blocked.iter().flatten().find(is_blocked_by).map(|(until, other, why)| {
            let early = Duration::from_nanos(until - now);
            format!("{id} begins {early:?} too early: {other} {why}")
        });
        let violation = violation.or(too_many).or(early).filter(|_| !excused);
        let recorded = if is_shared { 0 } else { token };
        state.sections.begin(recorded, OpenSection { section: Arc::clone(section), clock, process });
        violation.map_or(Ok(()), Err)
    }

    /// Records the end of a section, and until when it blocks the key.
    pub fn ends(&mut self, section: &Arc<Section>, blocked_until: u64, why: &'static str) {
        let Some(state) = self.keys.get_mut(&section.grant.key) else { return };
        state.sections.end(|_, open| Arc::ptr_eq(&open.section, section));
        let id = &section.grant.id;
        let blocked = &mut state.blocked[usize::from(id.max_holders() > 1)];
        if blocked.as_ref().is_none_or(|(until, ..)| *until < blocked_until) {
            *blocked = Some((blocked_until, id.clone(), why));
        }
    }

    /// Ends the time for which this acquisition blocks the key.
    pub fn lift(&mut self, key: &LockKey, id: &AcquisitionId) {
        if let Some(state) = self.keys.get_mut(key) {
            state.blocked[0].take_if(|(_, other, _)| other == id);
        }
    }

    /// Drops all guarantees for the current holders of this key.
    pub fn excuse(&mut self, key: &LockKey) {
        if let Some(state) = self.keys.get_mut(key) {
            state.blocked = Default::default();
            self.excused.extend(state.sections.open().map(|open| open.section.grant.id.clone()));
        }
    }

    /// Whether a section with a valid deadline holds the key.
    pub fn is_held(&self, key: &LockKey, now: u64) -> bool {
        self.keys.get(key).is_some_and(|state| {
            state.sections.open().any(|open| !open.section.remaining(open.clock.at(now)).is_zero())
        })
    }

    /// The process of the latest section of this key.
    pub fn holder(&self, key: &LockKey) -> Option<u64> {
        self.keys.get(key)?.sections.open().last().map(|open| open.process)
    }
}
