//! Writes that count only when enough replicas have them. Pure.

use std::{collections::HashSet, time::Duration};

use deadpool_redis::redis::{Cmd, Value, cmd};

use crate::store::redis::error::NotReplicated;

/// The replicas that must have a write before it counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MinReplicas {
    pub(crate) count: u32,
    /// How long a call waits for them.
    pub(crate) timeout: Duration,
}

impl MinReplicas {
    /// Waits for all writes of this connection.
    pub(crate) fn wait(self) -> Cmd {
        // Zero would wait without a limit.
        let ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX).max(1);
        cmd("WAIT").arg(self.count).arg(ms).take()
    }

    /// `acknowledged`: the reply to `WAIT`. It counts connections, and a replica that has
    /// reconnected has two of them until the master notices. `role`: the reply to `ROLE` after it.
    pub(crate) fn check(self, acknowledged: i64, role: Option<&Value>) -> Result<(), NotReplicated> {
        let acknowledged = acknowledged.saturating_sub(role.map_or(0, repeated_replicas));
        let Self { count: required, .. } = self;
        if acknowledged >= i64::from(required) { Ok(()) } else { Err(NotReplicated { acknowledged, required }) }
    }
}

/// Whether this reply to `ROLE` is that of a replica, which accepts no writes.
pub(crate) fn is_replica(role: &Value) -> bool {
    let Value::Array(role) = role else { return false };
    matches!(role.first(), Some(Value::BulkString(name)) if name != b"master")
}

/// The number of connections of replicas that have another one.
fn repeated_replicas(role: &Value) -> i64 {
    let Value::Array(role) = role else { return 0 };
    let Some(Value::Array(connections)) = role.get(2) else { return 0 };
    // The address and the port that the replica listens on; the third value is its offset.
    let address = |connection: &Value| match connection {
        Value::Array(fields) => fields.get(..2).map(|address| format!("{address:?}")),
        _ => None,
    };
    let servers: HashSet<_> = connections.iter().filter_map(address).collect();
    i64::try_from(connections.len() - servers.len()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_one_replica_count_once() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let role = |replicas: &[(&str, &str)]| {
            let replica = |(address, port): &(&str, &str)| Value::Array(vec![text(address), text(port), text("9")]);
            Value::Array(vec![text("master"), Value::Int(9), Value::Array(replicas.iter().map(replica).collect())])
        };
        let two = MinReplicas { count: 2, timeout: Duration::from_millis(100) };
        let (a, b, c) = (("10.0.0.1", "6379"), ("10.0.0.2", "6379"), ("10.0.0.2", "6380"));
        for (replicas, acknowledged, counts) in [
            (&[a, b][..], 2, true),
            (&[a, b], 1, false),
            (&[a, a], 2, false),
            (&[a, a, b], 3, true),
            (&[b, c], 2, true),
        ] {
            assert_eq!(two.check(acknowledged, Some(&role(replicas))).is_ok(), counts, "{replicas:?}");
        }
    }
}
