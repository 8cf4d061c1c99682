//! Handlers that finish after their client disconnected.
//!
//! Hand-written in place of a semaphore: the bound is shared between routes, so that one route
//! under load leaves capacity for the others.

use std::{collections::HashMap, sync::Arc};

use crate::{
    lock::Driver,
    sync::Mutex,
    telemetry::{metrics::DetachedMetrics, throttle::ThrottledLog},
};

/// The detached handlers of one manager.
#[derive(Debug)]
pub(super) struct DetachedHandlers {
    max: usize,
    counts: Mutex<Counts>,
    warnings: ThrottledLog,
}

/// The number of detached handlers, in total and by route.
#[derive(Debug, Default)]
struct Counts {
    total: usize,
    by_route: HashMap<RouteId, usize>,
}

/// A route: its layer, and the path that it matched, because one layer may serve several.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct RouteId {
    pub(super) layer: usize,
    pub(super) name: String,
}

/// The permission to run one handler without its client. Its drop returns it.
#[derive(Debug)]
pub(super) struct DetachedPermit {
    handlers: Arc<DetachedHandlers>,
    route: RouteId,
    _metrics: DetachedMetrics,
}

impl DetachedHandlers {
    pub(super) fn new(max: usize) -> Self {
        Self { max, counts: Mutex::default(), warnings: ThrottledLog::default() }
    }
}

impl Counts {
    /// Adds one handler of this route. Returns false if the route has no capacity left (I11).
    ///
    /// A route may have as many handlers as remain free. The first route under load gets half of
    /// them, the second one half of the rest, and a route without any gets at least one.
    fn try_add(&mut self, route: &RouteId, max: usize) -> bool {
        let free = max.saturating_sub(self.total);
        if self.by_route.get(route).copied().unwrap_or(0) >= free {
            return false;
        }
        self.total += 1;
        *self.by_route.entry(route.clone()).or_default() += 1;
        true
    }

    fn remove(&mut self, route: &RouteId) {
        self.total -= 1;
        if let Some(count) = self.by_route.get_mut(route) {
            *count -= 1;
            if *count == 0 {
                self.by_route.remove(route);
            }
        }
    }
}

impl DetachedPermit {
    /// `None` at the limit; this is logged.
    pub(super) fn acquire(handlers: &Arc<DetachedHandlers>, driver: &Driver, route: RouteId) -> Option<Self> {
        let DetachedHandlers { max, counts, warnings } = &**handlers;
        let is_added = counts.lock().try_add(&route, *max);
        if !is_added {
            if let Some(warning) = warnings.detached_limit_reached(driver.now(), *max, &route.name) {
                driver.report(warning);
            }
            return None;
        }
        Some(Self { handlers: Arc::clone(handlers), route, _metrics: DetachedMetrics::start() })
    }
}

impl Drop for DetachedPermit {
    fn drop(&mut self) {
        self.handlers.counts.lock().remove(&self.route);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(name: &str) -> RouteId {
        RouteId { layer: 0, name: name.to_owned() }
    }

    #[test]
    fn flooded_route_leaves_permits_for_other_routes() {
        let mut counts = Counts::default();
        let mut flood = |name: &str| (0..10_000).filter(|_| counts.try_add(&route(name), 1024)).count();
        assert_eq!([flood("one"), flood("two"), flood("three")], [512, 256, 128]);
        assert!(counts.try_add(&route("honest"), 1024));
        for (name, count) in [("one", 512), ("two", 256), ("three", 128), ("honest", 1)] {
            for _ in 0..count {
                counts.remove(&route(name));
            }
        }
        assert_eq!((counts.total, counts.by_route.len()), (0, 0), "every entry is removed");
    }

    #[test]
    fn limit_holds_for_all_routes_together() {
        for max in [0, 1, 2, 7] {
            let mut counts = Counts::default();
            let added = (0..100).filter(|n| counts.try_add(&route(&n.to_string()), max)).count();
            assert_eq!((added, counts.total), (max, max), "one each");
        }
    }
}
