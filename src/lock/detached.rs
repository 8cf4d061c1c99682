//! Handlers that finish without their client.

use std::{collections::HashMap, sync::Arc};

use super::driver::Driver;
use crate::{
    sync::Mutex,
    telemetry::{metrics, throttle::ThrottledLog},
};

/// How many there are, and of which route.
#[derive(Debug)]
pub(super) struct Count {
    max: usize,
    now: Mutex<Places>,
    complaints: ThrottledLog,
}

/// Of all routes, and of each that has one.
#[derive(Debug, Default)]
struct Places {
    all: usize,
    of_route: HashMap<DetachedRoute, usize>,
}

/// Which route a handler is of: its layer, and the path that it matched, where one layer stands on several.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DetachedRoute {
    pub(crate) layer: usize,
    pub(crate) name: String,
}

/// A place among those that finish without their client, as long as it lives.
#[derive(Debug)]
pub(crate) struct Detached {
    core: Arc<Driver>,
    route: DetachedRoute,
    _counted: metrics::DetachedMetrics,
}

impl Count {
    pub(super) fn new(max: usize) -> Self {
        Self { max, now: Mutex::default(), complaints: ThrottledLog::default() }
    }

    pub(super) fn max(&self) -> usize {
        self.max
    }
}

impl Places {
    /// One more of this route, if there is room (I11): it may have as many as stay free for all. So
    /// one that is flooded takes half of them, a second one half of the rest, and a route that has
    /// none finds a place.
    fn take(&mut self, route: &DetachedRoute, max: usize) -> bool {
        let left = max.saturating_sub(self.all);
        if self.of_route.get(route).copied().unwrap_or(0) >= left {
            return false;
        }
        self.all += 1;
        *self.of_route.entry(route.clone()).or_default() += 1;
        true
    }

    fn give_back(&mut self, route: &DetachedRoute) {
        self.all -= 1;
        if let Some(of_route) = self.of_route.get_mut(route) {
            *of_route -= 1;
            if *of_route == 0 {
                self.of_route.remove(route);
            }
        }
    }
}

impl Detached {
    /// `None`: too many do already.
    pub(crate) fn new(core: &Arc<Driver>, route: DetachedRoute) -> Option<Self> {
        let Count { max, now, complaints } = &core.detached;
        let is_taken = now.lock().take(&route, *max);
        if !is_taken {
            if let Some(complaint) = complaints.detached_limit_reached(core.clock.now(), *max, &route.name) {
                core.report(complaint);
            }
            return None;
        }
        Some(Self { core: Arc::clone(core), route, _counted: metrics::DetachedMetrics::start() })
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        self.core.detached.now.lock().give_back(&self.route);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(name: &str) -> DetachedRoute {
        DetachedRoute { layer: 0, name: name.to_owned() }
    }

    #[test]
    fn flooded_route_leaves_permits_for_other_routes() {
        let mut places = Places::default();
        let mut flood = |name: &str| (0..10_000).filter(|_| places.take(&route(name), 1024)).count();
        assert_eq!([flood("one"), flood("two"), flood("three")], [512, 256, 128]);
        assert!(places.take(&route("honest"), 1024));
        for (name, count) in [("one", 512), ("two", 256), ("three", 128), ("honest", 1)] {
            for _ in 0..count {
                places.give_back(&route(name));
            }
        }
        assert_eq!((places.all, places.of_route.len()), (0, 0), "nothing of them is left");
    }

    #[test]
    fn limit_holds_for_all_routes_together() {
        for max in [0, 1, 2, 7] {
            let mut places = Places::default();
            let taken = (0..100).filter(|n| places.take(&route(&n.to_string()), max)).count();
            assert_eq!((taken, places.all), (max, max), "one each");
        }
    }
}
