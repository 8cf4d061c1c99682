//! The public behavior of the crate, one module per topic.

#![allow(clippy::disallowed_methods, reason = "tests spawn their clients, and know the runtime they are in")]

mod keys;
mod key_functions;
mod key_fields;
mod request_body;
mod body_budget;
mod layers;
mod policies;
mod rejections;
mod release_timing;
mod sockets;
mod streams;
mod disconnect;
mod extractor;
mod locked;
mod span;
mod locks;
mod renewal;
mod messages;
mod leases;
mod conformance;
mod reentry;
mod multi_instance;
mod known_lock_bugs;
mod forks;
mod hold_limits;
mod admin;
mod invariants;
mod cancel;
mod random;
mod metrics;
mod telemetry;
mod tidy;
