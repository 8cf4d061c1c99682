//! What a feature that is off would add, so that the compiler names the feature where it is used.
//!
//! Each of these functions has a bound that nothing meets. It is written for every lifetime: a bound without a parameter would be
//! an error here instead of where the function is called.

/// Met by nothing.
#[derive(Debug)]
pub struct Missing<'a>(std::marker::PhantomData<&'a ()>);

/// The feature `memory`.
#[cfg(not(feature = "memory"))]
#[diagnostic::on_unimplemented(
    message = "`LockManager::in_memory` needs the feature `memory` of `tower-lock`",
    label = "the feature `memory` is off",
    note = "turn it on in Cargo.toml: `tower-lock = {{ version = \"..\", features = [\"memory\"] }}`"
)]
pub trait Memory {}

/// The feature `test-util`.
#[cfg(not(feature = "test-util"))]
#[diagnostic::on_unimplemented(
    message = "`HeldLock::for_test` needs the feature `test-util` of `tower-lock`",
    label = "the feature `test-util` is off",
    note = "turn it on for tests alone, under `[dev-dependencies]` in Cargo.toml: `tower-lock = {{ version = \"..\", features = [\"test-util\"] }}`"
)]
pub trait TestUtil {}
