//! Handlers that finish after their client disconnected.

use std::sync::Arc;

use super::{
    client::ClientId,
    shares::{RouteId, Share, Shares},
};
use crate::{
    lock::Driver,
    telemetry::{metrics, throttle::ThrottledLog},
};

/// The detached handlers of one manager.
#[derive(Debug)]
pub(super) struct DetachedHandlers {
    shares: Arc<Shares>,
    warnings: ThrottledLog,
}

/// The permission to run one handler without its client. Its drop returns it.
#[derive(Debug)]
pub(super) struct DetachedPermit(#[expect(dead_code, reason = "its drop returns it")] Share);

impl DetachedHandlers {
    pub(super) fn new(max: usize) -> Self {
        Self { shares: Shares::new(max), warnings: ThrottledLog::default() }
    }
}

impl DetachedPermit {
    /// `None` at the limit; this is logged.
    pub(super) fn acquire(
        handlers: &DetachedHandlers,
        driver: &Driver,
        route: &RouteId,
        client: Option<ClientId>,
    ) -> Option<Self> {
        let DetachedHandlers { shares, warnings } = handlers;
        let Some(share) = shares.take(route.clone(), client, 1) else {
            if let Some(warning) = warnings.detached_limit_reached(driver.now(), shares.max, &route.name) {
                driver.report(warning);
            }
            return None;
        };
        metrics::detached_started();
        Some(Self(share))
    }
}

impl Drop for DetachedPermit {
    fn drop(&mut self) {
        metrics::detached_ended();
    }
}
