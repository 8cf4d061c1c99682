//! Raises that a server has not answered.
//!
//! The vote and the raise of a slow server may be executed after the release of their acquisition,
//! which is sent on another connection. The lock would then stay there for a lease. So the release
//! is repeated at that server when the raise was answered, or has expired.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep_until},
};

use super::node::Node;
use crate::{acquisition::AcquisitionId, store::ReleaseRequest, sync::Mutex};

/// The acquisitions with raises under way.
#[derive(Debug, Default)]
pub(super) struct LateRaises(Mutex<HashMap<AcquisitionId, Late>>);

#[derive(Debug, Default)]
struct Late {
    /// The raises without an answer.
    pending: usize,
    /// The release that was sent meanwhile.
    released: Option<ReleaseRequest>,
}

/// A raise under way at one server. It ends when this is dropped.
pub(super) struct UnderWay {
    late: Arc<LateRaises>,
    ids: Vec<AcquisitionId>,
    node: Arc<Node>,
    lease: Duration,
}

impl LateRaises {
    /// A raise of these acquisitions is sent. The lock lasts for this lease, if nothing releases
    /// it.
    pub(super) fn begin(
        self: &Arc<Self>,
        ids: impl Iterator<Item = AcquisitionId>,
        node: &Arc<Node>,
        lease: Duration,
    ) -> UnderWay {
        let ids: Vec<_> = ids.collect();
        let mut late = self.0.lock();
        for id in &ids {
            late.entry(id.clone()).or_default().pending += 1;
        }
        drop(late);
        UnderWay { late: Arc::clone(self), ids, node: Arc::clone(node), lease }
    }

    /// These releases are sent.
    pub(super) fn release(&self, requests: &[ReleaseRequest]) {
        let mut late = self.0.lock();
        for request in requests {
            if let Some(late) = late.get_mut(&request.id) {
                late.released = Some(request.clone());
            }
        }
    }
}

impl UnderWay {
    /// The raise has failed: it may be executed until this instant.
    pub(super) fn failed(self, until: Instant) {
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                sleep_until(until).await;
                drop(self);
            });
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut late = self.late.0.lock();
        let mut released = Vec::new();
        for id in &self.ids {
            let Some(entry) = late.get_mut(id) else { continue };
            entry.pending -= 1;
            released.extend(entry.released.clone());
            if entry.pending == 0 {
                late.remove(id);
            }
        }
        drop(late);
        if !released.is_empty() {
            self.node.repeat_release(&released, self.lease);
        }
    }
}
