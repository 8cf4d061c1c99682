//! Which server a key lives on, how to connect to it, and when it has moved.
//!
//! The calls of a store name a key, and never a server: [`Servers`] has the server of each key. How
//! a server is found, and what happens when it moves, is in one [`Topology`] for each kind of
//! deployment.

pub(crate) mod url;
pub(crate) mod parameters;
pub(in crate::store) mod address;
mod servers;
mod locate;
mod ask_all;
mod sentinel;
pub(in crate::store) mod cluster;
pub(crate) mod slot_map;
pub(in crate::store) mod server;
pub(in crate::store) mod connection;
pub(in crate::store) mod endpoint;
pub(crate) mod socket;
pub(in crate::store) mod replicas;

pub(in crate::store) use self::{
    cluster::Nodes,
    endpoint::Endpoint,
    locate::{Single, Topology},
    sentinel::Sentinels,
    server::Parts,
    servers::Servers,
};
