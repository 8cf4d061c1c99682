//! The lines of keys in ZooKeeper.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::sync::Notify;

use super::{
    error::CallError,
    names,
    session::{self, Connector, Replies, send},
    wire::{self, Mode, NO_NODE, NODE_EXISTS, Request, Stat},
};
use crate::{
    acquisition::AcquisitionId,
    clock::Clock,
    lock_key::LockKey,
    store::{
        StoreError,
        line::{Block, Entry, Line, Lines, OnEvent, OwnEntry, Page, Replaced},
        remote::{link::Link, server_clock::ServerClock, settings::Timeouts},
    },
    sync::Mutex,
};

/// The lines below a root.
pub(super) struct ZooKeeper {
    link: Link<Connector>,
    connector: Arc<Connector>,
    pub(super) address: String,
    pub(super) root: String,
    /// Added to the number of a transaction: fences rise, although the servers may lose all data.
    fence_base: OnceLock<u64>,
    timeouts: Timeouts,
    clock: Clock,
    /// Of the leader.
    server_clock: Mutex<ServerClock>,
}

/// The buckets of one page of a list.
const PAGE: usize = 16;

impl ZooKeeper {
    pub(super) fn new(connector: Arc<Connector>, address: String, root: String, timeouts: Timeouts) -> Self {
        let link = Link::new(Arc::clone(&connector), timeouts.connect, Arc::<Notify>::default());
        let (clock, server_clock) = (Clock::default(), Mutex::default());
        Self { link, connector, address, root, fence_base: OnceLock::new(), timeouts, clock, server_clock }
    }

    /// Makes the nodes that all locks share, if there are none. Returns the time of the session.
    pub(super) async fn prepare(&self) -> Result<Duration, CallError> {
        let mut path = String::new();
        for part in self.root.split('/').skip(1).chain(["sessions"]) {
            path = format!("{path}/{part}");
            self.make(&path, b"").await?;
        }
        let base = format!("{}/base", self.root);
        let now_us = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros();
        self.make(&base, now_us.to_string().as_bytes()).await?;
        let reply = self.one(Request::data(&base, false)).await?.map_err(CallError::Server)?;
        let (text, _) = wire::data(&reply).ok_or(CallError::Protocol)?;
        let base = str::from_utf8(text).ok().and_then(|text| text.parse().ok()).ok_or(CallError::Protocol)?;
        let _ = self.fence_base.set(base);
        self.heartbeat().await?;
        Ok(self.session_time())
    }

    async fn make(&self, path: &str, data: &[u8]) -> Result<(), CallError> {
        match self.one(self.create(path, data, Mode::Persistent)).await? {
            Ok(_) | Err(NODE_EXISTS) => Ok(()),
            Err(error) => Err(CallError::Server(error)),
        }
    }

    fn create(&self, path: &str, data: &[u8], mode: Mode) -> Request {
        Request::create(path, data, mode, self.connector.is_private())
    }

    /// Sends requests together: they are executed in their order, with nothing of this process in
    /// between.
    async fn flight(&self, requests: Vec<Request>) -> Result<Replies, CallError> {
        let deadline = self.timeouts.call_deadline();
        let breaks = |reply: &Result<_, CallError>| reply.as_ref().is_err_and(CallError::breaks_connection);
        self.link.call(deadline, |connection| send(connection, requests), breaks).await?
    }

    async fn one(&self, request: Request) -> Result<Result<Vec<u8>, i32>, CallError> {
        self.flight(vec![request]).await?.pop().ok_or(CallError::Protocol)
    }

    fn bucket(&self, name: &str) -> String {
        format!("{}/{}", self.root, names::bucket(name))
    }

    fn fence(&self, stat: Stat) -> u64 {
        self.fence_base.get().copied().unwrap_or(0).saturating_add(stat.created)
    }

    /// The line of a key among the children of its bucket.
    async fn line_of(&self, name: &str, children: Result<Vec<u8>, i32>) -> Result<Line, CallError> {
        let children = match children {
            Ok(body) => body,
            Err(NO_NODE) => return Ok(Line::default()),
            Err(error) => return Err(CallError::Server(error)),
        };
        let children = wire::names(&children).ok_or(CallError::Protocol)?;
        self.line_among(name, &children).await
    }

    async fn line_among(&self, name: &str, children: &[&str]) -> Result<Line, CallError> {
        let (bucket, mut entries, mut block) = (self.bucket(name), Vec::new(), None);
        for child in children {
            let Some(rest) = child.strip_prefix(name).and_then(|rest| rest.strip_prefix('~')) else { continue };
            if rest == names::BLOCK {
                block = self.read_block(&format!("{bucket}/{child}")).await?;
            } else if let Some((id, sequence)) = names::entry(rest) {
                entries.push((sequence, Entry { handle: format!("{bucket}/{child}"), id: id.to_owned() }));
            }
        }
        entries.sort_by(|(one, _), (other, _)| names::compare(*one, *other));
        Ok(Line { entries: entries.into_iter().map(|(_, entry)| entry).collect(), block })
    }

    async fn read_block(&self, path: &str) -> Result<Option<Block>, CallError> {
        let reply = match self.one(Request::data(path, false)).await? {
            Ok(reply) => reply,
            Err(NO_NODE) => return Ok(None),
            Err(error) => return Err(CallError::Server(error)),
        };
        let (text, stat) = wire::data(&reply).ok_or(CallError::Protocol)?;
        let text = str::from_utf8(text).map_err(|_| CallError::Protocol)?;
        let (time_ms, revoked) = text.split_once(' ').unwrap_or((text, ""));
        let time = Duration::from_millis(time_ms.parse().map_err(|_| CallError::Protocol)?);
        let estimate_us = self.server_clock.lock().expires_at(self.clock.now(), Duration::ZERO);
        let passed_ms = estimate_us.map_or(0, |us| us / 1_000 - stat.created_ms);
        let left = time.saturating_sub(Duration::from_millis(u64::try_from(passed_ms).unwrap_or(0)));
        if left.is_zero() {
            self.delete(path).await?;
            return Ok(None);
        }
        Ok(Some(Block { handle: path.to_owned(), left, revoked: Some(revoked.to_owned()).filter(|id| !id.is_empty()) }))
    }

    async fn delete(&self, path: &str) -> Result<bool, CallError> {
        existed(&self.one(Request::delete(path)).await?)
    }

    /// An entry that a create has made.
    fn own(&self, (handle, stat): (String, Stat)) -> OwnEntry {
        OwnEntry { handle, fence: self.fence(stat) }
    }

    fn entry_path(&self, name: &str, id: &AcquisitionId) -> String {
        format!("{}/{name}~{id}-", self.bucket(name))
    }
}

fn existed(reply: &Result<Vec<u8>, i32>) -> Result<bool, CallError> {
    match reply {
        Ok(_) => Ok(true),
        Err(NO_NODE) => Ok(false),
        Err(error) => Err(CallError::Server(*error)),
    }
}

fn two(replies: Replies) -> Result<[Result<Vec<u8>, i32>; 2], CallError> {
    replies.try_into().map_err(|_| CallError::Protocol)
}

impl Lines for ZooKeeper {
    const STORE: &'static str = "zookeeper";
    type Error = CallError;

    fn store_error(&self, operation: &'static str, error: CallError) -> StoreError {
        StoreError::new(Self::STORE, operation, error.kind()).with_source(error.with_hint(&self.address))
    }

    fn on_event(&self, on_event: OnEvent) {
        let _ = self.connector.on_event.set(on_event);
    }

    fn session_time(&self) -> Duration {
        self.connector.session().1
    }

    /// A write: pings, reads and `sync` are also answered by a server that is cut off from the
    /// others.
    async fn heartbeat(&self) -> Result<(), CallError> {
        // Opens a connection, and with it a session.
        if self.connector.session().0 == 0 {
            self.link.ready().await?;
        }
        let path = format!("{}/sessions/{:x}", self.root, self.connector.session().0);
        let stat = match self.one(Request::set_data(&path, b"")).await? {
            Ok(reply) => wire::stat(&reply),
            Err(NO_NODE) => {
                let made = self.one(self.create(&path, b"", Mode::Ephemeral)).await?.map_err(CallError::Server)?;
                wire::created(&made).map(|(_, stat)| stat)
            }
            Err(error) => return Err(CallError::Server(error)),
        };
        let changed_ms = stat.ok_or(CallError::Protocol)?.changed_ms;
        self.server_clock.lock().observe(changed_ms.saturating_mul(1_000), self.clock.now());
        Ok(())
    }

    async fn join(
        &self,
        key: &LockKey,
        id: &AcquisitionId,
        only_if_free: bool,
    ) -> Result<(Option<OwnEntry>, Line), CallError> {
        let name = names::escaped(key);
        let bucket = self.bucket(&name);
        if only_if_free {
            // As of now: a server that lags would show a holder that has left.
            let line = self.line(key).await?;
            if !line.is_free() {
                return Ok((None, line));
            }
        }
        let path = self.entry_path(&name, id);
        for _ in 0..2 {
            let create = self.create(&path, b"", Mode::EphemeralSequential);
            match two(self.flight(vec![create, Request::children(&bucket)]).await?)? {
                [Ok(made), children] => {
                    let own = self.own(wire::created(&made).ok_or(CallError::Protocol)?);
                    return Ok((Some(own), self.line_of(&name, children).await?));
                }
                [Err(NO_NODE), _] => self.make(&bucket, b"").await?,
                [Err(error), _] => return Err(CallError::Server(error)),
            }
        }
        Err(CallError::Protocol)
    }

    async fn line(&self, key: &LockKey) -> Result<Line, CallError> {
        let name = names::escaped(key);
        let bucket = self.bucket(&name);
        let [synced, children] = two(self.flight(vec![Request::sync(&bucket), Request::children(&bucket)]).await?)?;
        existed(&synced)?;
        self.line_of(&name, children).await
    }

    async fn leave(&self, key: &LockKey, handle: &str) -> Result<(bool, Line), CallError> {
        let name = names::escaped(key);
        let children = Request::children(&self.bucket(&name));
        let [deleted, children] = two(self.flight(vec![Request::delete(handle), children]).await?)?;
        Ok((existed(&deleted)?, self.line_of(&name, children).await?))
    }

    /// The connection is a queue: an earlier create was executed, or never is.
    async fn purge(&self, key: &LockKey, id: &AcquisitionId) -> Result<(), CallError> {
        let id = id.to_string();
        for entry in self.line(key).await?.entries.iter().filter(|entry| entry.id == id) {
            self.delete(&entry.handle).await?;
        }
        Ok(())
    }

    async fn replace(&self, key: &LockKey, handle: &str, id: &AcquisitionId) -> Result<Replaced, CallError> {
        let name = names::escaped(key);
        let create = self.create(&self.entry_path(&name, id), b"", Mode::EphemeralSequential);
        let multi = Request::multi([Request::delete(handle), create]);
        let [replaced, children] = two(self.flight(vec![multi, Request::children(&self.bucket(&name))]).await?)?;
        match wire::multi(&replaced.map_err(CallError::Server)?).ok_or(CallError::Protocol)? {
            Ok(made) => {
                let own = self.own(made.ok_or(CallError::Protocol)?);
                Ok(Replaced::Done(own, self.line_of(&name, children).await?))
            }
            Err(NO_NODE) => Ok(Replaced::Gone),
            Err(error) => Err(CallError::Server(error)),
        }
    }

    async fn block(
        &self,
        key: &LockKey,
        handle: &str,
        time: Duration,
        revoked: Option<&str>,
    ) -> Result<Option<String>, CallError> {
        let name = names::escaped(key);
        let path = format!("{}/{name}~{}", self.bucket(&name), names::BLOCK);
        let text = format!("{} {}", time.as_millis(), revoked.unwrap_or_default());
        let create = self.create(&path, text.as_bytes(), Mode::Persistent);
        let reply = self.one(Request::multi([Request::delete(handle), create])).await?.map_err(CallError::Server)?;
        match wire::multi(&reply).ok_or(CallError::Protocol)? {
            Ok(_) => Ok(Some(path)),
            Err(NO_NODE) => Ok(None),
            Err(error) => Err(CallError::Server(error)),
        }
    }

    async fn unblock(&self, handle: &str) -> Result<(), CallError> {
        self.delete(handle).await.map(drop)
    }

    async fn exist(&self, handles: &[String]) -> Result<Vec<bool>, CallError> {
        if handles.is_empty() {
            return Ok(Vec::new());
        }
        let replies = self.flight(handles.iter().map(|handle| Request::exists(handle)).collect()).await?;
        replies.iter().map(existed).collect()
    }

    async fn watch(&self, handle: &str, watcher: &str) -> Result<bool, CallError> {
        self.connector.add_watch(handle, watcher);
        let watches = match self.one(Request::data(handle, true)).await {
            Ok(reply) => existed(&reply),
            Err(error) => Err(error),
        };
        if !matches!(watches, Ok(true)) {
            self.connector.take_watches(handle);
        }
        watches
    }

    async fn detail(&self, handle: &str) -> Result<Option<(u64, u64)>, CallError> {
        match self.one(Request::exists(handle)).await? {
            Ok(reply) => {
                let stat = wire::stat(&reply).ok_or(CallError::Protocol)?;
                Ok(Some((self.fence(stat), u64::try_from(stat.created_ms).unwrap_or(0))))
            }
            Err(NO_NODE) => Ok(None),
            Err(error) => Err(CallError::Server(error)),
        }
    }

    async fn page(&self, after: &str) -> Result<Page, CallError> {
        let (from, count) = (after.parse().unwrap_or(0), names::BUCKETS as usize);
        let buckets = from..(from + PAGE).min(count);
        let requests = buckets.map(|n: usize| Request::children(&format!("{}/{n:02x}", self.root))).collect();
        let mut lines = Vec::new();
        for reply in self.flight(requests).await? {
            let Ok(body) = reply else { continue };
            let children = wire::names(&body).ok_or(CallError::Protocol)?;
            let mut found: Vec<_> =
                children.iter().filter_map(|child| child.split_once('~')).map(|(name, _)| name).collect();
            found.sort_unstable();
            found.dedup();
            for name in found {
                if let Some(key) = names::key(name) {
                    lines.push((key, self.line_among(name, &children).await?));
                }
            }
        }
        let next = from + PAGE;
        Ok(Page { lines, next: (next < count).then(|| next.to_string()) })
    }

    fn close(&self) {
        if let Some(connection) = self.link.take() {
            session::close(&connection);
        }
    }
}

impl fmt::Debug for ZooKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZooKeeper").field("address", &self.address).field("root", &self.root).finish_non_exhaustive()
    }
}
