//! Utilities for tests of stores and of services. Needs the feature `test-util`.
//!
//! With this feature, leases follow Tokio's clock while a test has paused it
//! (`tokio::time::pause`). Otherwise they use the production clock. Clock reads are slower with the
//! feature, so enable it only under `[dev-dependencies]`, together with the feature `test-util` of
//! `tokio`.
//!
//! A test of a handler with a store that does not reply:
//!
//! ```
//! # use std::time::Duration;
//! # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
//! # use tower::ServiceExt;
//! use tower_lock::{LockLayer, LockManager, test_util::{Fault, StoreOp, TestStore}, key};
//!
//! # async fn claim() {}
//! fn app(locks: &LockManager) -> Router {
//!     let layer = LockLayer::new(locks, key::fixed(("claim",)));
//!     Router::new().route("/claim", post(claim).route_layer(layer))
//! }
//!
//! // In a test: `#[tokio::test(start_paused = true)]`.
//! #[tokio::main(flavor = "current_thread", start_paused = true)]
//! async fn main() {
//!     let store = TestStore::new();
//!     let app = app(&LockManager::new(store.clone()));
//!     store.on(StoreOp::Acquire).fault(Fault::Hang);
//!     let claim = || app.clone().oneshot(Request::post("/claim").body(Body::empty()).unwrap());
//!     assert_eq!(claim().await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
//!     store.on(StoreOp::Acquire).fault(Fault::None);
//!     assert_eq!(claim().await.unwrap().status(), StatusCode::OK);
//!     assert_eq!(store.held_count(), 0);
//! }
//! ```
//!
//! To simulate a machine that is suspended past a lease, use one [`Clock`] for store and manager:
//!
//! ```
//! # use std::time::Duration;
//! # use tower_lock::{LockError, LockManager, test_util::{Clock, TestStore}};
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), LockError> {
//! let clock = Clock::default();
//! let store = TestStore::with_clock(clock.clone());
//! let locks = LockManager::builder(store).clock(clock.clone()).build();
//! let guard = locks.lock(("account", 7)).await?;
//! clock.jump(Duration::from_secs(60));
//! assert!(guard.held_lock().remaining().is_zero());
//! # Ok(())
//! # }
//! ```

pub mod conformance;
mod held_lock;
mod store;

pub use self::{
    held_lock::{held_lock, held_locks},
    store::{Chaos, Fault, FaultPoint, StoreOp, TestStore},
};
pub use crate::clock::Clock;
