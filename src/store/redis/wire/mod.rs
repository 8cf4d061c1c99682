//! The protocol with Redis: names, scripts, replies, messages. Pure; the simulator uses it with a
//! Redis of its own.
//!
//! A script is one atomic step for all keys that it names, so that every rule of the store that
//! reads before it writes is in a script, and none is in a process.

// In the order of a call.
mod slots;
mod keyspace;
mod requests;
mod script;
mod replies;
mod redlock;

pub use self::{
    keyspace::{InvalidName, Keyspace, LockName, REDISSON_CHANNEL, RawChannel, RawNames},
    redlock::{RaiseRequest, Raised, Vote, parse_raise, parse_vote, parse_withdraw},
    replies::{
        FenceMark, KeyError, KeyReplies, SelfTestReport, Timed, UnexpectedReply, fence_mark, parse_acquire,
        parse_delete_record, parse_force, parse_inspect, parse_release, parse_renew, parse_scan, parse_self_test,
        parse_yield,
    },
    script::ScriptCall,
    slots::SLOTS,
};
