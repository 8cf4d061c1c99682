//! The same work with tower-lock and with other locks, interleaved in one run.
//!
//! | module | content |
//! |---|---|
//! | [`questions`] | one file for each question: the work, its table, its chart and its goals |
//! | [`peers`] | locks as users write them by hand |
//! | [`redis_lock`] | all locks on Redis, behind one interface |
//! | [`database_lock`] | all locks on PostgreSQL and on MySQL, behind one interface |
//! | [`share_lock`] | permits, and readers beside a writer, on Redis, behind one interface |
//! | [`several_lock`] | all locks of several keys on Redis, behind one interface |
//! | [`web`], [`load`], [`contender`] | the work of other processes
//! | [`servers`] | one Redis, or several servers |
//! | [`measure`] | clocks, counters of Redis, statistics |
//! | [`report`] | tables and goals |
//! | [`chart`] | pictures |

pub mod chart;
pub mod contender;
pub mod database_lock;
pub mod load;
pub mod measure;
pub mod memory_lock;
pub mod peers;
pub mod questions;
pub mod redis_lock;
pub mod report;
pub mod servers;
pub mod several_lock;
pub mod share_lock;
pub mod web;
