//! The parts of replay that need no lock: the key and the fingerprint of a request, and the answer
//! that is kept for its retries.

pub(crate) mod idempotency_key;
pub(crate) mod fingerprint;
pub(crate) mod keep;
pub(crate) mod headers;
pub(crate) mod answer;
pub(crate) mod recorder;
pub(crate) mod docs_link;
