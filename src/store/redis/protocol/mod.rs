//! What is said to Redis, and what it says: names, scripts, replies, messages, time. Pure; a simulator speaks it to a Redis of its own.

// In the order of a call.
mod names;
mod server_clock;
mod wire;
mod script;

pub use self::{
    names::{Names, NotAName},
    script::ScriptCall,
    server_clock::ServerClock,
    wire::{
        InTime, Misread, SelfTested, acquired, escaped, forced, inspected, is_healed, released, renewed, self_tested,
        yielded,
    },
};
