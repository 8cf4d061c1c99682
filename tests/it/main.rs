//! What the crate promises, from outside: each module is a part of the promise, each test a sentence of it.

#![allow(clippy::disallowed_methods, reason = "tests spawn their clients, and know the runtime they are in")]

mod body_in;
mod cases;
mod endings;
mod extractor;
mod key_functions;
mod keys;
mod layers;
mod locks;
mod policies;
mod rejections;
mod span;
mod storm;
mod tidy;

mod support;
