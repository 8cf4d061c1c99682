//! Many processes, one Redis, and what networks do to them, in virtual time.
//!
//! What runs is what is shipped: the crate's decisions ([`Table`]), its words on the wire and its reading of replies, and the very `.lua` files, on
//! a [fake Redis](fake) that a test holds to a real one (`tests/differential.rs`). What lies between, sockets, tasks and timers, is played by a [`process`].
//!
//! - A [`simulation`] is one seed: two to four processes whose clocks run at rates up to 1 % apart, one or two keys, connections in order each way.
//!   Delays with spikes; connections that break, while most of what was sent runs all the same, up to 1.5 s later; messages lost and doubled;
//!   scripts run twice; processes that crash and come back, are frozen, or cut off; waiters that leave, sections that are dropped; a server that stands still. As
//!   [options](simulation::Options): keys taken away by an operator, a lost counter, `FLUSHALL`, a server's clock that is set, strangers that lock as Redisson does.
//!   In two worlds of three the store keeps nothing beyond the lease: the lock-delay would hide an overlap.
//! - After every step: nobody begins while another one is in by its own deadline, nor within the lock-delay or a least hold; tokens rise; nothing
//!   is polled after its deadline; at the server every lock has an end and one holder, fences rise, nobody gets past a living process in the line, nobody who does not
//!   listen is offered anything, and an id that was forgotten has nothing there and never gets anything again.
//! - When it is calm: no key is idle while somebody waits, nobody is overtaken, a process hands on within itself for a bounded time, whoever waits for a server that
//!   does not answer is told so, no section is lost, and at the end nothing is left, there or here.
//! - [Mutants](mutants), wrong scripts and wrong shells, show that all of this is noticed (`tests/mutants.rs`); what random worlds hardly meet is
//!   delivered by hand, in a [`manual_scheduler`] (`tests/directed.rs`).
//!
//! ```text
//! cargo run -p tower-lock-simulator -- 0 10000                     # worlds 0 to 9 999
//! cargo run -p tower-lock-simulator -- 2549 --trace                # one, and everything that happens in it
//! cargo run -p tower-lock-simulator -- 0 1000 --option force
//! cargo run -p tower-lock-simulator -- 0 1000 --mutant no_until --stop
//! ```
//!
//! What it does not show: that tasks, sockets and the runtime do what the shell does (`tests/redis` and the storm are for that); anything
//! about a Redis that loses what it has acknowledged, other than that fences rise; several keys in one question; more than one server.
//!
//! Two things are known and accepted. A renewal of a process that has crashed counts from when it runs, however long it was under way. And
//! a process that hears nothing for 41 s forgets its ids; a place that others keep alive is given back when it is offered.
//!
//! [`Table`]: tower_lock::test_util::decisions::Table
#![allow(clippy::must_use_candidate, reason = "nobody but its own tests uses it")]

pub mod fake;
pub mod manual_scheduler;
pub mod mutants;
pub mod checker;
pub mod process;
pub mod simulation;
