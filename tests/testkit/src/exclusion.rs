//! Mutual exclusion of the sections of one key: the rule, for checkers with clocks of their own.

/// The sections of one key, in the order in which they begin.
#[derive(Debug)]
pub struct Sections<S> {
    open: Vec<(u64, S)>,
    last_token: Option<u64>,
}

/// A section that must not begin.
#[derive(Debug)]
pub enum Violation<'a, S> {
    /// Another section still holds its lock.
    Overlap(&'a S),
    /// Its fencing token is not larger than this earlier one.
    TokenNotRising(u64),
}

// === impl Sections ===

impl<S> Sections<S> {
    /// The violation if a section with this token begins now. `holds` is whether an open section
    /// counts as locked at this time.
    pub fn violation(&self, token: u64, holds: impl Fn(&S) -> bool) -> Option<Violation<'_, S>> {
        let overlap = self.open().find(|other| holds(other)).map(Violation::Overlap);
        overlap.or_else(|| self.last_token.filter(|last| *last >= token).map(Violation::TokenNotRising))
    }

    /// Whether a section with this token is open: another one with it is a reentry.
    pub fn is_open(&self, token: u64) -> bool {
        self.open.iter().any(|(open, _)| *open == token)
    }

    /// Records the start of a section.
    pub fn begin(&mut self, token: u64, section: S) {
        self.last_token = self.last_token.max(Some(token));
        self.open.push((token, section));
    }

    /// Records the end of the first section that is this one.
    pub fn end(&mut self, mut is_it: impl FnMut(u64, &S) -> bool) -> Option<S> {
        let at = self.open.iter().position(|(token, section)| is_it(*token, section))?;
        Some(self.open.remove(at).1)
    }

    /// The sections that have not ended.
    pub fn open(&self) -> impl DoubleEndedIterator<Item = &S> {
        self.open.iter().map(|(_, section)| section)
    }
}

impl<S> Default for Sections<S> {
    fn default() -> Self {
        Self { open: Vec::new(), last_token: None }
    }
}
