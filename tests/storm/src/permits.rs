//! A storm of permits of one key, beside readers and writers of another one, in tasks of one
//! process or of processes that are killed. The sections of a key are compared when all have ended.

use std::{collections::BTreeMap, io, net::SocketAddr, time::Duration};

use fastrand::Rng;
use futures_util::future::join_all;
use tokio::{
    runtime::Handle,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tower_lock::{LockManager, RunError};

use crate::{
    kills::Progress,
    ledger::{Ledger, LedgerClient, LedgerServer},
    now,
};

/// The sections of all processes.
#[derive(Debug)]
pub struct Visits(LedgerServer<Book>);

/// What the sections of a storm are like.
#[derive(Clone, Copy, Debug)]
pub struct Visitors {
    /// The limit of a permit.
    pub capacity: u16,
    /// The tasks of a process.
    pub tasks: u64,
    /// The longest section.
    pub section: Duration,
    /// Whether some sections are of readers and writers, and some calls are dropped.
    pub is_mixed: bool,
}

#[derive(Debug)]
struct Book {
    /// In the order in which they are reported.
    sections: Vec<Section>,
    /// The sections that have ended.
    done: u64,
    /// Sections are closed when so many are done.
    wanted: u64,
}

#[derive(Debug)]
struct Section {
    connection: u64,
    key: String,
    limit: usize,
    at: u64,
    end: Option<u64>,
}

/// How many sections a key had at a time.
#[derive(Clone, Debug, Default)]
pub struct Occupancy {
    /// The largest number.
    pub most: usize,
    /// The mean over time, from the first time at which the largest number was reached to the first
    /// section that was closed.
    pub mean: f64,
}

/// The limit of a reader, as the crate counts it.
const READER: usize = 1_024;
const PERMITS: &str = "exports";
const DOCUMENT: &str = "document";

impl Visits {
    /// Opens a ledger that ends the sections when so many are done.
    ///
    /// # Panics
    ///
    /// Panics without a free port.
    pub async fn open(wanted: u64) -> Self {
        Self(LedgerServer::start(Book { sections: Vec::new(), done: 0, wanted }).await)
    }

    /// The address for [`visit`].
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// The number of sections.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let Book { done, wanted, .. } = *self.0.lock();
        Progress { done, wanted }
    }

    /// The sections that began beside too many others, or beside one that is alone.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        let book = self.0.lock();
        let mut violations = Vec::new();
        for (key, steps) in book.steps() {
            let mut open = Vec::<&Section>::new();
            for (at, section, begins) in steps {
                if !begins {
                    open.retain(|other| !std::ptr::eq(*other, section));
                    continue;
                }
                if open.len() >= section.limit || open.iter().any(|other| other.limit == 1) {
                    let limits: Vec<_> = open.iter().map(|other| other.limit).collect();
                    violations.push(format!("{key} at {at}: {} beside {limits:?}", section.limit));
                }
                open.push(section);
            }
        }
        violations
    }

    /// How many permits were in use.
    #[must_use]
    pub fn permits(&self) -> Occupancy {
        self.occupancy(PERMITS)
    }

    /// How many sections of readers were open at a time.
    #[must_use]
    pub fn readers(&self) -> Occupancy {
        self.occupancy(DOCUMENT)
    }

    fn occupancy(&self, key: &str) -> Occupancy {
        let book = self.0.lock();
        let mut steps = book.steps();
        let steps = steps.remove(key).unwrap_or_default();
        let counts: Vec<_> = steps
            .iter()
            .scan(0_usize, |open, (at, _, begins)| {
                *open = if *begins { *open + 1 } else { *open - 1 };
                Some((*at, *open))
            })
            .collect();
        let most = counts.iter().map(|(_, open)| *open).max().unwrap_or_default();
        let from = counts.iter().position(|(_, open)| *open == most).unwrap_or_default();
        // The last section begins while others wait: afterwards they find the ledger closed.
        let to = steps.iter().rposition(|(.., begins)| *begins).unwrap_or_default();
        let between = counts.get(from..=to).unwrap_or_default();
        let area: f64 = between.windows(2).map(|pair| pair[0].1 as f64 * (pair[1].0 - pair[0].0) as f64).sum();
        let time = between.last().zip(between.first()).map_or(1, |(last, first)| last.0 - first.0);
        Occupancy { most, mean: area / time as f64 }
    }
}

impl Book {
    /// The starts and ends of sections by key, in the order of their times.
    fn steps(&self) -> BTreeMap<&str, Vec<(u64, &Section, bool)>> {
        let mut all = BTreeMap::<_, Vec<_>>::new();
        for section in &self.sections {
            let steps = all.entry(&*section.key).or_default();
            steps.push((section.at, section, true));
            steps.extend(section.end.map(|end| (end, section, false)));
        }
        // An end comes before a start of the same time.
        all.values_mut().for_each(|steps| steps.sort_by_key(|(at, _, begins)| (*at, *begins)));
        all
    }
}

impl Ledger for Book {
    fn reply(&mut self, connection: u64, line: &str) -> Option<String> {
        let mut words = line.split(' ');
        match words.next()? {
            "begin" if self.done >= self.wanted => return Some("closed".to_owned()),
            "begin" => {
                let (key, limit, at) = (words.next()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
                self.sections.push(Section { connection, key: key.to_owned(), limit, at, end: None });
            }
            "end" => {
                let at = words.next()?.parse().ok()?;
                self.end(connection, at);
                self.done += 1;
            }
            _ => return None,
        }
        Some("done".to_owned())
    }

    fn leave(&mut self, connection: u64) {
        self.end(connection, now());
    }
}

impl Book {
    fn end(&mut self, connection: u64, at: u64) {
        let open = |section: &&mut Section| section.connection == connection && section.end.is_none();
        if let Some(section) = self.sections.iter_mut().rev().find(open) {
            section.end = Some(at);
        }
    }
}

// === visitors ===

impl Visitors {
    /// Starts the tasks of a process. Each ends when the ledger is closed.
    #[must_use]
    pub fn start(self, locks: &LockManager, visits: SocketAddr, seed: u64) -> Vec<JoinHandle<io::Result<()>>> {
        let start = |task| {
            let rng = Rng::with_seed(seed.wrapping_mul(10_000).wrapping_add(task));
            let locks = locks.clone();
            Handle::current().spawn(async move { self.visit_one_by_one(&locks, visits, rng).await })
        };
        (0..self.tasks).map(start).collect()
    }

    /// Runs the tasks of a process to their end.
    ///
    /// # Errors
    ///
    /// Fails if the connection to the ledger breaks.
    pub async fn run(self, locks: &LockManager, visits: SocketAddr, seed: u64) -> io::Result<()> {
        let ended = join_all(self.start(locks, visits, seed)).await;
        ended.into_iter().try_for_each(|result| result.map_err(io::Error::other)?)
    }

    async fn visit_one_by_one(self, locks: &LockManager, address: SocketAddr, mut rng: Rng) -> io::Result<()> {
        let mut visits = LedgerClient::connect(address).await?;
        loop {
            let document = (DOCUMENT,);
            let wait = if self.is_mixed && rng.u8(0..8) == 0 { Duration::ZERO } else { Duration::from_secs(60) };
            let is_dropped = self.is_mixed && rng.u8(0..8) == 0;
            let limit = if is_dropped { self.section.mul_f64(rng.f64()) } else { Duration::from_secs(120) };
            let time = self.section.mul_f64(0.5 + rng.f64() / 2.0);
            let kind = if self.is_mixed { rng.u8(0..40) } else { u8::MAX };
            let mut section = async |key, limit| section(&mut visits, key, limit, time).await;
            let call = async {
                match kind {
                    0 => locks.lock(document).wait(wait).run(async |_| section(DOCUMENT, 1).await).await,
                    1..10 => locks.read(document).wait(wait).run(async |_| section(DOCUMENT, READER).await).await,
                    _ => {
                        let permit = locks.permit((PERMITS,), self.capacity).wait(wait);
                        permit.run(async |_| section(PERMITS, self.capacity.into()).await).await
                    }
                }
            };
            let ended = timeout(limit, call).await;
            match ended {
                Ok(Ok(Ok(true))) => {}
                // Rejected callers come back later.
                Ok(Err(RunError::NotStarted(_))) => sleep(time / 4).await,
                Ok(Ok(Ok(false))) => return Ok(()),
                Ok(Ok(Err(error))) => return Err(error),
                // In the middle of a section, perhaps: the closed connection ends it.
                Err(_) | Ok(Err(_)) => visits = LedgerClient::connect(address).await?,
            }
        }
    }
}

/// Whether the ledger was open.
async fn section(visits: &mut LedgerClient, key: &str, limit: usize, time: Duration) -> io::Result<bool> {
    if visits.ask(format!("begin {key} {limit} {}", now())).await? == "closed" {
        return Ok(false);
    }
    sleep(time).await;
    visits.ask(format!("end {}", now())).await?;
    Ok(true)
}
