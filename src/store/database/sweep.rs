//! Deletes the rows of keys that are no longer used, a page at a time.
//!
//! A release keeps the row of its key, because the next lock of the key then writes no index. Every
//! instance sweeps: none needs to know of the others, and a row that one has locked is skipped by
//! the others.

use std::time::Duration;

use tokio::time::sleep;

use super::{
    driver::{Argument, Database, Row},
    error::CallError,
    server::Server,
};
use crate::limits::{SWEEP_INTERVAL, SWEEP_PAUSE, SWEEP_ROWS};

/// Sweeps for ever. An error is that of an outage, which the calls report.
pub(super) async fn run<D: Database>(server: &Server<D>) {
    let mut after = String::new();
    loop {
        sleep(pause(&after)).await;
        after = page(server, after).await.unwrap_or_default();
    }
}

/// Sweeps one page. Returns the key after which the next one begins; empty after the last one.
async fn page<D: Database>(server: &Server<D>, after: String) -> Result<String, D::Error> {
    let arguments = [Argument::Text(Some(&after)), Argument::Number(SWEEP_ROWS)];
    let rows = server.call(&server.main_conn, "sweep", &arguments).await?;
    let row = rows.first().ok_or(CallError::UnexpectedReply)?;
    // More records than one page has: the next page follows soon.
    let is_full = row.number(1) >= Some(SWEEP_ROWS);
    Ok(row.text(0).unwrap_or(if is_full { after } else { String::new() }))
}

/// The time before the next page. With jitter: instances that start together sweep one after the
/// other.
fn pause(after: &str) -> Duration {
    let pause = if after.is_empty() { SWEEP_INTERVAL } else { SWEEP_PAUSE };
    pause.mul_f64(0.5 + fastrand::f64())
}
