//! What is locked.

pub use crate::lock_key::{
    RawKeyError,
    part::{DisplayPart, KeyPart, KeyTuple, PartWriter, display},
};
