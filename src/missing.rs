//! Placeholders for items of disabled features, so that a compiler error names the feature.
//!
//! Each function has a bound that no type satisfies. The bound has a lifetime parameter: without
//! one, the error would be here instead of at the caller.

/// A type that implements no trait of this module.
#[derive(Debug)]
pub struct Missing<'a>(std::marker::PhantomData<&'a ()>);

/// Items of the feature `memory`.
#[cfg(not(feature = "memory"))]
#[diagnostic::on_unimplemented(
    message = "`LockManager::in_memory` needs the feature `memory` of `tower-lock`",
    label = "the feature `memory` is off",
    note = "turn it on in Cargo.toml: `tower-lock = {{ version = \"..\", features = [\"memory\"] }}`"
)]
pub trait Memory {}

/// Items of the feature `signal`.
#[cfg(not(feature = "signal"))]
#[diagnostic::on_unimplemented(
    message = "`LockManager::shutdown_on_signal` needs the feature `signal` of `tower-lock`",
    label = "the feature `signal` is off",
    note = "turn it on in Cargo.toml: `tower-lock = {{ version = \"..\", features = [\"signal\"] }}`, or call `LockManager::shutdown` after a signal"
)]
pub trait Signal {}

/// Items of the feature `test-util`.
#[cfg(not(feature = "test-util"))]
#[diagnostic::on_unimplemented(
    message = "`HeldLock::for_test` needs the feature `test-util` of `tower-lock`",
    label = "the feature `test-util` is off",
    note = "turn it on for tests alone, under `[dev-dependencies]` in Cargo.toml: `tower-lock = {{ version = \"..\", features = [\"test-util\"] }}`"
)]
pub trait TestUtil {}
