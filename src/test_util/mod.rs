//! For tests: of a store, of a service, and of this crate. Needs the feature `test-util`.
//!
//! With it, leases are measured by Tokio's clock, so that `tokio::time::pause` stops them, too.

pub mod conformance;
mod store;

pub use self::store::{Chaos, Fault, Hand, TestStore, Verb};
pub use crate::clock::Clock;
#[doc(hidden)]
pub use crate::lock::decisions;
