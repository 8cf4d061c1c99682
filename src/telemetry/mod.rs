//! Spans of requests.

pub(crate) mod route;
pub(crate) mod span;
