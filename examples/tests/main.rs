//! The examples as processes, with real databases and a real Redis.

#![allow(clippy::disallowed_methods, reason = "tests spawn their clients, and know the runtime they are in")]

// Their own tests. A program of each would be linked twice.
#[path = "../grpc_status.rs"]
#[expect(dead_code, reason = "its `main`")]
mod grpc_status;
#[cfg(feature = "sessions")]
#[path = "../per_session.rs"]
#[expect(dead_code, reason = "its `main`")]
mod per_session;
#[path = "../service_stack.rs"]
#[expect(dead_code, reason = "its `main`")]
mod service_stack;

mod services;

mod programs;
mod shown_commands;
mod fencing;
#[cfg(feature = "redis")]
mod instances;
