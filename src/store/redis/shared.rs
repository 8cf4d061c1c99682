//! What the calls to one server share: its connections, its messages, and the next call.

use std::{
    collections::HashSet,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_redis::redis::Value;
use tracing::warn;

use super::{
    error::CallError,
    messages::Messages,
    topology::{Nodes, Parts, Topology, cluster::Node, server::Server},
    wire::{self, FenceMark, Timed},
};
use crate::{
    clock::BootInstant,
    limits::WARN_INTERVAL,
    lock_key::LockKey,
    store::{
        AcquireReply, EventSink, StoreError,
        remote::{
            batch::Needs,
            batching::{Outbox, Sender},
        },
    },
    sync::Mutex,
};

/// What the calls to one server share.
pub(super) struct Shared {
    pub(super) outbox: Outbox,
    pub(super) server: Arc<Server>,
    pub(super) messages: Arc<Messages>,
    /// The nodes of the Cluster that the server belongs to.
    pub(super) nodes: Option<Weak<Nodes<Self>>>,
    /// The slots of a Cluster in which a fence was found.
    pub(super) fences: Mutex<HashSet<u16>>,
    pub(super) warned_of_missing_ttl: AtomicBool,
    pub(super) fence_warned_at: Mutex<Option<BootInstant>>,
}

impl Node for Shared {
    fn new(parts: Parts, topology: Arc<dyn Topology>, address: String, nodes: Option<Weak<Nodes<Self>>>) -> Arc<Self> {
        let server = Server::new(parts, topology, address);
        Arc::new(Self {
            outbox: Outbox::default(),
            messages: Messages::new(Arc::clone(&server)),
            server,
            nodes,
            fences: Mutex::default(),
            warned_of_missing_ttl: AtomicBool::new(false),
            fence_warned_at: Mutex::default(),
        })
    }

    fn server(&self) -> &Server {
        &self.server
    }

    fn listen(self: &Arc<Self>, sink: EventSink) {
        self.messages.add(sink);
        self.messages.start(None);
    }
}

impl Shared {
    pub(super) fn nodes(&self) -> Option<Arc<Nodes<Self>>> {
        self.nodes.as_ref()?.upgrade()
    }

    /// The reply to a call that expires. `None`: it has expired by the server's clock, of which the
    /// estimate was too low.
    pub(super) fn in_time<T>(
        &self,
        (server_us, reply): (i64, Timed<T>),
        called: BootInstant,
        valid_for: Duration,
    ) -> Result<Option<T>, CallError> {
        self.outbox.observe(server_us);
        match reply {
            Timed::Done(reply) => Ok(Some(reply)),
            Timed::Expired if self.now().saturating_duration_since(called) >= valid_for => Err(CallError::Expired),
            Timed::Expired => Ok(None),
        }
    }

    /// Reports what a script has found in place of the fence, which on a Cluster is that of a slot.
    pub(super) fn check_fence(&self, reply: &Value, key: &LockKey) {
        let mark = wire::fence_mark(reply);
        // A text is that of a grant, or of its release: its slot has a fence.
        let has_fence = mark.is_some() || matches!(reply, Value::BulkString(_));
        let is_first = has_fence && self.nodes().is_some_and(|nodes| self.fences.lock().insert(nodes.slot(key)));
        // The first key of a slot makes its fence, and nothing is lost.
        let Some(mark) = mark.filter(|mark| *mark == FenceMark::Replaced || !is_first) else { return };
        // Before the reply: the section that it starts may be the last local one.
        self.messages.inbox.doubt();
        if mark == FenceMark::Replaced {
            self.warn_fence_replaced();
        }
    }

    /// At most one warning in ten seconds: another program may write there repeatedly.
    fn warn_fence_replaced(&self) {
        let now = self.now();
        let mut warned_at = self.fence_warned_at.lock();
        if warned_at.is_none_or(|at| now.saturating_duration_since(at) >= WARN_INTERVAL) {
            *warned_at = Some(now);
            drop(warned_at);
            self.server.warn_fence_replaced("another value");
        }
    }

    /// Warns once about a lock without a TTL, which another program wrote. It must be deleted by
    /// hand.
    pub(super) fn warn_if_no_ttl(&self, reply: &AcquireReply) {
        let (AcquireReply::Queued { lease_left, .. }
        | AcquireReply::Busy { lease_left, .. }
        | AcquireReply::QueueFull { lease_left, .. }) = reply
        else {
            return;
        };
        if *lease_left == Duration::MAX && !self.warned_of_missing_ttl.swap(true, Ordering::Relaxed) {
            self.server.background.log(|| {
                warn!(target: "tower_lock", "a key in Redis has no TTL and stays locked: tower-lock did not write it");
            });
        }
    }
}

impl Sender for Shared {
    const STORE: &'static str = "redis";

    fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    fn check(&self, operation: &'static str, key: &LockKey, _: Needs) -> Result<(), StoreError> {
        let name = self.server.keyspace.lock(key);
        name.map(drop).map_err(|error| self.server.store_error(operation, error.into()))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.messages.stop();
    }
}
