//! The messages of the server to the managers, on a connection of their own.
//!
//! `NOTIFY` reaches the sessions that listen at the commit, and no others: a message is lost while
//! the connection is down. A waiter polls in any case, so that a store works without messages, and
//! hands a key off later.

use std::{future::poll_fn, sync::Arc, time::Duration};

use tokio::{runtime::Handle, task::JoinHandle, time::timeout};
use tokio_postgres::{AsyncMessage, Client};
use tracing::info;

use super::{
    connection::{Connector, column},
    error::CallError,
};
use crate::{
    acquisition::AcquisitionId,
    store::{
        EventSink, StoreEvent,
        database::{Server, driver, replies::only},
        remote::{
            inbox::Inbox,
            session::{Listen, Listener, receive},
        },
    },
    sync::Mutex,
};

/// The messages of a server to all sinks, on a connection that is replaced when it breaks.
pub(super) struct Messages {
    server: Arc<Server<Connector>>,
    inbox: Inbox,
    /// `None`: a pooler is in between, and no message would come.
    connector: Option<Arc<Connector>>,
    /// The first connection: a manager then needs a round trip for its subscription.
    first: Mutex<Option<PgListener>>,
}

/// A connection that receives messages.
pub(super) struct PgListener {
    client: Client,
    /// Ends with the connection.
    receiving: JoinHandle<()>,
}

/// Gets the channel of each message, without its prefix, and its text.
type OnMessage = Box<dyn Fn(&str, &str) + Send>;

/// Before the id of a manager, in the name of a channel.
const PREFIX: &str = "tower-lock:";

impl Messages {
    /// Connects.
    pub(super) async fn new(server: Arc<Server<Connector>>, connector: Option<Arc<Connector>>) -> Arc<Self> {
        let inbox = Inbox::new(server.timeouts.call, Arc::clone(&server.recovered));
        let messages = Arc::new(Self { server, inbox, connector, first: Mutex::default() });
        let first = messages.connect().await;
        *messages.first.lock() = first;
        messages
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
}

impl driver::Messages for Messages {
    fn are_sent(&self) -> bool {
        self.connector.is_some()
    }

    fn add(&self, sink: EventSink) {
        if self.are_sent() {
            self.inbox.add(sink.manager().to_owned(), sink);
        }
    }

    async fn wait_subscribed(&self, manager: &str) -> bool {
        self.are_sent() && !self.inbox.is_disconnected() && self.inbox.wait_subscribed(manager).await
    }

    /// See [`Inbox::is_subscribed`].
    async fn are_subscribed(&self) -> bool {
        !self.are_sent() || self.inbox.is_subscribed().await
    }

    fn receive(self: Arc<Self>) -> impl Future<Output = ()> + Send {
        // Not in the future: a connection whose task never runs would keep these messages.
        let first = self.first.lock().take();
        async move {
            if self.are_sent() {
                receive(&self, first).await;
            }
        }
    }
}

impl Listen for Messages {
    type Listener = PgListener;

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    async fn connect(self: &Arc<Self>) -> Option<PgListener> {
        let connector = self.connector.as_ref()?;
        timeout(self.server.timeouts.connect, PgListener::open(connector, self.on_message())).await.ok()?.ok()
    }

    fn log_recovery(&self, duration: Duration) {
        let address = self.connector.as_ref().map_or_else(String::new, |connector| connector.address.clone());
        self.server.background.log(move || {
            info!(target: "tower_lock", ?duration, "messages of PostgreSQL at {address} arrive again");
        });
    }
}

/// The event of a message, which any program may have sent.
fn parse_event(text: &str) -> Option<StoreEvent> {
    let mut parts = text.splitn(3, ' ');
    let (kind, id, name) = (parts.next()?, parts.next()?, parts.next()?);
    let (id, key) = (AcquisitionId::from_text(id), driver::key(name));
    match kind {
        "offered" => Some(StoreEvent::Offered { key, id }),
        "revoked" => Some(StoreEvent::Revoked { key, id }),
        _ => None,
    }
}

impl PgListener {
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
}

impl Listener for PgListener {
    type Error = CallError;

    async fn ended(&mut self) {
        let _ = (&mut self.receiving).await;
    }

    /// Whether the server replies, and accepts writes.
    async fn ping(&mut self) -> Result<(), CallError> {
        let rows = self.client.query_typed("SELECT pg_is_in_recovery()", &[]).await?;
        if column(only(&rows)?, 0)? { Err(CallError::NotListening) } else { Ok(()) }
    }

    async fn subscribe(&mut self, channels: &[String]) -> Result<(), CallError> {
        self.execute("LISTEN", channels).await
    }

    async fn unsubscribe(&mut self, channels: &[String]) -> Result<(), CallError> {
        self.execute("UNLISTEN", channels).await
    }
}

impl Drop for PgListener {
    fn drop(&mut self) {
        self.receiving.abort();
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
