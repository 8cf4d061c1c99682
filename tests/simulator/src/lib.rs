//! Many processes, one Redis, and what networks do to them, in virtual time.
#![allow(clippy::must_use_candidate, reason = "nobody but its own tests uses it")]

pub mod fake;
pub mod lab;
pub mod mutants;
pub mod referee;
pub mod shell;
pub mod world;
