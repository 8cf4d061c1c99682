//! Which server a key lives on, how to connect to it, and when it has moved.
//!
//! The calls of a store name a key, and never a server: [`Servers`] has the server of each key. How
//! a server is found, and what happens when it moves, is in one [`Topology`] for each kind of
//! deployment.

mod url;
mod parameters;
pub(super) mod address;
mod servers;
mod locate;
mod single;
mod sentinel;
pub(super) mod cluster;
pub(super) mod slot_map;
mod pool;
pub(super) mod server;
pub(super) mod connection;
pub(super) mod endpoint;
pub(super) mod socket;
pub(super) mod replicas;

pub(super) use self::{
    cluster::{ClusterNode, Nodes},
    endpoint::Endpoint,
    locate::{Signs, Topology},
    pool::Pooled,
    sentinel::Sentinels,
    servers::Servers,
    single::Single,
};
