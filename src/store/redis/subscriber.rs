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
    connection::{Lane, Limits},
    error::{RedisConnectError, Trouble},
    proto::Names,
    self_test::self_test,
    socket::Connector,
};
use crate::{
    limits::{QUEUE_POLL_INTERVAL, RETRY_MAX, RETRY_MIN, STORE_TIMEOUT},
    store::{EventSink, StoreEvent},
};

/// One connection on which Redis speaks to us, for all inboxes. It is made again when it breaks.
#[derive(Debug)]
pub(super) struct Events {
    connector: Connector,
    /// What of the address may be shown.
    pub(super) address: String,
    pub(super) names: Names,
    pub(super) limits: Limits,
    /// By channel.
    inboxes: Mutex<HashMap<String, Subscriber>>,
    /// An inbox was opened.
    opened: Notify,
    /// The server says that nobody listens to an inbox.
    unheard: Notify,
    /// The connections on which is asked: they are looked after from here, too.
    pub(super) lanes: [Arc<Lane>; 2],
    /// A call was answered: what does not listen may do so at once.
    recovered: Arc<Notify>,
    /// What came of the self-test.
    checked: watch::Sender<Check>,
    /// Since when nobody can be told anything.
    deaf_since: Mutex<Option<Instant>>,
    task: Mutex<Option<Task>>,
}

/// Whether the server can do what locks need.
#[derive(Clone, Debug)]
pub(super) enum Check {
    /// Nobody knows: it was not reached yet.
    Open,
    Passed,
    Failed(Arc<RedisConnectError>),
}

/// Who listens, and looks after the connections.
#[derive(Debug)]
struct Task {
    handle: AbortHandle,
    /// When it was last seen at work, each second or so: the runtime that it is on may be one that nobody drives.
    looked: Arc<Mutex<Instant>>,
}

#[derive(Debug)]
struct Subscriber {
    inbox: EventSink,
    /// Whether it was subscribed for once.
    listens: watch::Sender<bool>,
}

impl Events {
    /// How long somebody who lines up waits for his inbox to be heard: else he would be taken for dead, and lose his place. It is
    /// a round trip after it was opened; if it takes longer, check-ins find what it should have told.
    const FIRST_WORD: Duration = Duration::from_millis(250);
    /// So often the connections are asked whether they are alive: a cut one looks just like a quiet one.
    const LOOK: Duration = QUEUE_POLL_INTERVAL;
    /// A connection that listens is made anew within this time, or there is something wrong with it.
    const DEAF: Duration = STORE_TIMEOUT.saturating_mul(3);
    /// Somebody who has not looked for so long will not.
    const GONE: Duration = STORE_TIMEOUT.saturating_mul(4);

    pub(super) fn new(
        connector: Connector,
        address: String,
        names: Names,
        limits: Limits,
        lanes: [Arc<Lane>; 2],
        recovered: Arc<Notify>,
    ) -> Arc<Self> {
        let (inboxes, opened, unheard) = (Mutex::default(), Notify::new(), Notify::new());
        let (deaf_since, task) = (Mutex::default(), Mutex::default());
        let checked = watch::Sender::new(Check::Open);
        Arc::new(Self {
            connector,
            address,
            names,
            limits,
            inboxes,
            opened,
            unheard,
            lanes,
            recovered,
            checked,
            deaf_since,
            task,
        })
    }

    pub(super) fn open(&self, inbox: EventSink) {
        let channel = self.names.inbox(inbox.manager());
        self.inboxes().insert(channel, Subscriber { inbox, listens: watch::Sender::new(false) });
        self.opened.notify_one();
    }

    /// Completes when this process can be told something, or is not going to be soon. Which one of the two.
    pub(super) async fn listening(self: &Arc<Self>, process: &str) -> bool {
        self.start(None);
        let listens = self.inboxes().get(&self.names.inbox(process)).map(|subscriber| subscriber.listens.subscribe());
        let Some(mut listens) = listens else { return false };
        matches!(timeout(Self::FIRST_WORD, listens.wait_for(|listens| *listens)).await, Ok(Ok(_)))
    }

    /// Nobody can be told anything, and that is no hiccup: whoever lines up would be taken for dead each time, and never have a turn.
    pub(super) fn is_deaf(&self) -> bool {
        lock(&self.deaf_since).is_some_and(|since| since.elapsed() > Self::DEAF)
    }

    /// Whether there is a connection that is subscribed for all inboxes. One that was just opened has a moment to be subscribed for.
    pub(super) async fn is_listening(self: &Arc<Self>) -> bool {
        let processes: Vec<_> = {
            let inboxes = self.inboxes();
            let open = inboxes.values().filter(|subscriber| subscriber.inbox.is_open());
            open.map(|subscriber| subscriber.inbox.manager().to_owned()).collect()
        };
        for process in processes {
            if !self.listening(&process).await {
                return false;
            }
        }
        lock(&self.deaf_since).is_none()
    }

    pub(super) async fn connect(&self) -> Result<PubSub, Trouble> {
        let connection = timeout(self.limits.connect, self.connector.messages()).await;
        Ok(connection.map_err(|_| Trouble::NoConnection)??)
    }

    /// A connection that listens; the first one is that of the self-test.
    async fn listener(&self) -> Option<PubSub> {
        if matches!(*self.checked.borrow(), Check::Passed) {
            return self.connect().await.ok();
        }
        // A plain type: what is in there is nested deeply.
        let test: Pin<Box<dyn Future<Output = _> + Send + '_>> = Box::pin(self_test(self));
        match test.await {
            Ok((listener, _)) => {
                self.passed();
                Some(listener)
            }
            Err(failed) => {
                // It may be up in a moment; what it cannot do is told, once.
                if !failed.may_pass {
                    self.failed(failed.error);
                }
                None
            }
        }
    }

    /// The server can do what locks need.
    pub(super) fn passed(&self) {
        self.checked.send_replace(Check::Passed);
    }

    fn failed(&self, error: RedisConnectError) {
        #[cfg(feature = "tracing")]
        {
            let is_known =
                matches!(&*self.checked.borrow(), Check::Failed(known) if known.to_string() == error.to_string());
            if !is_known {
                tracing::error!(target: "tower_lock", "{error:?}");
            }
        }
        self.checked.send_replace(Check::Failed(Arc::new(error)));
    }

    /// What came of the self-test; it has until then.
    pub(super) async fn check(self: &Arc<Self>, by: Instant) -> Check {
        self.start(None);
        let mut checked = self.checked.subscribe();
        match timeout_at(by, checked.wait_for(|check| !matches!(check, Check::Open))).await {
            Ok(Ok(check)) => check.clone(),
            _ => Check::Open,
        }
    }

    /// Listens from this runtime, if no other one does: the one on which it was listened from may have ended.
    pub(super) fn start(self: &Arc<Self>, connection: Option<PubSub>) {
        let mut task = lock(&self.task);
        if task.as_ref().is_none_or(Task::is_gone)
            && let Ok(runtime) = Handle::try_current()
        {
            let looked = Arc::new(Mutex::new(Instant::now()));
            let run = Arc::clone(self).run(connection, Arc::clone(&looked));
            let gone = task.replace(Task { handle: runtime.spawn(run).abort_handle(), looked });
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
                sleep(Self::LOOK).await;
                *lock(&looked) = Instant::now();
                let [asks, ends] = &self.lanes;
                let (_, _) = tokio::join!(self.is_heard(asks), ends.ping(self.limits.by()));
            }
        };
        tokio::join!(self.listen(connection), look_after);
    }

    /// Whether the server that is asked is the one that speaks to us: after a failover behind one address the connection that listens may be to the
    /// old one still, which is well and says nothing.
    async fn is_heard(&self, lane: &Lane) {
        let listens =
            |(channel, subscriber): (&String, &Subscriber)| subscriber.listens.borrow().then(|| channel.clone());
        let Some(channel) = self.inboxes().iter().find_map(listens) else {
            return drop(lane.ping(self.limits.by()).await);
        };
        if lane.subscribers(&channel).await == Some(0) {
            self.unheard.notify_one();
        }
    }

    async fn listen(&self, mut connection: Option<PubSub>) {
        let mut pause = RETRY_MIN;
        loop {
            let connected = match connection.take() {
                Some(connection) => Some(connection),
                None => self.listener().await,
            };
            if let Some(connection) = connected {
                let (sink, stream) = connection.split();
                let mut listener = Listener { events: self, sink, channels: HashSet::new() };
                if listener.listen(stream).await {
                    pause = RETRY_MIN;
                }
            }
            lock(&self.deaf_since).get_or_insert_with(Instant::now);
            // Whoever lost its connection first is not to be the only one that keeps on trying.
            let rests = sleep(pause.mul_f64(0.5 + fastrand::f64()));
            pause = (2 * pause).min(RETRY_MAX);
            tokio::select! {
                () = rests => {}
                () = self.recovered.notified() => pause = RETRY_MIN,
            }
        }
    }

    fn tell(&self, channel: &str, event: StoreEvent) {
        // Not under the mutex: whoever is told may ask again from in there.
        let inbox = self.inboxes().get(channel).map(|subscriber| subscriber.inbox.clone());
        if let Some(inbox) = inbox {
            inbox.send(event);
        }
    }

    fn inboxes(&self) -> MutexGuard<'_, HashMap<String, Subscriber>> {
        lock(&self.inboxes)
    }
}

impl Task {
    fn is_gone(&self) -> bool {
        self.handle.is_finished() || lock(&self.looked).elapsed() > Events::GONE
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One connection, while it lasts.
struct Listener<'a> {
    events: &'a Events,
    sink: PubSubSink,
    /// What was subscribed on it.
    channels: HashSet<String>,
}

impl Listener<'_> {
    /// Until the connection breaks. Whether it worked at all.
    async fn listen(&mut self, mut messages: PubSubStream) -> bool {
        let mut worked = false;
        let mut looks = interval(Events::LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = messages.next() => {
                    let Some(message) = message else { return worked };
                    let event = self.events.names.event(message.get_payload_bytes());
                    self.events.tell(message.get_channel_name(), event);
                    continue;
                }
                () = self.events.opened.notified() => {}
                () = self.events.unheard.notified() => return worked,
                // The first tick comes at once.
                _ = looks.tick() => {
                    if !matches!(timeout(self.events.limits.call, self.sink.ping::<()>()).await, Ok(Ok(()))) {
                        return worked;
                    }
                }
            }
            if !matches!(timeout(self.events.limits.call, self.follow()).await, Ok(Ok(()))) {
                return worked;
            }
            worked = true;
            *lock(&self.events.deaf_since) = None;
        }
    }

    /// Subscribes for inboxes that were opened, and no longer for those that were closed.
    async fn follow(&mut self) -> RedisResult<()> {
        let (opened, closed) = {
            let mut inboxes = self.events.inboxes();
            inboxes.retain(|_, subscriber| subscriber.inbox.is_open());
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
                let inboxes = self.events.inboxes();
                inboxes.get(&channel).is_some_and(|subscriber| subscriber.listens.send_replace(true))
            };
            // What was said while nobody listened is lost (I7).
            if was_listening {
                self.events.tell(&channel, StoreEvent::Lagged);
            }
            self.channels.insert(channel);
        }
        Ok(())
    }
}
