//! Which master has which slot, as one node of a Cluster knows it. Pure.

use std::{collections::BTreeSet, fmt};

use deadpool_redis::redis::{Value, from_redis_value};

use crate::store::{error::escape_control, redis::wire::SLOTS};

/// A master of a Cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeName {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Empty if a redirection has named the node, and no map has it yet.
    pub(crate) id: String,
}

/// The masters of all slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotMap {
    /// The configuration of the node that was asked. A failover and a move make a larger one, so
    /// that of two maps the one with the larger number counts.
    pub(crate) epoch: u64,
    pub(crate) masters: Vec<NodeName>,
    /// By slot: the position in `masters`, or a larger number if no master has it.
    owners: Box<[u16]>,
    /// The ids of the replicas. A master of the last map may be one of them now.
    replicas: BTreeSet<String>,
}

/// Where a node sends a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Redirect {
    /// The slot moves there, and the key is not here any more. Otherwise the slot has moved.
    pub(crate) is_ask: bool,
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl SlotMap {
    const NO_MASTER: u16 = u16::MAX;
    /// The most masters of a Cluster, as its documentation advises. Each has connections.
    const MAX_MASTERS: usize = 1000;

    /// From the replies to `CLUSTER INFO` and `CLUSTER SLOTS` of a node at `asked_host`.
    pub(crate) fn parse(asked_host: &str, info: Value, slots: &Value) -> Option<Self> {
        let info: String = from_redis_value(info).ok()?;
        let epoch = info.lines().find_map(|line| line.strip_prefix("cluster_current_epoch:"))?.trim().parse().ok()?;
        let Value::Array(ranges) = slots else { return None };
        let owners = vec![Self::NO_MASTER; usize::from(SLOTS)].into();
        let mut map = Self { epoch, masters: Vec::new(), owners, replicas: BTreeSet::new() };
        for range in ranges {
            let Value::Array(range) = range else { return None };
            let [Value::Int(first), Value::Int(last), master, replicas @ ..] = range.as_slice() else { return None };
            let (first, last) = (usize::try_from(*first).ok()?, usize::try_from(*last).ok()?);
            if first > last {
                return None;
            }
            let owner = map.position(parse_node(asked_host, master)?)?;
            map.owners.get_mut(first..=last)?.fill(owner);
            let replicas = replicas.iter().filter_map(|replica| parse_node(asked_host, replica));
            map.replicas.extend(replicas.map(|replica| replica.id));
        }
        Some(map)
    }

    /// Whether this map is of the same Cluster as an older one: it has at least half of its
    /// masters, as masters or as replicas. An address may belong to another Cluster by now, whose
    /// epochs mean nothing here.
    pub(crate) fn continues(&self, older: &Self) -> bool {
        let is_here = |id: &String| self.masters.iter().any(|master| master.id == *id) || self.replicas.contains(id);
        let here = older.masters.iter().filter(|master| is_here(&master.id)).count();
        2 * here >= older.masters.len()
    }

    /// The position of the master of a slot in `masters`.
    pub(crate) fn owner(&self, slot: u16) -> Option<usize> {
        let owner = usize::from(*self.owners.get(usize::from(slot))?);
        (owner < self.masters.len()).then_some(owner)
    }

    /// Any slot of this master: one of them may be half moved.
    pub(crate) fn slot_of(&self, master: &NodeName) -> Option<u16> {
        let owner = self.masters.iter().position(|known| known == master)?;
        let from = fastrand::u16(..SLOTS);
        (from..SLOTS).chain(0..from).find(|slot| self.owner(*slot) == Some(owner))
    }

    fn position(&mut self, node: NodeName) -> Option<u16> {
        let position = self.masters.iter().position(|known| *known == node).unwrap_or_else(|| {
            self.masters.push(node);
            self.masters.len() - 1
        });
        u16::try_from(position).ok().filter(|_| position < Self::MAX_MASTERS)
    }
}

impl Redirect {
    /// From the address in `MOVED 3999 host:port`, which may lack the host.
    pub(crate) fn parse(is_ask: bool, asked_host: &str, address: &str) -> Option<Self> {
        let (host, port) = address.rsplit_once(':')?;
        Some(Self { is_ask, host: host_or(asked_host, host), port: port.parse().ok()? })
    }
}

/// `[host, port, id, ..]`.
fn parse_node(asked_host: &str, node: &Value) -> Option<NodeName> {
    let Value::Array(node) = node else { return None };
    let [host, Value::Int(port), Value::BulkString(id), ..] = node.as_slice() else { return None };
    let host = match host {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        _ => "",
    };
    Some(NodeName {
        host: host_or(asked_host, host),
        port: u16::try_from(*port).ok()?,
        id: std::str::from_utf8(id).ok().filter(|id| id.chars().all(|c| c.is_ascii_alphanumeric()))?.to_owned(),
    })
}

/// A node that announces no host has the one of the node that was asked.
fn host_or(asked_host: &str, host: &str) -> String {
    if host.is_empty() || host == "?" { asked_host } else { host }.to_owned()
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = escape_control(&self.host);
        if host.contains(':') { write!(f, "[{host}]:{}", self.port) } else { write!(f, "{host}:{}", self.port) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn node(host: Value, port: i64, id: &str) -> Value {
        Value::Array(vec![host, Value::Int(port), text(id), Value::Array(Vec::new())])
    }

    fn range(first: i64, last: i64, master: Value) -> Value {
        let replica = node(text("10.0.0.9"), 6379, "replica");
        Value::Array(vec![Value::Int(first), Value::Int(last), master, replica])
    }

    fn info() -> Value {
        text("cluster_state:ok\r\ncluster_current_epoch:7\r\n")
    }

    #[test]
    fn slots_have_their_masters() {
        let (a, b) = (node(text("10.0.0.1"), 6379, "aa"), node(text("db"), 7000, "bb"));
        let slots = Value::Array(vec![range(0, 9, a.clone()), range(11, 16_383, b), range(10, 10, a)]);
        let map = SlotMap::parse("asked", info(), &slots).expect("a map");
        let ids: Vec<_> = map.masters.iter().map(|master| (master.to_string(), &*master.id)).collect();
        assert_eq!(ids, [("10.0.0.1:6379".to_owned(), "aa"), ("db:7000".to_owned(), "bb")]);
        for (slot, owner) in [(0, Some(0)), (10, Some(0)), (11, Some(1)), (16_383, Some(1)), (16_384, None)] {
            assert_eq!(map.owner(slot), owner, "{slot}");
        }
        assert_eq!(map.epoch, 7);
        let slot = map.slot_of(&map.masters[1]).expect("one of its slots");
        assert!((11..16_384).contains(&slot), "{slot}");
    }

    #[test]
    fn node_without_a_host_is_at_that_of_the_asked_one() {
        for host in [text(""), text("?"), Value::Nil] {
            let slots = Value::Array(vec![range(0, 1, node(host, 7001, "aa"))]);
            let map = SlotMap::parse("::1", info(), &slots).expect("a map");
            assert_eq!(map.masters[0].to_string(), "[::1]:7001");
            assert_eq!(map.owner(2), None);
        }
        let redirect = Redirect::parse(true, "asked", ":7002").expect("an address");
        assert_eq!((&*redirect.host, redirect.port, redirect.is_ask), ("asked", 7002, true));
        assert_eq!(Redirect::parse(false, "asked", "fe80::1:7002").map(|to| to.host), Some("fe80::1".to_owned()));
    }

    #[test]
    fn other_replies_are_no_map() {
        let slots = |first, last| Value::Array(vec![range(first, last, node(text("a"), 1, "aa"))]);
        for (info, slots) in [
            (info(), slots(0, 16_384)),
            (info(), slots(-1, 5)),
            (info(), slots(5, 4)),
            (info(), Value::Okay),
            (text("x"), slots(0, 1)),
            (info(), Value::Array(vec![range(0, 1, node(text("a"), 70_000, "aa"))])),
            (info(), Value::Array((1..=1001).map(|port| range(port, port, node(text("a"), port, "aa"))).collect())),
            (info(), Value::Array(vec![range(0, 1, node(text("a"), 1, "a\r\nb"))])),
        ] {
            assert_eq!(SlotMap::parse("asked", info.clone(), &slots), None, "{slots:?}");
        }
    }
}
