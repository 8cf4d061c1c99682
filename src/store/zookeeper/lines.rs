//! The lines of keys in ZooKeeper.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use tokio::sync::Notify;

use super::{
    error::CallError,
    names,
    session::{self, Connector, Replies, Reply, send},
    wire::{self, Mode, NO_NODE, NODE_EXISTS, NOT_EMPTY, Request},
};
use crate::{
    clock::Clock,
    limits::{CONNECT_TIMEOUT, LOCK_DELAY},
    lock_key::LockKey,
    store::{
        StoreError, StoreErrorKind,
        line::{Block, Entry, Line, Lines, OnEvent, OwnEntry, Page},
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
    /// After this one a bucket is replaced.
    last_sequence: i32,
    timeouts: Timeouts,
    clock: Clock,
    /// Of the leader.
    server_clock: Mutex<ServerClock>,
}

/// The buckets of one page of a list.
const PAGE: usize = 4;

const USED_UP: &str = "the bucket of the key has given almost 2\u{b3}\u{b9} sequences, and waits to be empty";

impl ZooKeeper {
    pub(super) fn new(
        connector: Arc<Connector>,
        address: String,
        root: String,
        timeouts: Timeouts,
        last_sequence: i32,
    ) -> Self {
        // A server without a leader accepts connections, and does not reply: the next one may.
        let link = Link::new(Arc::clone(&connector), timeouts.connect.min(CONNECT_TIMEOUT), Arc::<Notify>::default());
        let (clock, server_clock) = (Clock::default(), Mutex::default());
        Self { link, connector, address, root, last_sequence, timeouts, clock, server_clock }
    }

    /// Opens a connection, makes the nodes that all locks share, and sends the first heartbeat.
    pub(super) async fn prepare(&self) -> Result<(), CallError> {
        self.link.ready().await?;
        self.make_root().await?;
        self.heartbeat().await
    }

    /// Makes the nodes that all locks share, if there are none, and checks those that are there.
    async fn make_root(&self) -> Result<(), CallError> {
        for (at, _) in self.root.match_indices('/').skip(1).chain([(self.root.len(), "")]) {
            let path = &self.root[..at];
            // An administrator may have made it below a node on which the user has no right.
            if !existed(&self.one(Request::exists(path)).await?)? {
                self.make(path, if path == self.root { names::ROOT_MARK } else { b"" }).await?;
            }
        }
        let [data, children] = self.flight([Request::data(&self.root, false), Request::children(&self.root)]).await?;
        let (data, children) = (data.map_err(CallError::Server)?, children.map_err(CallError::Server)?);
        let (mark, _) = wire::data(&data).ok_or(CallError::Protocol)?;
        let children = wire::names(&children).ok_or(CallError::Protocol)?;
        if mark != names::ROOT_MARK {
            // An administrator may have made it, with rights.
            if !mark.is_empty() || !children.is_empty() {
                return Err(CallError::ForeignRoot);
            }
            self.one(Request::set_data(&self.root, names::ROOT_MARK)).await?.map_err(CallError::Server)?;
        }
        if self.connector.is_private() {
            let paths = children.iter().map(|child| format!("{}/{child}", self.root)).chain([self.root.clone()]);
            for reply in self.flight_of_many(paths.map(|path| Request::rights(&path)).collect()).await? {
                // A node that others may write is one below which they can delete locks.
                if wire::is_open(&reply.map_err(CallError::Server)?).ok_or(CallError::Protocol)? {
                    return Err(CallError::OpenRoot);
                }
            }
        }
        self.make(&format!("{}/sessions", self.root), b"").await
    }

    /// The clock is the base of the fences of the bucket.
    async fn make_bucket(&self, bucket: &str) -> Result<(), CallError> {
        let now_us = UNIX_EPOCH.elapsed().unwrap_or_default().as_micros();
        self.make(bucket, now_us.to_string().as_bytes()).await
    }

    /// Deletes a bucket that has no nodes: its sequences begin again, and its fences go on.
    async fn replace_bucket(&self, bucket: &str) -> Result<(), CallError> {
        match self.one(Request::delete(bucket)).await? {
            Ok(_) | Err(NO_NODE | NOT_EMPTY) => Ok(()),
            Err(error) => Err(CallError::Server(error)),
        }
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
    async fn flight_of_many(&self, requests: Vec<Request>) -> Result<Replies, CallError> {
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let (deadline, mut unsent) = (self.timeouts.call_deadline(), Some(requests));
        let breaks = |reply: &Result<_, CallError>| reply.as_ref().is_err_and(CallError::breaks_connection);
        let replies = self.link.call(deadline, |connection| send(connection, &mut unsent), breaks).await?;
        if unsent.is_none() {
            return replies;
        }
        // The connection had ended before. The next one gets the requests.
        self.link.call(deadline, |connection| send(connection, &mut unsent), breaks).await?
    }

    async fn flight<const N: usize>(&self, requests: [Request; N]) -> Result<[Reply; N], CallError> {
        self.flight_of_many(requests.into()).await?.try_into().map_err(|_| CallError::Protocol)
    }

    async fn one(&self, request: Request) -> Result<Reply, CallError> {
        let [reply] = self.flight([request]).await?;
        Ok(reply)
    }

    fn bucket(&self, name: &str) -> String {
        format!("{}/{}", self.root, names::bucket(name))
    }

    /// The line of a key among the children of its bucket.
    async fn line_of(&self, name: &str, children: Reply) -> Result<Line, CallError> {
        let children = match children {
            Ok(body) => body,
            Err(NO_NODE) => return Ok(Line::default()),
            Err(error) => return Err(CallError::Server(error)),
        };
        let children = wire::names(&children).ok_or(CallError::Protocol)?;
        self.line_among(name, &children).await
    }

    async fn line_among(&self, name: &str, children: &[&str]) -> Result<Line, CallError> {
        let (bucket, mut entries, mut block) = (self.bucket(name), Vec::new(), None::<Block>);
        for child in children {
            let Some(rest) = child.strip_prefix(name).and_then(|rest| rest.strip_prefix('~')) else { continue };
            let handle = format!("{bucket}/{child}");
            match names::entry(rest) {
                // One that was made by hand may be beside it: the longest counts.
                Some((names::BLOCK, _)) => {
                    let read = self.read_block(&handle).await?;
                    block = block.into_iter().chain(read).max_by_key(|block: &Block| block.left);
                }
                Some((entry, sequence)) => entries.push((sequence, Entry { handle, name: entry.to_owned() })),
                None => {}
            }
        }
        entries.sort_by_key(|(sequence, _)| *sequence);
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
        // A block that was made by hand without a time ends, too.
        let time = time_ms.parse().map_or(LOCK_DELAY, Duration::from_millis);
        let estimate_us = self.server_clock.lock().expires_at(self.clock.now(), Duration::ZERO);
        let passed_ms = estimate_us.map_or(0, |us| (us / 1_000).saturating_sub(stat.created_ms));
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

    fn entry_path(&self, key: &str, name: &str) -> String {
        format!("{}/{key}~{name}-", self.bucket(key))
    }
}

/// The fence of the entry at this path, by its bucket.
fn fence(path: &str, bucket: Reply) -> Result<u64, CallError> {
    let bucket = bucket.map_err(CallError::Server)?;
    let base = wire::data(&bucket).and_then(|(text, _)| str::from_utf8(text).ok()?.parse::<u64>().ok());
    let sequence = names::sequence(path).and_then(|sequence| u64::try_from(sequence).ok());
    base.zip(sequence).map(|(base, sequence)| base.saturating_add(sequence)).ok_or(CallError::Protocol)
}

fn existed(reply: &Reply) -> Result<bool, CallError> {
    match reply {
        Ok(_) => Ok(true),
        Err(NO_NODE) => Ok(false),
        Err(error) => Err(CallError::Server(*error)),
    }
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
            // The session is new, or the servers have lost all data.
            Err(NO_NODE) => {
                self.make_root().await?;
                let made = self.one(self.create(&path, b"", Mode::Ephemeral)).await?.map_err(CallError::Server)?;
                wire::created(&made).map(|(_, stat)| stat)
            }
            Err(error) => return Err(CallError::Server(error)),
        };
        let changed_ms = stat.ok_or(CallError::Protocol)?.changed_ms;
        self.server_clock.lock().observe(changed_ms.saturating_mul(1_000), self.clock.now());
        Ok(())
    }

    async fn join(&self, key: &LockKey, name: &str, only_if_free: bool) -> Result<(Option<OwnEntry>, Line), CallError> {
        let escaped = names::escaped(key);
        let bucket = self.bucket(&escaped);
        if only_if_free && !self.line_of(&escaped, self.one(Request::children(&bucket)).await?).await?.is_free() {
            // As of now: a server that lags shows a holder that has left.
            let line = self.line(key).await?;
            if !line.is_free() {
                return Ok((None, line));
            }
        }
        let path = self.entry_path(&escaped, name);
        for _ in 0..3 {
            let create = self.create(&path, b"", Mode::EphemeralSequential);
            let requests = [create, Request::data(&bucket, false), Request::children(&bucket)];
            match self.flight(requests).await? {
                [Ok(made), data, children] => {
                    let (handle, _) = wire::created(&made).ok_or(CallError::Protocol)?;
                    if names::sequence(&handle).is_none_or(|sequence| sequence / 3 * 2 >= self.last_sequence) {
                        self.delete(&handle).await?;
                        self.replace_bucket(&bucket).await?;
                        return Err(CallError::Adapter(StoreErrorKind::Unavailable, USED_UP.to_owned()));
                    }
                    let own = OwnEntry { fence: fence(&handle, data)?, handle };
                    return Ok((Some(own), self.line_of(&escaped, children).await?));
                }
                [Err(NO_NODE), ..] => self.make_bucket(&bucket).await?,
                [Err(error), ..] => return Err(CallError::Server(error)),
            }
        }
        Err(CallError::Server(NO_NODE))
    }

    async fn line(&self, key: &LockKey) -> Result<Line, CallError> {
        let name = names::escaped(key);
        let bucket = self.bucket(&name);
        let [synced, children] = self.flight([Request::sync(&bucket), Request::children(&bucket)]).await?;
        existed(&synced)?;
        self.line_of(&name, children).await
    }

    async fn leave(&self, key: &LockKey, handle: &str) -> Result<(bool, Line), CallError> {
        let (name, bucket) = (names::escaped(key), names::parent(handle));
        let [deleted, children] = self.flight([Request::delete(handle), Request::children(bucket)]).await?;
        let line = self.line_of(&name, children).await?;
        if line.is_free() && names::sequence(handle) > Some(self.last_sequence) {
            self.replace_bucket(bucket).await?;
        }
        Ok((existed(&deleted)?, line))
    }

    /// The connection is a queue: an earlier create was executed, or never is.
    async fn purge(&self, key: &LockKey, name: &str) -> Result<(), CallError> {
        for entry in self.line(key).await?.entries.iter().filter(|entry| entry.name == name) {
            self.delete(&entry.handle).await?;
        }
        Ok(())
    }

    async fn replace(&self, key: &LockKey, handle: &str, name: &str) -> Result<Option<(OwnEntry, Line)>, CallError> {
        let (escaped, bucket) = (names::escaped(key), names::parent(handle));
        let create = self.create(&self.entry_path(&escaped, name), b"", Mode::EphemeralSequential);
        let multi = Request::multi([Request::delete(handle), create]);
        let requests = [multi, Request::data(bucket, false), Request::children(bucket)];
        let [replaced, data, children] = self.flight(requests).await?;
        match wire::multi(&replaced.map_err(CallError::Server)?).ok_or(CallError::Protocol)? {
            Ok(made) => {
                let (handle, _) = made.ok_or(CallError::Protocol)?;
                let own = OwnEntry { fence: fence(&handle, data)?, handle };
                Ok(Some((own, self.line_of(&escaped, children).await?)))
            }
            Err(NO_NODE) => Ok(None),
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
        let path = format!("{}/{}~{}-", names::parent(handle), names::escaped(key), names::BLOCK);
        let text = format!("{} {}", time.as_millis(), revoked.unwrap_or_default());
        // With a sequence: the end of a block must not be that of a later one.
        let create = self.create(&path, text.as_bytes(), Mode::Sequential);
        let reply = self.one(Request::multi([Request::delete(handle), create])).await?.map_err(CallError::Server)?;
        match wire::multi(&reply).ok_or(CallError::Protocol)? {
            Ok(made) => Ok(made.map(|(path, _)| path)),
            Err(NO_NODE) => Ok(None),
            Err(error) => Err(CallError::Server(error)),
        }
    }

    async fn unblock(&self, handle: &str) -> Result<(), CallError> {
        self.delete(handle).await.map(drop)
    }

    async fn exist(&self, handles: &[String]) -> Result<Vec<bool>, CallError> {
        let replies = self.flight_of_many(handles.iter().map(|handle| Request::exists(handle)).collect()).await?;
        replies.iter().map(existed).collect()
    }

    async fn watch(&self, handle: &str) -> Result<bool, CallError> {
        existed(&self.one(Request::data(handle, true)).await?)
    }

    async fn detail(&self, handle: &str) -> Result<Option<(u64, u64)>, CallError> {
        match self.flight([Request::exists(handle), Request::data(names::parent(handle), false)]).await? {
            [Ok(reply), bucket] => {
                let stat = wire::stat(&reply).ok_or(CallError::Protocol)?;
                Ok(Some((fence(handle, bucket)?, u64::try_from(stat.created_ms).unwrap_or(0))))
            }
            [Err(NO_NODE), _] => Ok(None),
            [Err(error), _] => Err(CallError::Server(error)),
        }
    }

    async fn page(&self, after: &str) -> Result<Page, CallError> {
        let count = names::BUCKETS as usize;
        let from = if after.is_empty() { Some(0) } else { after.parse().ok() };
        let unknown = || CallError::Adapter(StoreErrorKind::Refused, "the cursor is not one of a list".to_owned());
        let from: usize = from.filter(|from| *from < count).ok_or_else(unknown)?;
        let buckets = from..(from + PAGE).min(count);
        let requests = buckets.map(|n: usize| Request::children(&format!("{}/{n:02x}", self.root))).collect();
        let mut lines = Vec::new();
        for reply in self.flight_of_many(requests).await? {
            let body = match reply {
                Ok(body) => body,
                Err(NO_NODE) => continue,
                Err(error) => return Err(CallError::Server(error)),
            };
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
