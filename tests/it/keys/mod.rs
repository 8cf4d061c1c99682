//! Keys: their text, and the functions and fields that make them.

mod text;
mod functions;
mod fields;
