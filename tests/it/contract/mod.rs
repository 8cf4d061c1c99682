//! Rules that hold for each lock and each store.

mod invariants;
mod conformance;
mod random;
