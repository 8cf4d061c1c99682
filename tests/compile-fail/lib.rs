//! Mistakes that do not compile: see `tests/`.
