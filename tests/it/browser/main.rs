//! The pages of the console, and that of an example, in a real browser: what only a browser
//! decides. Each test has a Chromium of its own.
//!
//! Without `chromium` and `chromedriver` the tests pass, with a note on stderr that they were
//! skipped.

#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

mod support;

mod content;
mod editors;
mod layout;
mod origins;
mod pictures;
mod revocation;
