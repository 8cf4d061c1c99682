//! Rules that hold for each lock and each store.

mod invariants;
mod conformance;
mod known_lock_bugs;
mod random;
