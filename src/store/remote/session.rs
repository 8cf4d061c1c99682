//! The task of a store that receives the messages of its server.
//!
//! A connection for messages breaks, and then messages are lost. The task connects again,
//! subscribes the channels of all managers, and notifies them. It runs on the runtime of a caller,
//! and on that of a later one if the former has ended.

use std::{collections::HashSet, future::pending, sync::Arc, time::Duration};

use tokio::{
    select,
    time::{MissedTickBehavior, interval, timeout},
};

use super::inbox::Inbox;
use crate::limits::{QUEUE_POLL_INTERVAL, RETRY_MIN};

/// Interval of the health checks: an interrupted connection looks like an idle one.
pub(crate) const HEALTH_INTERVAL: Duration = QUEUE_POLL_INTERVAL;

/// The messages of a server.
pub(crate) trait Listen: Send + Sync + 'static {
    type Listener: Listener;

    fn inbox(&self) -> &Inbox;

    /// Connects. An error is logged there.
    fn connect(self: &Arc<Self>) -> impl Future<Output = Option<Self::Listener>> + Send;

    /// Waits for a change that [`Listener::sync`] makes.
    fn changed(&self) -> impl Future<Output = ()> + Send {
        pending()
    }

    /// Logs the end of an outage, so that the last event of a log is not its beginning.
    fn log_recovery(&self, outage: Duration);
}

/// One connection for messages.
pub(crate) trait Listener: Send {
    type Error: Send;

    /// Waits for the end of the connection.
    fn ended(&mut self) -> impl Future<Output = ()> + Send;

    /// Checks whether the server replies.
    fn ping(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;

    fn subscribe(&mut self, channels: &[String]) -> impl Future<Output = Result<(), Self::Error>> + Send;

    fn unsubscribe(&mut self, channels: &[String]) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Makes changes beside the channels of the managers.
    fn sync(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send {
        async { Ok(()) }
    }
}

/// Receives messages for as long as the runtime lives. `first`: a connection that exists already.
pub(crate) async fn receive<L: Listen>(messages: &Arc<L>, mut first: Option<L::Listener>) {
    let mut delay = RETRY_MIN;
    loop {
        let listener = match first.take() {
            Some(listener) => Some(listener),
            None => messages.connect().await,
        };
        if let Some(listener) = listener
            && session(messages, listener).await
        {
            delay = RETRY_MIN;
        }
        delay = messages.inbox().pause(delay).await;
    }
}

/// Receives until the connection breaks. Returns whether it has worked.
async fn session<L: Listen>(messages: &Arc<L>, mut listener: L::Listener) -> bool {
    let (inbox, mut channels, mut has_worked) = (messages.inbox(), HashSet::new(), false);
    let mut health_ticks = interval(HEALTH_INTERVAL);
    health_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let pings = select! {
            () = listener.ended() => return has_worked,
            () = inbox.lost.notified() => return has_worked,
            () = inbox.added.notified() => false,
            () = messages.changed() => false,
            // The first tick is immediate.
            _ = health_ticks.tick() => true,
        };
        let limit = inbox.call_timeout;
        if pings && !matches!(timeout(limit, listener.ping()).await, Ok(Ok(())))
            || !matches!(timeout(limit, sync_channels(inbox, &mut listener, &mut channels)).await, Ok(Ok(())))
            || !matches!(timeout(limit, listener.sync()).await, Ok(Ok(())))
        {
            return has_worked;
        }
        has_worked = true;
        if let Some(outage) = inbox.works() {
            messages.log_recovery(outage);
        }
    }
}

/// Subscribes new channels, and unsubscribes those of closed sinks.
async fn sync_channels<L: Listener>(
    inbox: &Inbox,
    listener: &mut L,
    subscribed: &mut HashSet<String>,
) -> Result<(), L::Error> {
    let (added, closed) = inbox.changes(subscribed);
    if !closed.is_empty() {
        listener.unsubscribe(&closed).await?;
        subscribed.retain(|channel| !closed.contains(channel));
    }
    if !added.is_empty() {
        listener.subscribe(&added).await?;
    }
    for channel in added {
        inbox.subscribed(&channel);
        subscribed.insert(channel);
    }
    Ok(())
}
