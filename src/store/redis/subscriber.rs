//! The messages of Redis, and to whose inbox each goes.

use std::{
    collections::{HashMap, HashSet},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use deadpool_redis::redis::{
    RedisResult,
    aio::{PubSub, PubSubSink, PubSubStream},
};
use futures_util::StreamExt;
use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    task::AbortHandle,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout, timeout_at},
};

use super::{
    connection::{SharedConnection, Timeouts},
    error::{CallError, RedisConnectError},
    proto::Keyspace,
    self_test::self_test,
    socket::Connector,
};
use crate::{
    limits::{QUEUE_POLL_INTERVAL, RETRY_MAX, RETRY_MIN, STORE_TIMEOUT},
    store::{EventSink, StoreEvent},
};

/// One connection on which Redis speaks to us, for all inboxes. It is made again when it breaks.
#[derive(Debug)]
pub(super) struct Subscriber {
    connector: Connector,
    /// What of the address may be shown.
    pub(super) address: String,
    pub(super) keyspace: Keyspace,
    pub(super) timeouts: Timeouts,
    /// By channel.
    subscriptions: Mutex<HashMap<String, Subscription>>,
    /// An inbox was opened.
    added: Notify,
    /// The server says that nobody listens to an inbox.
    subscription_lost: Notify,
    /// The connections on which is asked: they are looked after from here, too.
    pub(super) connections: [Arc<SharedConnection>; 2],
    /// A call was answered: what does not listen may do so at once.
    recovered: Arc<Notify>,
    /// What came of the self-test.
    check_result: watch::Sender<Check>,
    /// Since when nobody can be told anything.
    disconnected_since: Mutex<Option<Instant>>,
    task: Mutex<Option<Task>>,
}

/// Whether the server can do what locks need.
#[derive(Clone, Debug)]
pub(super) enum Check {
    /// Nobody knows: it was not reached yet.
    Pending,
    Passed,
    Failed(Arc<RedisConnectError>),
}

/// Who listens, and looks after the connections.
#[derive(Debug)]
struct Task {
    handle: AbortHandle,
    /// When it was last seen at work, each second or so: the runtime that it is on may be one that nobody drives.
    last_active: Arc<Mutex<Instant>>,
}

#[derive(Debug)]
struct Subscription {
    sink: EventSink,
    /// Whether it was subscribed for once.
    is_subscribed: watch::Sender<bool>,
}

impl Subscriber {
    /// How long somebody who lines up waits for his inbox to be heard: else he would be taken for dead, and lose his place. It is
    /// a round trip after it was opened; if it takes longer, check-ins find what it should have told.
    const SUBSCRIBE_WAIT: Duration = Duration::from_millis(250);
    /// So often the connections are asked whether they are alive: a cut one looks just like a quiet one.
    const HEALTH_INTERVAL: Duration = QUEUE_POLL_INTERVAL;
    /// A connection that listens is made anew within this time, or there is something wrong with it.
    const DISCONNECTED_AFTER: Duration = STORE_TIMEOUT.saturating_mul(3);
    /// Somebody who has not looked for so long will not.
    const STALE_AFTER: Duration = STORE_TIMEOUT.saturating_mul(4);

    pub(super) fn new(
        connector: Connector,
        address: String,
        names: Keyspace,
        limits: Timeouts,
        lanes: [Arc<SharedConnection>; 2],
        recovered: Arc<Notify>,
    ) -> Arc<Self> {
        let (inboxes, opened, unheard) = (Mutex::default(), Notify::new(), Notify::new());
        let (deaf_since, task) = (Mutex::default(), Mutex::default());
        let checked = watch::Sender::new(Check::Pending);
        Arc::new(Self {
            connector,
            address,
            keyspace: names,
            timeouts: limits,
            subscriptions: inboxes,
            added: opened,
            subscription_lost: unheard,
            connections: lanes,
            recovered,
            check_result: checked,
            disconnected_since: deaf_since,
            task,
        })
    }

    pub(super) fn add(&self, inbox: EventSink) {
        let channel = self.keyspace.inbox(inbox.manager());
        self.subscriptions().insert(channel, Subscription { sink: inbox, is_subscribed: watch::Sender::new(false) });
        self.added.notify_one();
    }

    /// Completes when this process can be told something, or is not going to be soon. Which one of the two.
    pub(super) async fn wait_subscribed(self: &Arc<Self>, process: &str) -> bool {
        self.start(None);
        let listens = self
            .subscriptions()
            .get(&self.keyspace.inbox(process))
            .map(|subscriber| subscriber.is_subscribed.subscribe());
        let Some(mut listens) = listens else { return false };
        matches!(timeout(Self::SUBSCRIBE_WAIT, listens.wait_for(|listens| *listens)).await, Ok(Ok(_)))
    }

    /// Nobody can be told anything, and that is no hiccup: whoever lines up would be taken for dead each time, and never have a turn.
    pub(super) fn is_disconnected(&self) -> bool {
        lock(&self.disconnected_since).is_some_and(|since| since.elapsed() > Self::DISCONNECTED_AFTER)
    }

    /// Whether there is a connection that is subscribed for all inboxes. One that was just opened has a moment to be subscribed for.
    pub(super) async fn is_subscribed(self: &Arc<Self>) -> bool {
        let processes: Vec<_> = {
            let inboxes = self.subscriptions();
            let open = inboxes.values().filter(|subscriber| subscriber.sink.is_open());
            open.map(|subscriber| subscriber.sink.manager().to_owned()).collect()
        };
        for process in processes {
            if !self.wait_subscribed(&process).await {
                return false;
            }
        }
        lock(&self.disconnected_since).is_none()
    }

    pub(super) async fn connect(&self) -> Result<PubSub, CallError> {
        let connection = timeout(self.timeouts.connect, self.connector.connect_pubsub()).await;
        Ok(connection.map_err(|_| CallError::ConnectTimeout)??)
    }

    /// A connection that listens; the first one is that of the self-test.
    async fn connect_checked(&self) -> Option<PubSub> {
        if matches!(*self.check_result.borrow(), Check::Passed) {
            return self.connect().await.ok();
        }
        // A plain type: what is in there is nested deeply.
        let test: Pin<Box<dyn Future<Output = _> + Send + '_>> = Box::pin(self_test(self));
        match test.await {
            Ok((listener, _)) => {
                self.check_passed();
                Some(listener)
            }
            Err(failed) => {
                // It may be up in a moment; what it cannot do is told, once.
                if !failed.is_transient {
                    self.check_failed(failed.error);
                }
                None
            }
        }
    }

    /// The server can do what locks need.
    pub(super) fn check_passed(&self) {
        self.check_result.send_replace(Check::Passed);
    }

    fn check_failed(&self, error: RedisConnectError) {
        #[cfg(feature = "tracing")]
        {
            let is_known =
                matches!(&*self.check_result.borrow(), Check::Failed(known) if known.to_string() == error.to_string());
            if !is_known {
                tracing::error!(target: "tower_lock", "{error:?}");
            }
        }
        self.check_result.send_replace(Check::Failed(Arc::new(error)));
    }

    /// What came of the self-test; it has until then.
    pub(super) async fn check(self: &Arc<Self>, by: Instant) -> Check {
        self.start(None);
        let mut checked = self.check_result.subscribe();
        match timeout_at(by, checked.wait_for(|check| !matches!(check, Check::Pending))).await {
            Ok(Ok(check)) => check.clone(),
            _ => Check::Pending,
        }
    }

    /// Listens from this runtime, if no other one does: the one on which it was listened from may have ended.
    pub(super) fn start(self: &Arc<Self>, connection: Option<PubSub>) {
        let mut task = lock(&self.task);
        if task.as_ref().is_none_or(Task::is_stale)
            && let Ok(runtime) = Handle::try_current()
        {
            let looked = Arc::new(Mutex::new(Instant::now()));
            let run = Arc::clone(self).run(connection, Arc::clone(&looked));
            let gone = task.replace(Task { handle: runtime.spawn(run).abort_handle(), last_active: looked });
            drop(task);
            if let Some(gone) = gone {
                gone.handle.abort();
            }
        }
    }

    pub(super) fn stop(&self) {
        if let Some(task) = lock(&self.task).take() {
            task.handle.abort();
        }
    }

    async fn run(self: Arc<Self>, connection: Option<PubSub>, looked: Arc<Mutex<Instant>>) {
        let look_after = async {
            loop {
                sleep(Self::HEALTH_INTERVAL).await;
                *lock(&looked) = Instant::now();
                let [asks, ends] = &self.connections;
                let (_, _) = tokio::join!(self.check_subscribed(asks), ends.ping(self.timeouts.call_deadline()));
            }
        };
        tokio::join!(self.receive(connection), look_after);
    }

    /// Whether the server that is asked is the one that speaks to us: after a failover behind one address the connection that listens may be to the
    /// old one still, which is well and says nothing.
    async fn check_subscribed(&self, lane: &SharedConnection) {
        let listens = |(channel, subscriber): (&String, &Subscription)| {
            subscriber.is_subscribed.borrow().then(|| channel.clone())
        };
        let Some(channel) = self.subscriptions().iter().find_map(listens) else {
            return drop(lane.ping(self.timeouts.call_deadline()).await);
        };
        if lane.subscriber_count(&channel).await == Some(0) {
            self.subscription_lost.notify_one();
        }
    }

    async fn receive(&self, mut connection: Option<PubSub>) {
        let mut pause = RETRY_MIN;
        loop {
            let connected = match connection.take() {
                Some(connection) => Some(connection),
                None => self.connect_checked().await,
            };
            if let Some(connection) = connected {
                let (sink, stream) = connection.split();
                let mut listener = PubSubSession { subscriber: self, sink, channels: HashSet::new() };
                if listener.run(stream).await {
                    pause = RETRY_MIN;
                }
            }
            lock(&self.disconnected_since).get_or_insert_with(Instant::now);
            // Whoever lost its connection first is not to be the only one that keeps on trying.
            let rests = sleep(pause.mul_f64(0.5 + fastrand::f64()));
            pause = (2 * pause).min(RETRY_MAX);
            tokio::select! {
                () = rests => {}
                () = self.recovered.notified() => pause = RETRY_MIN,
            }
        }
    }

    fn send(&self, channel: &str, event: StoreEvent) {
        // Not under the mutex: whoever is told may ask again from in there.
        let inbox = self.subscriptions().get(channel).map(|subscriber| subscriber.sink.clone());
        if let Some(inbox) = inbox {
            inbox.send(event);
        }
    }

    fn subscriptions(&self) -> MutexGuard<'_, HashMap<String, Subscription>> {
        lock(&self.subscriptions)
    }
}

impl Task {
    fn is_stale(&self) -> bool {
        self.handle.is_finished() || lock(&self.last_active).elapsed() > Subscriber::STALE_AFTER
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One connection, while it lasts.
struct PubSubSession<'a> {
    subscriber: &'a Subscriber,
    sink: PubSubSink,
    /// What was subscribed on it.
    channels: HashSet<String>,
}

impl PubSubSession<'_> {
    /// Until the connection breaks. Whether it worked at all.
    async fn run(&mut self, mut messages: PubSubStream) -> bool {
        let mut worked = false;
        let mut looks = interval(Subscriber::HEALTH_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = messages.next() => {
                    let Some(message) = message else { return worked };
                    let event = self.subscriber.keyspace.parse_event(message.get_payload_bytes());
                    self.subscriber.send(message.get_channel_name(), event);
                    continue;
                }
                () = self.subscriber.added.notified() => {}
                () = self.subscriber.subscription_lost.notified() => return worked,
                // The first tick comes at once.
                _ = looks.tick() => {
                    if !matches!(timeout(self.subscriber.timeouts.call, self.sink.ping::<()>()).await, Ok(Ok(()))) {
                        return worked;
                    }
                }
            }
            if !matches!(timeout(self.subscriber.timeouts.call, self.sync_channels()).await, Ok(Ok(()))) {
                return worked;
            }
            worked = true;
            *lock(&self.subscriber.disconnected_since) = None;
        }
    }

    /// Subscribes for inboxes that were opened, and no longer for those that were closed.
    async fn sync_channels(&mut self) -> RedisResult<()> {
        let (opened, closed) = {
            let mut inboxes = self.subscriber.subscriptions();
            inboxes.retain(|_, subscriber| subscriber.sink.is_open());
            let opened: Vec<_> = inboxes.keys().filter(|channel| !self.channels.contains(*channel)).cloned().collect();
            let closed: Vec<_> =
                self.channels.iter().filter(|channel| !inboxes.contains_key(*channel)).cloned().collect();
            (opened, closed)
        };
        if !closed.is_empty() {
            self.sink.unsubscribe(&closed).await?;
            self.channels.retain(|channel| !closed.contains(channel));
        }
        if opened.is_empty() {
            return Ok(());
        }
        self.sink.subscribe(&opened).await?;
        for channel in opened {
            let was_listening = {
                let inboxes = self.subscriber.subscriptions();
                inboxes.get(&channel).is_some_and(|subscriber| subscriber.is_subscribed.send_replace(true))
            };
            // What was said while nobody listened is lost (I7).
            if was_listening {
                self.subscriber.send(&channel, StoreEvent::Lagged);
            }
            self.channels.insert(channel);
        }
        Ok(())
    }
}
