//! What a database brings: its driver, and its messages. And the arguments of its functions.

use std::{borrow::Cow, fmt, future::ready, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::error::{CallError, DriverError};
use crate::{
    acquisition::AcquisitionId,
    lock_key::LockKey,
    store::{
        EventSink, QueueConfig,
        remote::link::{Connect, Link},
    },
    trace::SectionTrace,
};

/// A database, whose connections have calls.
pub(crate) trait Database: Connect<Error = CallError<Self::DriverError>> + Sized {
    /// The name of the store, for errors.
    const STORE: &'static str;
    /// Whether waiters have a queue.
    const HAS_QUEUE: bool;
    /// Whether every release waits for the disk, and not only one with a record or a block. A
    /// request then waits for the end of a call that takes long, to share the next wait.
    const SYNCS_RELEASES: bool;
    /// When a waiter asks again that gets no messages: a random time between these.
    const POLL: [Duration; 2];

    /// The error of the driver.
    type DriverError: DriverError;
    /// The names of the tables and the functions.
    type Schema: fmt::Debug + Send + Sync;
    type Row: Row;
    type Messages: Messages;

    /// Calls a function once.
    fn call(
        connection: &Link<Self>,
        schema: &Self::Schema,
        function: &str,
        arguments: &[Argument<'_>],
        deadline: Instant,
    ) -> impl Future<Output = Result<Vec<Self::Row>, Self::Error>> + Send;

    /// Checks whether the tables are there, and the server accepts writes. Writes nothing.
    fn check(
        connection: &Link<Self>,
        schema: &Self::Schema,
        deadline: Instant,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Whether the database can have this text.
    fn has_text(_text: &str) -> bool {
        true
    }
}

/// The messages of a server to the managers of this process. By default there are none.
pub(crate) trait Messages: Send + Sync + 'static {
    fn are_sent(&self) -> bool {
        false
    }

    fn add(&self, _sink: EventSink) {}

    /// Waits until this manager is subscribed. `false`: it will not be soon.
    fn wait_subscribed(&self, _manager: &str) -> impl Future<Output = bool> + Send {
        ready(false)
    }

    /// Whether the messages that are sent arrive.
    fn are_subscribed(&self) -> impl Future<Output = bool> + Send {
        ready(true)
    }

    /// Receives for as long as the runtime lives.
    fn receive(self: Arc<Self>) -> impl Future<Output = ()> + Send {
        ready(())
    }
}

/// A row of a reply. `None`: the column is NULL, or of another type.
pub(crate) trait Row: Send + Sync {
    fn number(&self, column: usize) -> Option<i64>;
    fn text(&self, column: usize) -> Option<String>;
    fn bytes(&self, column: usize) -> Option<Vec<u8>>;
    fn numbers(&self, column: usize) -> Option<Vec<i64>>;
    fn texts(&self, column: usize) -> Option<Vec<String>>;
}

/// An argument of a function.
#[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "no database has a queue"))]
#[derive(Clone, Copy)]
pub(crate) enum Argument<'a> {
    Number(i64),
    Flag(bool),
    Time(Duration),
    Text(Option<&'a str>),
    Bytes(Option<&'a [u8]>),
    /// The terms of the queue: three arguments, or none in a database without a queue.
    Queue(&'a QueueConfig),
    /// The lease of an offer, or nothing.
    Offer(&'a QueueConfig),
    /// The names, the ids and the times of requests, and whether each of them waits in the queue.
    Requests(&'a Batch<'a>),
    /// The traces of requests: one argument, or none in a database without a queue.
    Traces(&'a Batch<'a>),
    /// The trace of a request, as well.
    Trace(Option<&'a SectionTrace>),
}

/// The requests of a call.
///
/// They are in the order of their names: calls that lock rows in the same order never wait for each
/// other.
pub(crate) struct Batch<'a> {
    pub(crate) requests: Vec<Named<'a>>,
    /// Where each of them belongs.
    pub(super) positions: Vec<usize>,
}

/// A request of a batch.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Named<'a> {
    pub(crate) name: Cow<'a, str>,
    pub(crate) id: String,
    /// The lease, or the block.
    pub(crate) time: Duration,
    /// Of an acquire.
    pub(crate) waits: Option<bool>,
    pub(crate) trace: Option<String>,
}

impl Messages for () {}

impl<'a> Batch<'a> {
    /// Without the requests whose key the database cannot have.
    pub(super) fn new<D: Database>(
        requests: impl Iterator<Item = (&'a LockKey, &'a AcquisitionId, Duration, Option<bool>, Option<&'a SectionTrace>)>,
    ) -> Self {
        let named = |(at, (key, id, time, waits, trace)): (_, (&'a LockKey, &AcquisitionId, _, _, Option<&_>))| {
            let trace = trace.map(SectionTrace::to_string);
            Some((Named { name: name::<D>(key)?, id: id.to_string(), time, waits, trace }, at))
        };
        let mut ordered: Vec<_> = requests.enumerate().filter_map(named).collect();
        ordered.sort_unstable();
        let (requests, positions) = ordered.into_iter().unzip();
        Self { requests, positions }
    }
}

/// The name of a key in the tables. No composed key has a `*`, so that a raw key with the same text
/// has another name. `None`: the database has no such text.
pub(crate) fn name<D: Database>(key: &LockKey) -> Option<Cow<'_, str>> {
    let name = if key.is_raw() { format!("*{}", key.as_str()).into() } else { Cow::from(key.as_str()) };
    D::has_text(&name).then_some(name)
}

/// The key with this name.
pub(crate) fn key(name: &str) -> LockKey {
    match name.strip_prefix('*') {
        Some(raw) => LockKey::from_raw_name(raw),
        None => LockKey::from_composed(name),
    }
}

/// A duration for the server in microseconds, at most 100 years.
pub(crate) fn micros(duration: Duration) -> i64 {
    const MAX: i64 = 100 * 366 * 86_400_000_000;
    i64::try_from(duration.as_micros()).unwrap_or(MAX).min(MAX)
}
