//! The messages of the server to the managers, on a connection of their own.
//!
//! `NOTIFY` reaches the sessions that listen at the commit, and no others: a message is lost while
//! the connection is down. A waiter polls in any case, so that a store works without messages, and
//! hands a key off later.

use std::{collections::HashSet, future::poll_fn, sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    task::{AbortHandle, JoinHandle},
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tokio_postgres::{AsyncMessage, Client};
use tracing::info;

use super::{
    connection::Connector,
    error::CallError,
    replies::{column, only},
    schema,
    server::Server,
    sweep,
};
use crate::{
    acquisition::AcquisitionId,
    limits::{POSTGRES_UNNOTIFIED_POLL, QUEUE_POLL_INTERVAL, STORE_TIMEOUT},
    store::{
        AcquireReply, EventSink, StoreEvent,
        remote::inbox::{Backoff, Change, Inbox},
    },
    sync::Mutex,
};

/// The messages of a server to all sinks, on a connection that is replaced when it breaks.
#[derive(Debug)]
pub(super) struct Messages {
    server: Arc<Server>,
    inbox: Inbox,
    /// `None`: a pooler is in between, and no message would come.
    connector: Option<Arc<Connector>>,
    task: Mutex<Option<Task>>,
}

/// The task that receives messages and sweeps.
#[derive(Debug)]
struct Task {
    handle: AbortHandle,
    /// Updated once a second. An old value means that the runtime of the task is not driven.
    last_active: Arc<Mutex<Instant>>,
}

/// A connection that receives messages.
pub(super) struct Listener {
    client: Client,
    /// Ends with the connection.
    receiving: JoinHandle<()>,
}

/// Gets the channel of each message, without its prefix, and its text.
type OnMessage = Box<dyn Fn(&str, &str) + Send>;

/// Before the id of a manager, in the name of a channel.
const PREFIX: &str = "tower-lock:";

impl Messages {
    /// Interval of the health checks: an interrupted connection looks like an idle one.
    const HEALTH_INTERVAL: Duration = QUEUE_POLL_INTERVAL;
    /// Time without activity after which the task counts as stopped.
    const STALE_AFTER: Duration = STORE_TIMEOUT.saturating_mul(4);

    pub(super) fn new(server: Arc<Server>, connector: Option<Arc<Connector>>) -> Arc<Self> {
        Arc::new(Self { server, inbox: Inbox::default(), connector, task: Mutex::default() })
    }

    pub(super) fn are_sent(&self) -> bool {
        self.connector.is_some()
    }

    pub(super) fn add(self: &Arc<Self>, sink: EventSink) {
        if self.are_sent() {
            self.inbox.add(sink.manager().to_owned(), sink);
        }
        self.start();
    }

    /// Waits until this manager is subscribed. `false`: it will not be soon.
    pub(super) async fn wait_subscribed(self: &Arc<Self>, manager: &str) -> bool {
        self.start();
        self.are_sent() && !self.inbox.is_disconnected() && self.inbox.wait_subscribed(manager).await
    }

    /// See [`Inbox::is_subscribed`].
    pub(super) async fn are_subscribed(self: &Arc<Self>) -> bool {
        self.start();
        !self.are_sent() || self.inbox.is_subscribed().await
    }

    /// The reply to a waiter that gets no messages: it polls more often.
    pub(super) fn polled(reply: AcquireReply) -> AcquireReply {
        match reply {
            AcquireReply::Queued { ahead, lease_left, poll_in: None } => {
                let [least, most] = POSTGRES_UNNOTIFIED_POLL;
                let poll_in = Some(least + (most - least).mul_f64(fastrand::f64()));
                AcquireReply::Queued { ahead, lease_left, poll_in }
            }
            reply => reply,
        }
    }

    /// Starts the task on this runtime, unless it runs: the runtime of the former task may have
    /// ended.
    pub(super) fn start(self: &Arc<Self>) {
        let mut task = self.task.lock();
        if task.as_ref().is_none_or(Task::is_stale)
            && let Ok(runtime) = Handle::try_current()
        {
            let last_active = Arc::new(Mutex::new(Instant::now()));
            let run = Arc::clone(self).run(Arc::clone(&last_active));
            let stopped = task.replace(Task { handle: runtime.spawn(run).abort_handle(), last_active });
            drop(task);
            if let Some(stopped) = stopped {
                stopped.handle.abort();
            }
        }
    }

    pub(super) fn stop(&self) {
        if let Some(task) = self.task.lock().take() {
            task.handle.abort();
        }
    }

    async fn run(self: Arc<Self>, last_active: Arc<Mutex<Instant>>) {
        let signs_of_life = async {
            loop {
                sleep(Self::HEALTH_INTERVAL).await;
                *last_active.lock() = Instant::now();
            }
        };
        tokio::join!(self.receive(), sweep::run(&self.server), signs_of_life);
    }

    async fn receive(self: &Arc<Self>) {
        let Some(connector) = &self.connector else { return };
        let mut backoff = Backoff::default();
        loop {
            let opened = timeout(self.server.timeouts.connect, Listener::open(connector, self.on_message())).await;
            let mut has_worked = false;
            if let Ok(Ok(listener)) = opened {
                let address = &connector.address;
                has_worked = Session { messages: self, address, listener, channels: HashSet::new() }.run().await;
            }
            self.inbox.pause(&mut backoff, has_worked, &self.server.recovered).await;
        }
    }

    /// Passes each message to its manager, in the task that reads it.
    fn on_message(self: &Arc<Self>) -> OnMessage {
        let messages = Arc::clone(self);
        Box::new(move |manager, text| {
            if let Some(event) = parse_event(text) {
                messages.inbox.send(manager, event);
            }
        })
    }

    /// Logs the end of an outage, so that the last event of a log is not its beginning.
    fn log_recovery(&self, address: &str, duration: Duration) {
        let address = address.to_owned();
        self.server.background.log(move || {
            info!(target: "tower_lock", ?duration, "messages of PostgreSQL at {address} arrive again");
        });
    }
}

/// The event of a message, which any program may have sent.
fn parse_event(text: &str) -> Option<StoreEvent> {
    let mut parts = text.splitn(3, ' ');
    let (kind, id, name) = (parts.next()?, parts.next()?, parts.next()?);
    let (id, key) = (AcquisitionId::from_text(id), schema::key(name));
    match kind {
        "offered" => Some(StoreEvent::Offered { key, id }),
        "revoked" => Some(StoreEvent::Revoked { key, id }),
        _ => None,
    }
}

impl Task {
    fn is_stale(&self) -> bool {
        self.handle.is_finished() || self.last_active.lock().elapsed() > Messages::STALE_AFTER
    }
}

impl Listener {
    pub(super) async fn open(connector: &Connector, on_message: OnMessage) -> Result<Self, CallError> {
        let (client, mut connection) = connector.open().await?;
        let receive = async move {
            while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                if let AsyncMessage::Notification(message) = message
                    && let Some(channel) = message.channel().strip_prefix(PREFIX)
                {
                    on_message(channel, message.payload());
                }
            }
        };
        Ok(Self { client, receiving: Handle::current().spawn(receive) })
    }

    /// Listens to these channels, or not any more.
    pub(super) async fn execute(&self, command: &str, channels: &[String]) -> Result<(), CallError> {
        let one = |channel: &String| format!("{command} \"{PREFIX}{}\";", channel.replace('"', "\"\""));
        Ok(self.client.batch_execute(&channels.iter().map(one).collect::<String>()).await?)
    }

    /// Whether the server replies, and accepts writes.
    async fn check(&self) -> Result<(), CallError> {
        let rows = self.client.query_typed("SELECT pg_is_in_recovery()", &[]).await?;
        if column(only(&rows)?, 0)? { Err(CallError::NotListening) } else { Ok(()) }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.receiving.abort();
    }
}

/// One connection and its channels.
struct Session<'a> {
    messages: &'a Messages,
    /// Of the server.
    address: &'a str,
    listener: Listener,
    /// The channels that it listens to.
    channels: HashSet<String>,
}

impl Session<'_> {
    /// Receives until the connection breaks. Returns whether it has worked.
    async fn run(&mut self) -> bool {
        let Messages { server, inbox, .. } = self.messages;
        let mut has_worked = false;
        let mut health_ticks = interval(Messages::HEALTH_INTERVAL);
        health_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = &mut self.listener.receiving => return has_worked,
                change = inbox.changed() => match change {
                    Change::Added => {}
                    Change::Lost => return has_worked,
                },
                // The first tick is immediate.
                _ = health_ticks.tick() => {
                    if !matches!(timeout(server.timeouts.call, self.listener.check()).await, Ok(Ok(()))) {
                        return has_worked;
                    }
                }
            }
            if !matches!(timeout(server.timeouts.call, self.sync_channels()).await, Ok(Ok(()))) {
                return has_worked;
            }
            has_worked = true;
            if let Some(outage) = inbox.works() {
                self.messages.log_recovery(self.address, outage);
            }
        }
    }

    /// Listens to new channels, and no longer to those of closed sinks.
    async fn sync_channels(&mut self) -> Result<(), CallError> {
        let (added, closed) = self.messages.inbox.changes(&self.channels);
        if !closed.is_empty() {
            self.listener.execute("UNLISTEN", &closed).await?;
            self.channels.retain(|channel| !closed.contains(channel));
        }
        if !added.is_empty() {
            self.listener.execute("LISTEN", &added).await?;
        }
        for channel in added {
            self.messages.inbox.subscribed(&channel);
            self.channels.insert(channel);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock_key::LockKey;

    #[test]
    fn message_of_another_program_is_no_event() {
        let (key, id) = (LockKey::from(("order", 7)), AcquisitionId::from_text("a:1:2"));
        let raw = LockKey::raw("my lock").expect("a name");
        assert_eq!(parse_event("offered a:1:2 order:7"), Some(StoreEvent::Offered { key, id: id.clone() }));
        assert_eq!(parse_event("revoked a:1:2 *my lock"), Some(StoreEvent::Revoked { key: raw, id }));
        for text in ["", "offered", "offered a", "other a b"] {
            assert_eq!(parse_event(text), None, "{text}");
        }
    }
}
