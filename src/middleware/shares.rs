//! A bound that all routes of a manager share, and each route with its clients.
//!
//! Hand-written in place of a semaphore: a route or a client under load leaves capacity for the
//! others.

use std::{collections::HashMap, sync::Arc};

use super::client::ClientId;
use crate::sync::Mutex;

/// A bound, and its use.
#[derive(Debug)]
pub(super) struct Shares {
    pub(super) max: usize,
    counts: Mutex<Counts>,
}

/// A part of a bound. Its drop returns it.
#[derive(Debug)]
pub(super) struct Share {
    shares: Arc<Shares>,
    route: RouteId,
    client: Option<ClientId>,
    amount: usize,
}

/// A route: its layer, and the path that it matched, because one layer may serve several.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct RouteId {
    pub(super) layer: usize,
    pub(super) name: String,
}

/// The use in total, by route, and by client of a route.
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

/// The part of a bound that only clients get that have nothing yet: an eighth.
const RESERVE_DIVISOR: usize = 8;

impl Shares {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, counts: Mutex::default() })
    }

    /// `None`: the route or the client has no capacity left.
    pub(super) fn take(self: &Arc<Self>, route: RouteId, client: Option<ClientId>, amount: usize) -> Option<Share> {
        let is_added = self.counts.lock().try_add(&route, client.as_ref(), amount, self.max);
        is_added.then(|| Share { shares: Arc::clone(self), route, client, amount })
    }
}

impl Counts {
    /// Adds an amount. Returns false if the route or the client has no capacity left (I11).
    ///
    /// A route may have as much as remains free. The first route under load gets half of it, the
    /// second one half of the rest, and a route without any gets something. A client may have as
    /// much as its route has left, by the same rule; a part is left to clients that have nothing.
    fn try_add(&mut self, route: &RouteId, client: Option<&ClientId>, amount: usize, max: usize) -> bool {
        let of_route = self.by_route.get(route);
        let of_client = of_route.zip(client).and_then(|(of_route, client)| of_route.by_client.get(client));
        let free = max.saturating_sub(self.total);
        let free_of_route = free.saturating_sub(of_route.map_or(0, |of_route| of_route.total));
        let free_of_client = of_client.map_or(free_of_route, |of_client| {
            free_of_route.saturating_sub(max / RESERVE_DIVISOR).saturating_sub(*of_client)
        });
        if amount > free_of_client {
            return false;
        }
        self.total += amount;
        let of_route = self.by_route.entry(route.clone()).or_default();
        of_route.total += amount;
        if let Some(client) = client {
            *of_route.by_client.entry(client.clone()).or_default() += amount;
        }
        true
    }

    fn remove(&mut self, route: &RouteId, client: Option<&ClientId>, amount: usize) {
        self.total -= amount;
        let Some(of_route) = self.by_route.get_mut(route) else { return };
        of_route.total -= amount;
        if let Some((client, count)) = client.and_then(|client| Some((client, of_route.by_client.get_mut(client)?))) {
            *count -= amount;
            if *count == 0 {
                of_route.by_client.remove(client);
            }
        }
        if of_route.total == 0 {
            self.by_route.remove(route);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shares.counts.lock().remove(&self.route, self.client.as_ref(), self.amount);
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
        let mut flood = |name: &str| (0..10_000).filter(|_| counts.try_add(&route(name), None, 1, 1024)).count();
        assert_eq!([flood("one"), flood("two"), flood("three")], [512, 256, 128]);
        assert!(counts.try_add(&route("honest"), None, 1, 1024));
        for (name, count) in [("one", 512), ("two", 256), ("three", 128), ("honest", 1)] {
            for _ in 0..count {
                counts.remove(&route(name), None, 1);
            }
        }
        assert_eq!((counts.total, counts.by_route.len()), (0, 0), "every entry is removed");
    }

    /// Guarantee: G4.
    #[test]
    fn flooding_clients_leave_a_part_for_others_of_their_route() {
        let mut counts = Counts::default();
        let client = |name: &str| ClientId::Key(ClientKey::new(name));
        let mut flood = |name: &str, amount| {
            (0..10_000).filter(|_| counts.try_add(&route("pay"), Some(&client(name)), amount, 1024)).count()
        };
        assert_eq!([flood("one", 1), flood("two", 2), flood("three", 1)], [299, 50, 33]);
        // However many accounts one client has, each of them gets one of the last eighth.
        let further = (0..50).map(|n| flood(&n.to_string(), 1)).sum::<usize>();
        assert!((50..100).contains(&further), "{further}");
        assert!(counts.try_add(&route("pay"), Some(&client("honest")), 1, 1024));
        assert!(counts.try_add(&route("pay"), None, 1, 1024), "a client without a key");
        counts.remove(&route("pay"), None, 1);
        for (name, count, amount) in [("one", 299, 1), ("two", 50, 2), ("three", 33, 1), ("honest", 1, 1)] {
            for _ in 0..count {
                counts.remove(&route("pay"), Some(&client(name)), amount);
            }
        }
        assert_eq!((counts.total, counts.by_route[&route("pay")].by_client.len()), (further, 50));
    }

    #[test]
    fn limit_holds_for_all_routes_together() {
        for max in [0, 1, 2, 7] {
            let mut counts = Counts::default();
            let added = (0..100).filter(|n| counts.try_add(&route(&n.to_string()), None, 1, max)).count();
            assert_eq!((added, counts.total), (max, max), "one each");
        }
    }
}
