//! The messages of a server to the managers of a store.
//!
//! A server sends messages on a connection of their own, by channel. While that connection is down
//! they are lost: each manager is notified when it is subscribed again. A manager that is not
//! subscribed counts as dead: its waiters wait for the subscription before they enqueue.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, timeout},
};

use crate::{
    limits::{RETRY_MAX, RETRY_MIN, STORE_TIMEOUT},
    store::{EventSink, StoreEvent},
    sync::Mutex,
};

/// The sinks of the managers, and the outages of the connection for messages.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub(super) call_timeout: Duration,
    /// Notified when an outage may have ended: the next session is not delayed.
    recovered: Arc<Notify>,
    /// By channel.
    subscriptions: Mutex<HashMap<String, Subscription>>,
    /// A subscription was added: a session subscribes its channel.
    pub(super) added: Notify,
    /// The connection works, and sends nothing: another one is needed.
    pub(super) lost: Notify,
    /// The start of the current disconnection.
    disconnected_since: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct Subscription {
    sink: EventSink,
    /// Whether it has been subscribed at least once.
    is_subscribed: watch::Sender<bool>,
}

impl Inbox {
    /// How long a waiter waits for its subscription before it enqueues: without one it counts as
    /// dead and loses its queue entry. It usually takes one round trip. If it takes longer, polls
    /// replace the events.
    const SUBSCRIBE_WAIT: Duration = Duration::from_millis(250);
    /// A reconnect takes less than this. A longer disconnection is an outage.
    const DISCONNECTED_AFTER: Duration = STORE_TIMEOUT.saturating_mul(3);

    pub(crate) fn new(call_timeout: Duration, recovered: Arc<Notify>) -> Self {
        let (subscriptions, added, lost, disconnected_since) = Default::default();
        Self { call_timeout, recovered, subscriptions, added, lost, disconnected_since }
    }

    /// Adds the sink of a channel, unless the channel has one.
    pub(crate) fn add(&self, channel: String, sink: EventSink) {
        let subscription = Subscription { sink, is_subscribed: watch::Sender::new(false) };
        self.subscriptions.lock().entry(channel).or_insert(subscription);
        self.added.notify_one();
    }

    /// Waits until this channel is subscribed. `false`: it will not be soon.
    pub(crate) async fn wait_subscribed(&self, channel: &str) -> bool {
        let subscribe = |subscription: &Subscription| subscription.is_subscribed.subscribe();
        let is_subscribed = self.subscriptions.lock().get(channel).map(subscribe);
        let Some(mut is_subscribed) = is_subscribed else { return false };
        matches!(timeout(Self::SUBSCRIBE_WAIT, is_subscribed.wait_for(|is_subscribed| *is_subscribed)).await, Ok(Ok(_)))
    }

    /// Whether all open sinks are subscribed. A new one has some time for it.
    pub(crate) async fn is_subscribed(&self) -> bool {
        let channels: Vec<_> = {
            let subscriptions = self.subscriptions.lock();
            let open = subscriptions.iter().filter(|(_, subscription)| subscription.sink.is_open());
            open.map(|(channel, _)| channel.clone()).collect()
        };
        let all = join_all(channels.iter().map(|channel| self.wait_subscribed(channel))).await;
        all.iter().all(|is_subscribed| *is_subscribed) && self.disconnected_since.lock().is_none()
    }

    /// Whether the disconnection is an outage. A waiter would count as dead, and would never be
    /// offered the key.
    pub(crate) fn is_disconnected(&self) -> bool {
        self.disconnected_since.lock().is_some_and(|since| since.elapsed() > Self::DISCONNECTED_AFTER)
    }

    /// A channel that is subscribed, as far as this process knows.
    #[cfg(feature = "redis")]
    pub(crate) fn subscribed_channel(&self) -> Option<String> {
        let is_subscribed = |(_, subscription): &(&String, &Subscription)| *subscription.is_subscribed.borrow();
        self.subscriptions.lock().iter().find(is_subscribed).map(|(channel, _)| channel.clone())
    }

    /// Ends the current session, because its server sends nothing.
    #[cfg(feature = "redis")]
    pub(crate) fn connection_lost(&self) {
        self.lost.notify_one();
    }

    /// Passes a message to its manager.
    pub(crate) fn send(&self, channel: &str, event: StoreEvent) {
        // Without the mutex: the receiver may call the store from within `send`.
        let sink = self.subscriptions.lock().get(channel).map(|subscription| subscription.sink.clone());
        if let Some(sink) = sink {
            sink.send(event);
        }
    }

    /// Notifies all managers that the server may have lost locks.
    pub(crate) fn doubt(&self) {
        self.send_all(&StoreEvent::Doubted);
    }

    /// Passes an event to all managers.
    pub(crate) fn send_all(&self, event: &StoreEvent) {
        let sinks: Vec<_> = self.subscriptions.lock().values().map(|subscription| subscription.sink.clone()).collect();
        sinks.iter().for_each(|sink| sink.send(event.clone()));
    }

    /// Waits before the next session. Returns the delay for the case that it fails, too.
    pub(crate) async fn pause(&self, delay: Duration) -> Duration {
        self.disconnected_since.lock().get_or_insert_with(Instant::now);
        // The server may have been restarted or replaced.
        self.doubt();
        tokio::select! {
            // With jitter: instances that were disconnected together do not reconnect together.
            () = sleep(delay.mul_f64(0.5 + fastrand::f64())) => (2 * delay).min(RETRY_MAX),
            () = self.recovered.notified() => RETRY_MIN,
        }
    }

    // === a session ===

    /// The channels to subscribe, and those of closed sinks to unsubscribe.
    pub(crate) fn changes(&self, subscribed: &HashSet<String>) -> (Vec<String>, Vec<String>) {
        let mut subscriptions = self.subscriptions.lock();
        subscriptions.retain(|_, subscription| subscription.sink.is_open());
        let added = subscriptions.keys().filter(|channel| !subscribed.contains(*channel)).cloned().collect();
        let closed = subscribed.iter().filter(|channel| !subscriptions.contains_key(*channel)).cloned().collect();
        (added, closed)
    }

    /// Records that a channel is subscribed.
    pub(crate) fn subscribed(&self, channel: &str) {
        let was_subscribed = {
            let subscriptions = self.subscriptions.lock();
            subscriptions.get(channel).is_some_and(|subscription| subscription.is_subscribed.send_replace(true))
        };
        // Messages sent while it was not subscribed are lost (I7).
        if was_subscribed {
            self.send(channel, StoreEvent::Lagged);
        }
    }

    /// Records that the session works. Returns the duration of the outage that has ended, if it was
    /// longer than a reconnect.
    pub(crate) fn works(&self) -> Option<Duration> {
        let since = self.disconnected_since.lock().take()?;
        // Perhaps of another server, or of one that has lost its data.
        self.send_all(&StoreEvent::Recovered);
        Some(since.elapsed()).filter(|duration| *duration > STORE_TIMEOUT)
    }
}
