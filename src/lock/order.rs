//! Keys that requests acquire one after the other, in both orders.
//!
//! Two requests that hold one key each, and wait for the key of the other one, wait until a
//! timeout. This happens rarely, and under load. The two orders are seen earlier: each is recorded
//! when it first occurs, and a pair of namespaces with both is reported once. A request with one
//! lock is not recorded.

use std::{collections::HashMap, sync::Arc};

use super::request_scope::RequestScope;
use crate::{
    limits::MAX_ORDERED_PAIRS,
    lock_key::LockKey,
    owner::Owner,
    sync::Mutex,
    telemetry::notice::{self, BothOrders},
};

/// The orders of one manager. Only calls that wait count: the others end at once.
#[derive(Debug, Default)]
pub(super) struct LockOrder {
    /// By two namespaces in order. The two are the same for keys of one namespace, whose texts are
    /// then compared.
    pairs: Mutex<HashMap<[Arc<str>; 2], Pair>>,
}

/// The route that first acquired the keys in an order.
#[derive(Debug, Default)]
struct Pair {
    ascending: Option<Arc<str>>,
    descending: Option<Arc<str>>,
}

impl LockOrder {
    /// Records that a call of this owner waits for these keys, in their order.
    pub(super) fn waits(&self, owner: Option<&Owner>, keys: &[LockKey]) {
        if let Some(owner) = owner.filter(|owner| owner.has_locks()) {
            let held = owner.held_keys();
            for key in keys.iter().filter(|key| !held.contains(key)) {
                held.iter().for_each(|held| self.record(held, key));
            }
        }
        // The keys of one namespace are next to each other.
        let mut firsts: Vec<&LockKey> = Vec::new();
        for pair in keys.windows(2) {
            if pair[0].namespace() == pair[1].namespace() {
                self.record(&pair[0], &pair[1]);
            } else {
                firsts.push(&pair[0]);
                firsts.iter().for_each(|first| self.record(first, &pair[1]));
            }
        }
    }

    fn record(&self, held: &LockKey, key: &LockKey) {
        let (from, to) = (held.namespace(), key.namespace());
        let is_ascending = if from == to { held < key } else { from < to };
        let names = if from <= to { [from, to] } else { [to, from] }.map(Arc::from);
        let mut pairs = self.pairs.lock();
        if pairs.len() >= MAX_ORDERED_PAIRS && !pairs.contains_key(&names) {
            return;
        }
        let pair = pairs.entry(names.clone()).or_default();
        let seen = if is_ascending { &mut pair.ascending } else { &mut pair.descending };
        if seen.is_some() {
            return;
        }
        *seen = Some(RequestScope::current().map_or_else(|| "of no request".into(), |request| request.route().into()));
        let Pair { ascending: Some(ascending), descending: Some(descending) } = pair else { return };
        let (ascending, descending) = (Arc::clone(ascending), Arc::clone(descending));
        drop(pairs);
        notice::both_orders(&BothOrders { names, ascending, descending });
    }
}
