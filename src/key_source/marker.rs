//! Type parameters that keep the implementations of [`KeyFn`](super::from_fn::KeyFn) and
//! [`KeyFnOutput`](super::from_fn::KeyFnOutput) apart.

/// All extractors of the key function read the head of the request.
#[doc(hidden)]
#[derive(Debug)]
pub enum HeadOnly {}

/// The last extractor of the key function reads the body.
#[doc(hidden)]
#[derive(Debug)]
pub enum NeedsBody {}

/// The key function returns its key.
#[doc(hidden)]
#[derive(Debug)]
pub enum Ready {}

/// The key function returns a future of its key.
#[doc(hidden)]
#[derive(Debug)]
pub enum Async {}
