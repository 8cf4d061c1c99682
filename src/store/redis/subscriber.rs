//! The pub/sub connection: receives events and sends them to the sinks.

use std::{
    collections::{HashMap, HashSet},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_redis::redis::{
    RedisResult,
    aio::{PubSub, PubSubSink, PubSubStream},
};
use futures_util::{StreamExt, future::join_all};
use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    task::AbortHandle,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout, timeout_at},
};

use super::{connection::Signs, error::RedisConnectError, self_test::self_test, server::Server};
use crate::{
    limits::{QUEUE_POLL_INTERVAL, RECHECK_INTERVAL, RETRY_MAX, RETRY_MIN, STORE_TIMEOUT},
    store::{EventSink, StoreEvent},
    sync::{Mutex, MutexGuard},
};

/// The pub/sub connection for all sinks. It is replaced when it breaks.
#[derive(Debug)]
pub(super) struct Subscriber {
    server: Server,
    /// By channel.
    subscriptions: Mutex<HashMap<String, Subscription>>,
    /// A subscription was added.
    added: Notify,
    /// The server reports no subscriber for a channel.
    subscription_lost: Notify,
    /// After an outage: reconnect without delay.
    signs: Arc<Signs>,
    /// The result of the self-test.
    check_result: watch::Sender<Check>,
    /// The server could not be reached for its first check, and that was logged.
    warned_unreachable: AtomicBool,
    /// The start of the current disconnection.
    disconnected_since: Mutex<Option<Instant>>,
    task: Mutex<Option<Task>>,
}

/// The result of the self-test.
#[derive(Clone, Debug)]
pub(super) enum Check {
    /// The server was not reached yet.
    Pending,
    Passed,
    Failed(Arc<RedisConnectError>),
}

/// The task that receives messages and runs the health checks.
#[derive(Debug)]
struct Task {
    handle: AbortHandle,
    /// Updated about once a second. An old value means that the runtime of the task is not driven.
    last_active: Arc<Mutex<Instant>>,
}

#[derive(Debug)]
struct Subscription {
    sink: EventSink,
    /// Whether it has been subscribed at least once.
    is_subscribed: watch::Sender<bool>,
}

impl Subscriber {
    /// How long a waiter waits for its subscription before it enqueues: without one it counts as
    /// dead and loses its queue entry. It usually takes one round trip. If it takes longer, polls
    /// replace the events.
    const SUBSCRIBE_WAIT: Duration = Duration::from_millis(250);
    /// Interval of the health checks: an interrupted connection looks like an idle one.
    const HEALTH_INTERVAL: Duration = QUEUE_POLL_INTERVAL;
    /// A reconnect takes less than this. A longer disconnection is an outage.
    const DISCONNECTED_AFTER: Duration = STORE_TIMEOUT.saturating_mul(3);
    /// Time without a health check after which the task counts as stopped.
    const STALE_AFTER: Duration = STORE_TIMEOUT.saturating_mul(4);

    pub(super) fn new(server: Server, signs: Arc<Signs>) -> Arc<Self> {
        Arc::new(Self {
            server,
            subscriptions: Mutex::default(),
            added: Notify::new(),
            subscription_lost: Notify::new(),
            signs,
            check_result: watch::Sender::new(Check::Pending),
            warned_unreachable: AtomicBool::new(false),
            disconnected_since: Mutex::default(),
            task: Mutex::default(),
        })
    }

    pub(super) fn server(&self) -> &Server {
        &self.server
    }

    pub(super) fn add(&self, sink: EventSink) {
        let channel = self.server.keyspace.inbox(sink.manager());
        self.subscriptions().insert(channel, Subscription { sink, is_subscribed: watch::Sender::new(false) });
        self.added.notify_one();
    }

    /// Waits until this process is subscribed. `false`: it will not be soon.
    pub(super) async fn wait_subscribed(self: &Arc<Self>, process: &str) -> bool {
        self.start(None);
        let is_subscribed = self
            .subscriptions()
            .get(&self.server.keyspace.inbox(process))
            .map(|subscription| subscription.is_subscribed.subscribe());
        let Some(mut is_subscribed) = is_subscribed else { return false };
        matches!(timeout(Self::SUBSCRIBE_WAIT, is_subscribed.wait_for(|is_subscribed| *is_subscribed)).await, Ok(Ok(_)))
    }

    /// Whether the disconnection is an outage. A waiter would count as dead, and would never be
    /// offered the key.
    pub(super) fn is_disconnected(&self) -> bool {
        self.disconnected_since.lock().is_some_and(|since| since.elapsed() > Self::DISCONNECTED_AFTER)
    }

    /// Whether all sinks are subscribed. A new one has some time for it.
    pub(super) async fn is_subscribed(self: &Arc<Self>) -> bool {
        let processes: Vec<_> = {
            let subscriptions = self.subscriptions();
            let open = subscriptions.values().filter(|subscription| subscription.sink.is_open());
            open.map(|subscription| subscription.sink.manager().to_owned()).collect()
        };
        for process in processes {
            if !self.wait_subscribed(&process).await {
                return false;
            }
        }
        self.disconnected_since.lock().is_none()
    }

    /// Connects. The first connection is that of the self-test.
    async fn connect_checked(&self) -> Option<PubSub> {
        if matches!(*self.check_result.borrow(), Check::Passed) {
            return self.server.connect_pubsub().await.ok();
        }
        // Boxed: the nested future type is too deep for the compiler's default limit.
        let test: Pin<Box<dyn Future<Output = _> + Send + '_>> = Box::pin(self_test(&self.server));
        match test.await {
            Ok((pubsub, _)) => {
                self.check_passed();
                Some(pubsub)
            }
            Err(error) => {
                // Each is logged once. A transient error may pass by itself.
                if error.is_transient {
                    self.warn_unreachable(&error.error);
                } else {
                    self.check_failed(error.error);
                }
                None
            }
        }
    }

    /// Records a successful self-test.
    pub(super) fn check_passed(&self) {
        self.check_result.send_replace(Check::Passed);
    }

    #[cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "there is no log"))]
    fn warn_unreachable(&self, error: &RedisConnectError) {
        if !self.warned_unreachable.swap(true, Ordering::Relaxed) {
            #[cfg(feature = "tracing")]
            tracing::warn!(target: "tower_lock", "requests get 503 until Redis can be reached: {error:?}");
        }
    }

    /// Logs the end of an outage, so that the last event of a log is not its beginning.
    #[cfg_attr(not(feature = "tracing"), expect(unused_variables, clippy::unused_self, reason = "there is no log"))]
    fn log_recovery(&self, since: Option<Instant>) {
        #[cfg(feature = "tracing")]
        if let Some(duration) = since.map(|since| since.elapsed()).filter(|duration| *duration > STORE_TIMEOUT) {
            let address = &self.server.address;
            tracing::info!(target: "tower_lock", ?duration, "Redis at {address} can be reached again");
        }
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

    /// The result of the self-test, or `Pending` at the deadline.
    pub(super) async fn check(self: &Arc<Self>, deadline: Instant) -> Check {
        self.start(None);
        let mut check_result = self.check_result.subscribe();
        match timeout_at(deadline, check_result.wait_for(|check| !matches!(check, Check::Pending))).await {
            Ok(Ok(check)) => check.clone(),
            _ => Check::Pending,
        }
    }

    /// Starts the task on this runtime, unless it runs: the runtime of the former task may have
    /// ended.
    pub(super) fn start(self: &Arc<Self>, connection: Option<PubSub>) {
        let mut task = self.task.lock();
        if task.as_ref().is_none_or(Task::is_stale)
            && let Ok(runtime) = Handle::try_current()
        {
            let last_active = Arc::new(Mutex::new(Instant::now()));
            let run = Arc::clone(self).run(connection, Arc::clone(&last_active));
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

    async fn run(self: Arc<Self>, connection: Option<PubSub>, last_active: Arc<Mutex<Instant>>) {
        let health_checks = async {
            loop {
                tokio::select! {
                    () = sleep(Self::HEALTH_INTERVAL) => {}
                    () = self.signs.moved.notified() => {}
                }
                *last_active.lock() = Instant::now();
                let deadline = self.server.timeouts.call_deadline();
                let roles = self.server.connections().map(|connection| connection.check_role(deadline));
                tokio::join!(self.check_subscribed(), join_all(roles), self.check_master());
                // Many signs at the same time, or forged ones, are one.
                sleep(RECHECK_INTERVAL).await;
            }
        };
        let sentinels = async {
            if let Some(sentinels) = self.server.connector.sentinels() {
                sentinels.listen(&self.signs.moved).await;
            }
        };
        tokio::join!(self.receive(connection), health_checks, sentinels);
    }

    /// Leaves a server that the sentinels do not name any more. It may still have the role of the
    /// master: a process that was stopped has it until a sentinel changes it.
    async fn check_master(&self) {
        let Some(sentinels) = self.server.connector.sentinels() else { return };
        let Ok(master) = sentinels.master().await else { return };
        let master = master.to_string();
        let left: Vec<_> = self.server.connections().map(|connection| connection.leave_others(&master)).collect();
        if left.contains(&true) {
            self.subscription_lost.notify_one();
        }
    }

    /// Compares the server of the calls with the server of the subscription. After a failover
    /// behind one address the subscription may still be to the former master, which sends nothing.
    async fn check_subscribed(&self) {
        let subscribed_channel = |(channel, subscription): (&String, &Subscription)| {
            subscription.is_subscribed.borrow().then(|| channel.clone())
        };
        let channel = self.subscriptions().iter().find_map(subscribed_channel);
        if let Some(channel) = channel
            && self.server.acquire_conn.subscriber_count(&channel).await == Some(0)
        {
            self.subscription_lost.notify_one();
        }
    }

    async fn receive(&self, mut connection: Option<PubSub>) {
        let mut backoff = RETRY_MIN;
        loop {
            let connected = match connection.take() {
                Some(connection) => Some(connection),
                None => self.connect_checked().await,
            };
            if let Some(connection) = connected {
                let (sink, stream) = connection.split();
                let mut session = PubSubSession { subscriber: self, sink, channels: HashSet::new() };
                if session.run(stream).await {
                    backoff = RETRY_MIN;
                }
            }
            self.disconnected_since.lock().get_or_insert_with(Instant::now);
            // With jitter: instances that were disconnected together do not reconnect together.
            let delay = sleep(backoff.mul_f64(0.5 + fastrand::f64()));
            backoff = (2 * backoff).min(RETRY_MAX);
            tokio::select! {
                () = delay => {}
                () = self.signs.recovered.notified() => backoff = RETRY_MIN,
            }
        }
    }

    fn send(&self, channel: &str, event: StoreEvent) {
        // Without the mutex: the receiver may call the store from within `send`.
        let sink = self.subscriptions().get(channel).map(|subscription| subscription.sink.clone());
        if let Some(sink) = sink {
            sink.send(event);
        }
    }

    fn subscriptions(&self) -> MutexGuard<'_, HashMap<String, Subscription>> {
        self.subscriptions.lock()
    }
}

impl Task {
    fn is_stale(&self) -> bool {
        self.handle.is_finished() || self.last_active.lock().elapsed() > Subscriber::STALE_AFTER
    }
}

/// One connection and its channels.
struct PubSubSession<'a> {
    subscriber: &'a Subscriber,
    sink: PubSubSink,
    /// The channels that are subscribed on it.
    channels: HashSet<String>,
}

impl PubSubSession<'_> {
    /// Receives until the connection breaks. Returns whether it has worked.
    async fn run(&mut self, mut messages: PubSubStream) -> bool {
        let mut has_worked = false;
        let mut health_ticks = interval(Subscriber::HEALTH_INTERVAL);
        health_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = messages.next() => {
                    let Some(message) = message else { return has_worked };
                    let event = self.subscriber.server.keyspace.parse_event(message.get_payload_bytes());
                    self.subscriber.send(message.get_channel_name(), event);
                    continue;
                }
                () = self.subscriber.added.notified() => {}
                () = self.subscriber.subscription_lost.notified() => return has_worked,
                // The first tick is immediate.
                _ = health_ticks.tick() => {
                    if !matches!(timeout(self.subscriber.server.timeouts.call, self.sink.ping::<()>()).await, Ok(Ok(()))) {
                        return has_worked;
                    }
                }
            }
            if !matches!(timeout(self.subscriber.server.timeouts.call, self.sync_channels()).await, Ok(Ok(()))) {
                return has_worked;
            }
            has_worked = true;
            let since = self.subscriber.disconnected_since.lock().take();
            self.subscriber.log_recovery(since);
        }
    }

    /// Subscribes new channels and unsubscribes those of closed sinks.
    async fn sync_channels(&mut self) -> RedisResult<()> {
        let (added, closed) = {
            let mut subscriptions = self.subscriber.subscriptions();
            subscriptions.retain(|_, subscription| subscription.sink.is_open());
            let added: Vec<_> =
                subscriptions.keys().filter(|channel| !self.channels.contains(*channel)).cloned().collect();
            let closed: Vec<_> =
                self.channels.iter().filter(|channel| !subscriptions.contains_key(*channel)).cloned().collect();
            (added, closed)
        };
        if !closed.is_empty() {
            self.sink.unsubscribe(&closed).await?;
            self.channels.retain(|channel| !closed.contains(channel));
        }
        if added.is_empty() {
            return Ok(());
        }
        self.sink.subscribe(&added).await?;
        for channel in added {
            let was_subscribed = {
                let subscriptions = self.subscriber.subscriptions();
                subscriptions.get(&channel).is_some_and(|subscription| subscription.is_subscribed.send_replace(true))
            };
            // Messages sent while it was not subscribed are lost (I7).
            if was_subscribed {
                self.subscriber.send(&channel, StoreEvent::Lagged);
            }
            self.channels.insert(channel);
        }
        Ok(())
    }
}
