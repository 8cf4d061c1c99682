//! See `parsers.rs`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tower_lock::parsers::zookeeper(data));
