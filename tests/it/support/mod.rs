//! Helpers of the tests of the examples.

pub(crate) mod programs;

pub(crate) use tower_lock_testkit::{
    app::{fetch, send, text},
    locks::store_and_locks,
    wait::{settle, soon},
};
