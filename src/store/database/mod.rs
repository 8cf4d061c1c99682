//! Stores in a database, without its driver.
//!
//! A lock is a row, and each operation calls one function of the database. Databases differ in
//! their drivers, in the text of their functions, and in messages. These modules have the rest: the
//! arguments of each function, its rows as replies, the connections, and calls that are repeated or
//! have expired.

// In the order of a call.
mod store;
mod acquires;
mod releases;
mod renewals;
mod shared;
mod server;
mod connections;
pub(crate) mod driver;
pub(crate) mod replies;
mod error;
mod sweep;

pub(crate) use self::{
    driver::{Argument, Database, Row, micros},
    error::{CallError, DriverError},
    server::{Server, send},
    store::DatabaseStore,
};
