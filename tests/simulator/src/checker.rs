//! Who may be in, by what everybody was told.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tower_lock::{AcquisitionId, FencingToken, LockKey, test_util::decisions::BootInstant};

use crate::process::Section;

/// The clock of a process: begins somewhere, and runs at its own rate.
#[derive(Clone, Copy, Debug)]
pub struct LocalClock {
    base: u64,
    rate: f64,
}

/// Looks on, and knows the true time.
#[derive(Debug, Default)]
pub struct Checker {
    keys: HashMap<LockKey, KeyHistory>,
    /// Of these nothing is promised: their key was taken away by an operator.
    pub excused: HashSet<AcquisitionId>,
    /// Redis has forgotten something, or its clock was set: of what is promised only the order of fences is left.
    pub lenient: bool,
    /// How many sections began.
    pub sections: u64,
}

#[derive(Debug, Default)]
struct KeyHistory {
    open: Vec<OpenSection>,
    last: Option<FencingToken>,
    /// Until when it was to be kept taken, by whom, and why.
    blocked: Option<(u64, AcquisitionId, &'static str)>,
}

#[derive(Debug)]
struct OpenSection {
    section: Arc<Section>,
    clock: LocalClock,
    process: u64,
}

impl LocalClock {
    /// Begins there, and runs so fast.
    pub fn new(base: u64, rate: f64) -> Self {
        Self { base, rate }
    }

    /// What it shows at this true time, in nanoseconds.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "some minutes"
    )]
    pub fn at(&self, now: u64) -> BootInstant {
        BootInstant::from_nanos(self.base + (now as f64 * self.rate) as u64)
    }

    /// When it shows this, at the latest.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "some minutes"
    )]
    pub fn when(&self, moment: BootInstant) -> u64 {
        let since = moment.saturating_duration_since(BootInstant::from_nanos(self.base)).as_nanos() as f64;
        (since / self.rate) as u64 + 2
    }
}

/// What is taken for a rounding of the server's clock.
const ROUNDING: u64 = 3_000_000;

impl Checker {
    /// One that looks on from the beginning.
    pub fn new(lenient: bool) -> Self {
        Self { lenient, ..Self::default() }
    }

    /// A section begins. What is wrong with that.
    ///
    /// # Errors
    ///
    /// It is not alone, or too early, or its token does not rise.
    pub fn begins(&mut self, now: u64, process: u64, clock: LocalClock, section: &Arc<Section>) -> Result<(), String> {
        self.sections += 1;
        let id = &section.grant.owner;
        let state = self.keys.entry(section.grant.key.clone()).or_default();
        let is_excused = self.lenient || self.excused.contains(id);
        let mut wrong = None;
        for open in &state.open {
            let left = open.section.remaining(open.clock.at(now));
            let other = &open.section.grant.owner;
            if !left.is_zero() && !is_excused && !self.excused.contains(other) {
                wrong = Some(format!("two are in: {id} begins while {other} has {left:?} left"));
            }
        }
        if let Some((until, other, why)) = &state.blocked
            && now + ROUNDING < *until
            && !is_excused
            && !self.excused.contains(other)
        {
            let early = Duration::from_nanos(until - now);
            wrong = wrong.or_else(|| Some(format!("{id} begins {early:?} too early: {other} {why}")));
        }
        if state.last.is_some_and(|last| last >= section.token) && !is_excused {
            wrong = wrong.or_else(|| Some(format!("{id} begins with token {} after {:?}", section.token, state.last)));
        }
        state.last = state.last.max(Some(section.token));
        state.open.push(OpenSection { section: Arc::clone(section), clock, process });
        wrong.map_or(Ok(()), Err)
    }

    /// A section ends, and keeps the key taken until then, for this reason.
    pub fn ends(&mut self, section: &Arc<Section>, taken_until: u64, why: &'static str) {
        let Some(state) = self.keys.get_mut(&section.grant.key) else { return };
        state.open.retain(|open| !Arc::ptr_eq(&open.section, section));
        if state.blocked.as_ref().is_none_or(|(until, ..)| *until < taken_until) {
            state.blocked = Some((taken_until, section.grant.owner.clone(), why));
        }
    }

    /// Nothing is promised any more of what this key was kept taken for.
    pub fn excuse(&mut self, key: &LockKey) {
        if let Some(state) = self.keys.get_mut(key) {
            state.blocked = None;
            self.excused.extend(state.open.iter().map(|open| open.section.grant.owner.clone()));
        }
    }

    /// Whether somebody is in, and may be.
    pub fn is_held(&self, key: &LockKey, now: u64) -> bool {
        self.keys
            .get(key)
            .is_some_and(|state| state.open.iter().any(|open| !open.section.remaining(open.clock.at(now)).is_zero()))
    }

    /// Who is in, of which process.
    pub fn holder(&self, key: &LockKey) -> Option<u64> {
        self.keys.get(key)?.open.last().map(|open| open.process)
    }
}
