//! Deletes the rows of keys that are no longer used, a page at a time.
//!
//! A release keeps the row of its key, because the next lock of the key then writes no index. Every
//! instance sweeps: none needs to know of the others, and a row that one has locked is skipped by
//! the others.

use std::time::Duration;

use tokio::time::sleep;
use tokio_postgres::types::Type;

use super::{
    connection::Parameter,
    error::CallError,
    replies::{column, only},
    server::Server,
};
use crate::limits::{POSTGRES_SWEEP_INTERVAL, POSTGRES_SWEEP_PAUSE, POSTGRES_SWEEP_ROWS};

/// Sweeps for ever. An error is that of an outage, which the calls report.
pub(super) async fn run(server: &Server) {
    let mut after = String::new();
    loop {
        sleep(pause(&after)).await;
        after = page(server, &after).await.unwrap_or_default();
    }
}

/// The time before the next page. With jitter: instances that start together sweep one after the
/// other.
fn pause(after: &str) -> Duration {
    let pause = if after.is_empty() { POSTGRES_SWEEP_INTERVAL } else { POSTGRES_SWEEP_PAUSE };
    pause.mul_f64(0.5 + fastrand::f64())
}

/// Sweeps one page. Returns the key after which the next one begins; empty after the last one.
async fn page(server: &Server, after: &str) -> Result<String, CallError> {
    let parameters: [Parameter<'_>; 2] = [(&after, Type::TEXT), (&POSTGRES_SWEEP_ROWS, Type::INT8)];
    let rows = server.call(&server.release_conn, "sweep", &parameters).await?;
    let row = only(&rows)?;
    let next: Option<&str> = column(row, 0)?;
    let is_full = column::<i64>(row, 1)? >= POSTGRES_SWEEP_ROWS;
    // More records than one page has: the next page follows soon.
    Ok(next.map_or_else(|| if is_full { after.to_owned() } else { String::new() }, str::to_owned))
}
