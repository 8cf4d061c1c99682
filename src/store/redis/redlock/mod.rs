//! Locks on a majority of independent Redis servers: Redlock, with a fence.
//!
//! A server that restarts without its data, stops, or is separated does not stop the locks, and
//! does not free them while a majority of the others has them. Nothing replicates between the
//! servers, so there is no failover to wait for.
//!
//! # Protocol
//!
//! 1. *Vote* (`vote.lua`): each server grants the key if it is free there. Such a grant is
//!    incomplete: its fence ends in `?`, and it ends by itself when the call has expired.
//! 2. A majority of votes decides the fence of the acquisition: the largest one among them. Without
//!    a majority the votes are *withdrawn* (`withdraw.lua`), which spares complete grants.
//! 3. *Raise* (`raise.lua`): each server that still has the vote keeps that fence, and the lease.
//!    Every server raises its counter to the fence. The acquisition holds the key when a majority
//!    has raised.
//!
//! A release goes to all servers; the others of its majority are not waited for. All calls to one
//! server are on one connection, which keeps their order: a release finds the grant of its votes. A
//! server that does not confirm a release keeps the lock until its lease ends. A renewal counts
//! if a majority has extended the lease. The deadline of a holder counts from before the vote (I3),
//! less the drift: so the time that vote and raise took is a part of its lease, as Redlock demands,
//! and each call expires at the server.
//!
//! # Why two holders exclude each other
//!
//! Their majorities have a server in common. It raises a fence only for an acquisition that it has
//! a grant of, and it has one grant at a time. So the raise of the second holder there comes after
//! the end of the first grant there: after a release, or after a lease, which ends later than the
//! deadline of its holder.
//!
//! # Why the fence rises
//!
//! Take the server that the majorities of two successive holders have in common. It raised its
//! counter to the fence of the first one, while it had its grant. Its vote for the second one came
//! later, with a fence above the counter, and the fence of the second one is at least that. The
//! largest of several counters that are not raised would not do: of two majorities, the server with
//! the large counter may be in the first one alone.
//!
//! A server that restarts empty has its clock for a counter. Other servers have raised theirs,
//! also those that did not grant the key: a fence falls only if one of a majority has restarted
//! empty, each other one has missed the raise, and the clock of the restarted one is behind the
//! fence. It also falls if a majority restarts empty and their clocks are behind. Servers whose
//! fences differ by half a day form no majority, because a server keeps no fence that is a day
//! ahead of its clock.
//!
//! # What breaks the exclusion
//!
//! A server of the majority of a holder that loses the grant before its lease, by a restart without
//! its data or by a step of its clock, while a server outside of that majority is free. If all
//! servers had granted the key, it takes a majority of such losses. Hence the delayed restart: a
//! server without its data stays down for one lease.

// In the order of a call.
mod builder;
mod member;
mod node;
#[allow(unreachable_pub, reason = "public for the simulator alone: feature `__internals`")]
pub mod quorum;
mod group;
mod acquires;
mod list;
mod store;

pub use self::{builder::RedlockStoreBuilder, store::RedlockStore};
