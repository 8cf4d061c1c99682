//! What the operations of a store share: the entries of the process, its proof of life, and the
//! task that ends what has expired.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    sync::{Notify, Semaphore},
    time::{sleep, timeout},
};

use super::{
    lines::{Line, LineError, Lines, SessionEvent},
    table::{Own, State, Table},
};
use crate::{
    acquisition::AcquisitionId,
    clock::{BootInstant, Clock},
    lock_key::LockKey,
    store::{StoreErrorKind, StoreEvent, remote::task::Task},
    sync::{Mutex, MutexGuard},
};

/// What the operations of a store share.
pub(super) struct Shared<L: Lines> {
    pub(super) lines: L,
    pub(super) call_timeout: Duration,
    pub(super) clock: Clock,
    table: Mutex<Table>,
    /// Notified when something ends earlier than before.
    pub(super) changed: Arc<Notify>,
    /// When the last heartbeat was sent that has a reply.
    beat_at: Mutex<Option<BootInstant>>,
    /// One heartbeat at a time: the calls that wait share the next one.
    beating: Semaphore,
    task: Task,
}

const TICK: Duration = Duration::from_secs(1);
/// Between two pages of all lines that a process visits.
const VISIT: Duration = Duration::from_secs(10);
/// How old the heartbeat may be on which a grant relies.
const SLACK: Duration = Duration::from_secs(2);
/// A server may count a session from a little earlier than its heartbeat: a member tells the leader
/// of sessions now and then.
const SERVER_SLACK: Duration = Duration::from_secs(2);

impl<L: Lines> Shared<L> {
    pub(super) fn new(lines: L, call_timeout: Duration) -> Arc<Self> {
        let shared = Arc::new(Self {
            lines,
            call_timeout,
            clock: Clock::default(),
            table: Mutex::default(),
            changed: Arc::default(),
            beat_at: Mutex::default(),
            beating: Semaphore::new(1),
            task: Task::default(),
        });
        let weak = Arc::downgrade(&shared);
        shared.lines.on_event(Box::new(move |event| {
            if let Some(shared) = weak.upgrade() {
                shared.session_event(event);
            }
        }));
        shared
    }

    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    pub(super) fn own<T>(&self, key: &LockKey, id: &AcquisitionId, get: impl FnOnce(&mut Own) -> T) -> Option<T> {
        self.table().get(key, id).map(get)
    }

    /// Starts to end what has expired, on this runtime, unless a task does.
    pub(super) fn start(self: &Arc<Self>) {
        self.task.start(|| run(Arc::downgrade(self)));
    }

    pub(super) fn gone(&self, node: &str) {
        let events = self.table().gone(node, self.clock.now());
        self.changed.notify_one();
        events.into_iter().for_each(|(sink, event)| sink.send(event));
    }

    /// Waits for the end of a node, with an event.
    pub(super) async fn watch(&self, key: &LockKey, name: &str, node: &str) -> Result<(), L::Error> {
        // Before the call: the event may be faster than the reply.
        if !self.table().watch(key, name, node) {
            return Ok(());
        }
        if self.lines.watch(node).await? {
            self.table().is_watched(key, name, node);
        } else {
            self.gone(node);
        }
        Ok(())
    }

    fn session_event(&self, event: SessionEvent) {
        let (mut table, mut events) = (self.table(), Vec::new());
        let event = match event {
            SessionEvent::Gone { node } => {
                drop(table);
                return self.gone(&node);
            }
            SessionEvent::Connected => {
                table.forget_watches();
                StoreEvent::Lagged
            }
            SessionEvent::Ended => {
                table.forget_watches();
                events = table.end_all(self.clock.now());
                self.beat_at.lock().take();
                StoreEvent::Doubted
            }
        };
        events.extend(table.sinks.values().map(|sink| (sink.clone(), event.clone())));
        drop(table);
        events.into_iter().for_each(|(sink, event)| sink.send(event));
    }

    /// Waits until a heartbeat has a reply that was sent at this instant or later, but for this
    /// slack.
    pub(super) async fn beat(&self, at: BootInstant, slack: Duration) -> Result<(), L::Error> {
        let is_done = || self.beat_at.lock().is_some_and(|sent_at| sent_at.saturating_add(slack) >= at);
        if is_done() {
            return Ok(());
        }
        let one = timeout(self.call_timeout, self.beating.acquire()).await;
        let _one = one.map_err(|_| L::Error::of(StoreErrorKind::Timeout, "no heartbeat has a reply"))?;
        if is_done() {
            return Ok(());
        }
        let sent_at = self.clock.now();
        self.lines.heartbeat().await?;
        *self.beat_at.lock() = Some(sent_at);
        Ok(())
    }

    /// Makes sure that the session lasts for this lease, from the call on.
    pub(super) async fn cover(&self, called: BootInstant, lease: Duration) -> Result<(), L::Error> {
        self.beat(called, SLACK).await?;
        let session = self.lines.session_time();
        let needed = lease.saturating_add(SLACK + SERVER_SLACK);
        if needed > session {
            let text = format!(
                "lease and lock-delay of {lease:?} need a session of {needed:?}, and this one has {session:?}: raise \
                 `session`, or lower the lease"
            );
            return Err(L::Error::of(StoreErrorKind::Refused, text));
        }
        Ok(())
    }

    /// The acquisition with the entry of this name, if it is not being removed. Fails otherwise:
    /// the reply of a call on which it relies may be from before.
    pub(super) fn alive<T>(&self, key: &LockKey, name: &str, get: impl FnOnce(&mut Own) -> T) -> Result<T, L::Error> {
        let mut table = self.table();
        let own = table.named(key, name).filter(|own| own.state != State::Ending);
        own.map(get).ok_or_else(|| L::Error::of(StoreErrorKind::Unavailable, "the acquisition ended during the call"))
    }

    /// Ends the acquisitions whose time has passed: those of this key, or all.
    pub(super) async fn end_expired(&self, key: Option<&LockKey>) -> Result<(), L::Error> {
        let ended = self.table().take_ended(key, self.clock.now());
        for (key, name) in ended {
            self.end(&key, &name).await?;
        }
        Ok(())
    }

    /// Removes the entry of this name. Returns the line after it, if the entry was known.
    pub(super) async fn end(&self, key: &LockKey, name: &str) -> Result<Option<(bool, Line)>, L::Error> {
        let end = |own: &mut Own| {
            own.state = State::Ending;
            own.entry.as_ref().map(|entry| entry.handle.clone())
        };
        let ending = self.table().named(key, name).map(end);
        let Some(handle) = ending else { return Ok(None) };
        let left = match handle {
            Some(handle) => Some(self.lines.leave(key, &handle).await?),
            None => {
                self.lines.purge(key, name).await?;
                None
            }
        };
        self.table().remove(key, name);
        Ok(left)
    }

    async fn sweep(&self) -> Result<(), L::Error> {
        self.end_expired(None).await?;
        loop {
            let Some(handle) = self.table().ended_block(self.clock.now()) else { break };
            self.lines.unblock(&handle).await?;
            self.table().blocks.retain(|(other, _)| *other != handle);
        }
        self.table().sinks.retain(|_, sink| sink.is_open());
        Ok(())
    }

    /// Watches the entries that hold their keys for a while, for a revocation by another process.
    /// Short sections cost nothing.
    async fn watch_holders(&self) {
        let old = self.table().old_holders();
        // A watch without a reply is repeated.
        join_all(old.iter().map(|(key, name, handle)| self.watch(key, name, handle))).await;
    }
}

impl<L: Lines> Drop for Shared<L> {
    fn drop(&mut self) {
        self.task.stop();
        self.lines.close();
    }
}

/// Sends heartbeats, and ends what has expired, for as long as the store lives.
async fn run<L: Lines>(shared: Weak<Shared<L>>) {
    let (mut beat_at, mut visit_at, mut cursor) = (BootInstant::default(), BootInstant::default(), String::new());
    loop {
        let Some(strong) = shared.upgrade() else { return };
        let now = strong.clock.now();
        if now >= beat_at {
            beat_at = now.saturating_add(TICK);
            // An error is that of an outage, which the calls report.
            let _ = timeout(TICK, strong.beat(now, Duration::ZERO)).await;
        }
        let is_swept = matches!(timeout(TICK, strong.sweep()).await, Ok(Ok(())));
        let _ = timeout(TICK, strong.watch_holders()).await;
        if now >= visit_at {
            visit_at = now.saturating_add(VISIT);
            // Reading a block that has expired ends it: that of a process that has ended, too.
            let page = timeout(TICK, strong.lines.page(&cursor)).await.ok().and_then(Result::ok);
            cursor = page.and_then(|page| page.next).unwrap_or_default();
        }
        let next = strong.table().next_end().map_or(beat_at, |end| end.min(beat_at));
        // In an outage, what has ended is ended again and again.
        let least = if is_swept { Duration::from_millis(1) } else { TICK / 4 };
        let pause = next.saturating_duration_since(strong.clock.now()).max(least);
        // The session of a store that is dropped ends at once.
        let changed = Arc::clone(&strong.changed);
        drop(strong);
        tokio::select! {
            () = sleep(pause) => {}
            () = changed.notified() => {}
        }
    }
}
