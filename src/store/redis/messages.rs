//! The pub/sub connection: receives messages for the managers, and checks the server.

use std::{
    collections::HashSet,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_redis::redis::{RedisError, RedisResult};
use futures_util::future::join_all;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout_at},
};
use tracing::{error, info, warn};

use super::{
    error::{CallError, RedisConnectError},
    self_test::self_test,
    topology::{endpoint::Subscriptions, server::Server, socket::OnMessage},
    wakeups::{Changes, Channels, Wakeups},
    wire::REDISSON_CHANNEL,
};
use crate::{
    limits::RECHECK_INTERVAL,
    lock_key::LockKey,
    store::{
        EventSink, StoreEvent,
        remote::{
            inbox::Inbox,
            session::{HEALTH_INTERVAL, Listen, Listener, receive},
            task::Task,
        },
    },
};

/// The messages of a server to all sinks, on a connection that is replaced when it breaks.
pub(super) struct Messages {
    server: Arc<Server>,
    pub(super) inbox: Inbox,
    wakeups: Wakeups,
    /// The result of the self-test. `None`: the server was not reached yet.
    check_result: watch::Sender<Option<Result<(), Arc<RedisConnectError>>>>,
    /// The server could not be reached for its first check, and that was logged.
    warned_unreachable: AtomicBool,
    warned_untracked: AtomicBool,
    task: Task,
}

impl Messages {
    pub(super) fn new(server: Arc<Server>) -> Arc<Self> {
        Arc::new(Self {
            inbox: Inbox::new(server.timeouts.call, Arc::clone(&server.signs.recovered)),
            server,
            wakeups: Wakeups::default(),
            check_result: watch::Sender::new(None),
            warned_unreachable: AtomicBool::new(false),
            warned_untracked: AtomicBool::new(false),
            task: Task::default(),
        })
    }

    pub(super) fn add(&self, sink: EventSink) {
        self.inbox.add(self.server.keyspace.inbox(sink.manager()), sink);
    }

    /// Waits until this manager is subscribed. `false`: it will not be soon.
    pub(super) async fn wait_subscribed(self: &Arc<Self>, manager: &str) -> bool {
        self.start(None);
        self.inbox.wait_subscribed(&self.server.keyspace.inbox(manager)).await
    }

    /// A raw key was used: an acquisition waits for it, or it may be the first one.
    pub(super) fn used_raw(&self, key: &LockKey, is_queued: bool) {
        let keyspace = &self.server.keyspace;
        if let Some(names) = keyspace.lock(key).ok().and_then(|lock| keyspace.raw_names(lock)) {
            self.wakeups.used(key, names, is_queued);
        }
    }

    /// See [`Inbox::is_subscribed`].
    pub(super) async fn are_subscribed(self: &Arc<Self>) -> bool {
        self.start(None);
        self.inbox.is_subscribed().await
    }

    /// Records a successful self-test.
    pub(super) fn check_passed(&self) {
        self.check_result.send_replace(Some(Ok(())));
    }

    pub(super) fn has_passed(&self) -> bool {
        matches!(*self.check_result.borrow(), Some(Ok(())))
    }

    fn warn_unreachable(&self, error: RedisConnectError) {
        if !self.warned_unreachable.swap(true, Ordering::Relaxed) {
            self.server.background.log(move || {
                warn!(target: "tower_lock", "requests get 503 until Redis can be reached: {error:?}");
            });
        }
    }

    fn check_failed(&self, error: RedisConnectError) {
        let error = Arc::new(error);
        let former = self.check_result.send_replace(Some(Err(Arc::clone(&error))));
        if !matches!(former, Some(Err(known)) if known.to_string() == error.to_string()) {
            self.server.background.log(move || error!(target: "tower_lock", "{error:?}"));
        }
    }

    /// The result of the self-test. Fails if there is none at the deadline.
    pub(super) async fn check(self: &Arc<Self>, deadline: Instant) -> Result<(), CallError> {
        self.start(None);
        let mut check_result = self.check_result.subscribe();
        if let Ok(Ok(result)) = timeout_at(deadline, check_result.wait_for(Option::is_some)).await
            && let Some(result) = &*result
        {
            return result.clone().map_err(CallError::SelfTestFailed);
        }
        Err(CallError::ConnectTimeout)
    }

    /// Starts the task on this runtime, unless it runs.
    pub(super) fn start(self: &Arc<Self>, connection: Option<Subscriptions>) {
        self.task.start(|| Arc::clone(self).run(connection));
    }

    pub(super) fn stop(&self) {
        self.task.stop();
    }

    async fn run(self: Arc<Self>, connection: Option<Subscriptions>) {
        let health_checks = async {
            loop {
                tokio::select! {
                    () = sleep(HEALTH_INTERVAL) => {}
                    () = self.server.signs.moved.notified() => self.inbox.doubt(),
                }
                let deadline = self.server.timeouts.call_deadline();
                let roles = self.server.connections().map(|connection| connection.check_role(deadline));
                tokio::join!(self.check_subscribed(), join_all(roles), self.check_current());
                // Many signs at the same time, or forged ones, are one.
                sleep(RECHECK_INTERVAL).await;
            }
        };
        let moves = self.server.topology.listen(&self.server.signs);
        let first = connection.map(|connection| self.session(connection));
        tokio::join!(receive(&self, first), health_checks, moves);
    }

    fn session(self: &Arc<Self>, mut connection: Subscriptions) -> Session {
        if let Some(error) =
            connection.untracked.take().filter(|_| !self.warned_untracked.swap(true, Ordering::Relaxed))
        {
            let address = self.server.address.clone();
            self.server.background.log(move || {
                warn!(
                    target: "tower_lock",
                    "Redis at {address} does not say when it loses all keys, so that a lost lock is noticed by its next \
                     renewal: the ACL needs `+client|id +client|tracking`: {error}",
                );
            });
        }
        Session { messages: Arc::clone(self), connection, raw: HashSet::new() }
    }

    /// Leaves a server that is not the current one any more.
    async fn check_current(&self) {
        let Some(address) = self.server.topology.current().await else { return };
        let left: Vec<_> = self.server.connections().map(|connection| connection.link.leave_others(&address)).collect();
        if left.contains(&true) {
            self.inbox.connection_lost();
        }
    }

    /// Compares the server of the calls with the server of the subscription. After a failover
    /// behind one address the subscription may still be to the former master, which sends nothing.
    async fn check_subscribed(&self) {
        if let Some(channel) = self.inbox.subscribed_channel()
            && self.server.acquire_conn.subscriber_count(&channel, self.server.timeouts.call_deadline()).await
                == Some(0)
        {
            self.inbox.connection_lost();
        }
    }

    /// Passes each message to its manager, in the task that reads it.
    pub(super) fn on_message(self: &Arc<Self>) -> OnMessage {
        let messages = Arc::clone(self);
        Box::new(move |channel, payload| {
            if channel.is_empty() {
                return messages.inbox.send_all(&StoreEvent::Recovered);
            }
            let Ok(channel) = std::str::from_utf8(channel) else { return };
            let keyspace = &messages.server.keyspace;
            match keyspace.raw_channel(channel) {
                None => messages.inbox.send(channel, keyspace.parse_event(payload)),
                Some(raw) => messages.wakeups.event(raw).into_iter().for_each(|event| messages.inbox.send_all(&event)),
            }
        })
    }
}

impl Listen for Messages {
    type Listener = Session;

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Connects. The first connection is that of the self-test.
    async fn connect(self: &Arc<Self>) -> Option<Session> {
        if self.has_passed() {
            return self.server.subscribe(self.on_message()).await.ok().map(|connection| self.session(connection));
        }
        // Boxed: the nested future type is too deep for the compiler's default limit.
        let test: Pin<Box<dyn Future<Output = _> + Send + '_>> = Box::pin(self_test(&self.server, self.on_message()));
        match test.await {
            Ok((connection, _)) => {
                self.check_passed();
                Some(self.session(connection))
            }
            Err(error) => {
                // Each is logged once. A transient error may pass by itself.
                if error.is_transient {
                    self.warn_unreachable(error.error);
                } else {
                    self.check_failed(error.error);
                }
                None
            }
        }
    }

    async fn changed(&self) {
        self.wakeups.added.notified().await;
    }

    fn log_recovery(&self, duration: Duration) {
        let address = self.server.address.clone();
        self.server.background.log(move || {
            info!(target: "tower_lock", ?duration, "Redis at {address} can be reached again");
        });
    }
}

/// One connection, and the raw keys that are subscribed on it.
pub(super) struct Session {
    messages: Arc<Messages>,
    connection: Subscriptions,
    /// Also those that were refused.
    raw: HashSet<Channels>,
}

impl Listener for Session {
    type Error = RedisError;

    async fn ended(&mut self) {
        self.connection.ended().await;
    }

    async fn ping(&mut self) -> RedisResult<()> {
        self.connection.ping().await
    }

    async fn subscribe(&mut self, channels: &[String]) -> RedisResult<()> {
        self.connection.subscribe(channels).await
    }

    async fn unsubscribe(&mut self, channels: &[String]) -> RedisResult<()> {
        self.connection.unsubscribe(channels).await
    }

    /// Subscribes the raw keys that have waiters, and unsubscribes the others.
    async fn sync(&mut self) -> RedisResult<()> {
        let Changes { added, ended } = self.messages.wakeups.changes(&self.raw);
        if !ended.is_empty() {
            self.unsubscribe_raw(&ended).await?;
            self.raw.retain(|channels| !ended.contains(channels));
        }
        match self.subscribe_raw(&added).await {
            Err(error) if error.code() == Some("NOPERM") => {
                // One of them is refused, and the others are not.
                for channels in added {
                    if let Err(error) = self.subscribe_raw(std::slice::from_ref(&channels)).await {
                        self.refused(error)?;
                        // Alone, the own channel would hide a waiter of another program.
                        self.unsubscribe_raw(std::slice::from_ref(&channels)).await?;
                    }
                    self.raw.insert(channels);
                }
                Ok(())
            }
            subscribed => {
                self.raw.extend(added);
                subscribed
            }
        }
    }
}

impl Session {
    /// The own channel is first here, and last below: a process of ours never counts as another
    /// program.
    async fn subscribe_raw(&mut self, keys: &[Channels]) -> RedisResult<()> {
        if keys.is_empty() {
            return Ok(());
        }
        let channels = keys.iter().flat_map(|key| [&key.own_channel, &key.channel]).cloned().collect::<Vec<_>>();
        self.connection.subscribe(&channels).await?;
        for event in keys.iter().filter_map(|key| self.messages.wakeups.subscribed(key)) {
            self.messages.inbox.send_all(&event);
        }
        Ok(())
    }

    async fn unsubscribe_raw(&mut self, keys: &[Channels]) -> RedisResult<()> {
        let channels = keys.iter().flat_map(|key| [&key.channel, &key.own_channel]).cloned().collect::<Vec<_>>();
        match self.connection.unsubscribe(&channels).await {
            // The permission is optional. The end of this session would not help.
            Err(error) if error.code() == Some("NOPERM") => Ok(()),
            unsubscribed => unsubscribed,
        }
    }

    /// Warns once of a missing permission. Any other error ends the session.
    fn refused(&self, error: RedisError) -> RedisResult<()> {
        if error.code() != Some("NOPERM") {
            return Err(error);
        }
        let Messages { server, wakeups, .. } = &*self.messages;
        if wakeups.is_first_refusal() {
            let user = server.user.clone();
            server.background.log(move || {
                warn!(
                    target: "tower_lock",
                    "a key of `LockKey::raw` is in use, and the {user} of Redis has no permission for the channels \
                     `{REDISSON_CHANNEL}*`: waiters of Redisson and of this crate exclude each other, but do not wake each \
                     other. Add the ACL rule `&{REDISSON_CHANNEL}*`, or ignore this if no service with Redisson uses the key",
                );
            });
        }
        Ok(())
    }
}
