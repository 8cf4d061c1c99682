//! The protocol with Redis: names, scripts, replies, messages, time. Pure; the simulator uses it
//! with a Redis of its own.

// In the order of a call.
mod keyspace;
mod server_clock;
mod batch;
mod codec;
mod script;

pub use self::{
    batch::{MAX_REQUESTS_PER_CALL, Shareable, next_call},
    codec::{
        KeyError, SelfTestReport, Timed, UnexpectedReply, escape_control, fence_was_replaced, parse_acquire,
        parse_delete_record, parse_force, parse_inspect, parse_release, parse_renew, parse_scan, parse_self_test,
        parse_yield,
    },
    keyspace::{InvalidName, Keyspace},
    script::ScriptCall,
    server_clock::ServerClock,
};
#[cfg(feature = "__internals")]
pub use self::{codec::KeyReplies, keyspace::LockName};
