//! What is said to Redis, and what it says: names, scripts, replies, messages, time. Pure; a simulator speaks it to a Redis of its own.

// In the order of a call.
mod keyspace;
mod server_clock;
mod codec;
mod script;

pub use self::{
    codec::{
        InTime, Misread, SelfTested, acquired, escaped, forced, inspected, is_healed, released, renewed, self_tested,
        yielded,
    },
    keyspace::{Names, NotAName},
    script::ScriptCall,
    server_clock::ServerClock,
};
