//! A deterministic simulation of many processes, one Redis and an unreliable network, in virtual
//! time.
//!
//! The simulation runs the shipped code: the lock state machine, the codec and the
//! `.lua` files, on a [fake Redis](fake) that `tests/differential.rs` compares with a real one. A
//! [`process`] stands in for the sockets, tasks and timers between them.
//!
//! - A [`simulation`] is one seed: two to four processes whose clock rates differ by up to 1 %, one
//!   or two keys, and connections that keep the order of each direction. Faults: delays with
//!   spikes; connections that break while most of the requests in flight still run, up to 1.5 s
//!   later; messages lost and duplicated; scripts run twice; processes that crash and restart,
//!   freeze, or lose the network; cancelled waiters and dropped sections; a frozen server.
//!   [Options](simulation::Options) add force releases, a lost counter, `FLUSHALL`, a server clock
//!   that is set, foreign clients that lock as Redisson does, requests that share calls, callers
//!   that need several keys, and work whose key is left to a ticket between its steps. In two
//!   simulations of three the store blocks a key for the lease only: the lock-delay would hide an
//!   overlap.
//! - After every step: no section starts while another one is within its deadline, nor within a
//!   lock-delay or a minimum hold; tokens rise; no work is polled after its deadline. On the server
//!   every lock has a TTL and one holder, fences rise, no process overtakes a live one in the
//!   queue, only subscribed processes get offers, and a forgotten id has no data and never gets
//!   any.
//! - One step at a time takes the place of a ticket, within its gap, and none after the last one.
//!   Meanwhile no other section starts.
//! - A caller that waits for a key holds smaller keys only, and the loss of one key is the loss of
//!   all.
//! - Without faults: no key is idle while a waiter exists, no waiter is overtaken, local handoffs
//!   are bounded in time, waiters of an unresponsive server are rejected, no section is lost, and
//!   at the end no data is left, on the server or in a process.
//! - [Mutants](mutants), broken scripts and processes, prove that the checks find errors
//!   (`tests/mutants.rs`). Interleavings that random simulations rarely reach are delivered step by
//!   step with a [`manual_scheduler`] (`tests/directed.rs`).
//!
//! ```text
//! cargo run -p tower-lock-simulator -- 0 10000                     # seeds 0 to 9,999
//! cargo run -p tower-lock-simulator -- 2549 --trace                # one seed, with all its events
//! cargo run -p tower-lock-simulator -- 0 1000 --option force
//! cargo run -p tower-lock-simulator -- 0 1000 --mutant no_call_expiry --stop
//! ```
//!
//! The simulation does not cover tasks, sockets and the runtime (`tests/it/redis` and the storm
//! do), a Redis that loses acknowledged data (except that fences rise), and several servers.
//!
//! Two effects are accepted. A renewal of a crashed process counts from when it runs, even if it
//! was in flight for long. A process without a reply for 41 s forgets its ids; if other waiters
//! keep such a queue entry alive, the process releases it when it gets an offer.
#![allow(clippy::must_use_candidate, reason = "only its own tests use it")]

pub mod fake;
pub mod manual_scheduler;
pub mod mutants;
pub mod checker;
pub mod record_checker;
pub mod process;
pub mod simulation;
pub mod redlock;
