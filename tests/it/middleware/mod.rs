//! What a request and its client receive from a layer.

mod layers;
mod configuration;
mod several_keys;
mod permits;
mod newest;
mod tickets;
mod edit_locks;
mod rejections;
mod replay;
mod request_body;
mod body_budget;
mod release_timing;
mod streams;
mod disconnect;
mod sockets;
