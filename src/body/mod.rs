//! Bodies of requests: buffered before the lock is acquired, or streamed under it.

mod buffer;
pub(crate) mod budget;
pub(crate) mod pace;
pub(crate) mod reader;
pub(crate) mod request_body;
mod timer;
