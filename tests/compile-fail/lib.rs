//! Code that must not compile: see `tests/`.
