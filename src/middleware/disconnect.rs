//! Handlers that finish after their client disconnected.
//!
//! Hand-written in place of a semaphore: the bound is shared between routes, and the part of a
//! route between its clients, so that one of them under load leaves capacity for the others.

use std::{collections::HashMap, sync::Arc};

use super::client::ClientId;
use crate::{
    lock::Driver,
    sync::Mutex,
    telemetry::{metrics, throttle::ThrottledLog},
};

/// The detached handlers of one manager.
#[derive(Debug)]
pub(super) struct DetachedHandlers {
    max: usize,
    counts: Mutex<Counts>,
    warnings: ThrottledLog,
}

/// The number of detached handlers: in total, by route, and by client of a route.
#[derive(Debug, Default)]
struct Counts {
    total: usize,
    by_route: HashMap<RouteId, OfRoute>,
}

#[derive(Debug, Default)]
struct OfRoute {
    total: usize,
    by_client: HashMap<ClientId, usize>,
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
    client: Option<ClientId>,
}

impl DetachedHandlers {
    pub(super) fn new(max: usize) -> Self {
        Self { max, counts: Mutex::default(), warnings: ThrottledLog::default() }
    }
}

impl Counts {
    /// Adds one handler. Returns false if its route or its client has no capacity left (I11).
    ///
    /// A route may have as many handlers as remain free. The first route under load gets half of
    /// them, the second one half of the rest, and a route without any gets at least one. A client
    /// may have as many as its route has left, by the same rule.
    fn try_add(&mut self, route: &RouteId, client: Option<&ClientId>, max: usize) -> bool {
        let of_route = self.by_route.get(route);
        let of_client = of_route.zip(client).and_then(|(of_route, client)| of_route.by_client.get(client));
        let free = max.saturating_sub(self.total);
        let free_of_route = free.saturating_sub(of_route.map_or(0, |of_route| of_route.total));
        if free_of_route == 0 || of_client.is_some_and(|count| *count >= free_of_route) {
            return false;
        }
        self.total += 1;
        let of_route = self.by_route.entry(route.clone()).or_default();
        of_route.total += 1;
        if let Some(client) = client {
            *of_route.by_client.entry(client.clone()).or_default() += 1;
        }
        true
    }

    fn remove(&mut self, route: &RouteId, client: Option<&ClientId>) {
        self.total -= 1;
        let Some(of_route) = self.by_route.get_mut(route) else { return };
        of_route.total -= 1;
        if let Some((client, count)) = client.and_then(|client| Some((client, of_route.by_client.get_mut(client)?))) {
            *count -= 1;
            if *count == 0 {
                of_route.by_client.remove(client);
            }
        }
        if of_route.total == 0 {
            self.by_route.remove(route);
        }
    }
}

impl DetachedPermit {
    /// `None` at the limit; this is logged.
    pub(super) fn acquire(
        handlers: &Arc<DetachedHandlers>,
        driver: &Driver,
        route: RouteId,
        client: Option<ClientId>,
    ) -> Option<Self> {
        let DetachedHandlers { max, counts, warnings } = &**handlers;
        let is_added = counts.lock().try_add(&route, client.as_ref(), *max);
        if !is_added {
            if let Some(warning) = warnings.detached_limit_reached(driver.now(), *max, &route.name) {
                driver.report(warning);
            }
            return None;
        }
        metrics::detached_started();
        Some(Self { handlers: Arc::clone(handlers), route, client })
    }
}

impl Drop for DetachedPermit {
    fn drop(&mut self) {
        self.handlers.counts.lock().remove(&self.route, self.client.as_ref());
        metrics::detached_ended();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::middleware::ClientKey;

    fn route(name: &str) -> RouteId {
        RouteId { layer: 0, name: name.to_owned() }
    }

    #[test]
    fn flooded_route_leaves_permits_for_other_routes() {
        let mut counts = Counts::default();
        let mut flood = |name: &str| (0..10_000).filter(|_| counts.try_add(&route(name), None, 1024)).count();
        assert_eq!([flood("one"), flood("two"), flood("three")], [512, 256, 128]);
        assert!(counts.try_add(&route("honest"), None, 1024));
        for (name, count) in [("one", 512), ("two", 256), ("three", 128), ("honest", 1)] {
            for _ in 0..count {
                counts.remove(&route(name), None);
            }
        }
        assert_eq!((counts.total, counts.by_route.len()), (0, 0), "every entry is removed");
    }

    #[test]
    fn flooding_client_leaves_permits_for_others_of_its_route() {
        let mut counts = Counts::default();
        let client = |name: &str| ClientId::Key(ClientKey::new(name));
        let mut flood = |name| (0..10_000).filter(|_| counts.try_add(&route("pay"), Some(&client(name)), 1024)).count();
        assert_eq!([flood("one"), flood("two"), flood("three")], [342, 114, 38]);
        assert!(counts.try_add(&route("pay"), Some(&client("honest")), 1024));
        assert!(counts.try_add(&route("pay"), None, 1024), "a client without a key");
        counts.remove(&route("pay"), None);
        for (name, count) in [("one", 342), ("two", 114), ("three", 38), ("honest", 1)] {
            for _ in 0..count {
                counts.remove(&route("pay"), Some(&client(name)));
            }
        }
        assert_eq!((counts.total, counts.by_route.len()), (0, 0), "every entry is removed");
    }

    #[test]
    fn limit_holds_for_all_routes_together() {
        for max in [0, 1, 2, 7] {
            let mut counts = Counts::default();
            let added = (0..100).filter(|n| counts.try_add(&route(&n.to_string()), None, max)).count();
            assert_eq!((added, counts.total), (max, max), "one each");
        }
    }
}
