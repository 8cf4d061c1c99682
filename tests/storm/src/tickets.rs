//! A storm of work of several steps under tickets, beside plain sections of the same seats, in
//! processes that are killed. A ledger has the state of each seat.

use std::{collections::BTreeMap, io, net::SocketAddr, time::Duration};

use fastrand::Rng;
use tokio::{
    runtime::Handle,
    task::JoinHandle,
    time::{Instant, sleep},
};
use tower_lock::{
    LockGuard, LockManager, Ticket,
    lock::{ReleaseOutcome, TicketError},
};

use crate::{
    kills::Progress,
    ledger::{Ledger, LedgerClient, LedgerServer},
};

/// The seats of a storm.
#[derive(Debug)]
pub struct Seats(LedgerServer<Plan>);

#[derive(Debug, Default)]
struct Plan {
    seats: BTreeMap<String, Seat>,
    /// All tickets that were made, also those whose work has ended.
    tickets: Vec<String>,
    violations: Vec<String>,
    /// The sections that have ended, and those of them that have redeemed a ticket.
    done: u64,
    redeemed: u64,
    wanted: u64,
}

#[derive(Debug, Default)]
struct Seat {
    /// The connection of the section.
    open: Option<u64>,
    fence: u64,
    ticket: Option<Kept>,
}

/// The ticket of work that has not ended.
#[derive(Debug)]
struct Kept {
    ticket: String,
    /// Before the store has it.
    since: Instant,
    /// Whether the store has confirmed that it has it.
    is_certain: bool,
}

/// How long a ticket holds its seat.
const GAP: Duration = Duration::from_secs(3);
/// The tasks of a process.
const TASKS: u64 = 8;
const SEATS: u64 = 6;
/// The longest section.
const SECTION: Duration = Duration::from_millis(20);

impl Seats {
    /// Opens a ledger that ends the sections when so many are done.
    ///
    /// # Panics
    ///
    /// Panics without a free port.
    pub async fn open(wanted: u64) -> Self {
        Self(LedgerServer::start(Plan { wanted, ..Plan::default() }).await)
    }

    /// The address for [`travel`].
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// The number of sections.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let Plan { done, wanted, .. } = *self.0.lock();
        Progress { done, wanted }
    }

    /// Checks the rules: sections of a seat do not overlap, their fences rise, a ticket that holds
    /// its seat keeps all others out, and a ticket whose work has ended takes no seat.
    ///
    /// # Panics
    ///
    /// Panics if a rule is violated, or if too few tickets were redeemed.
    pub fn check(&self) {
        let Plan { violations, done, redeemed, .. } = &*self.0.lock();
        assert!(violations.is_empty(), "{violations:#?}");
        println!("{redeemed} of {done} sections have redeemed a ticket");
        assert!(redeemed * 5 > *done, "{redeemed} of {done}");
    }
}

impl Plan {
    fn begin(&mut self, connection: u64, name: &str, fence: u64, ticket: Option<&str>) {
        let seat = self.seats.entry(name.to_owned()).or_default();
        if let Some(other) = seat.open {
            self.violations.push(format!("{name}: {connection} beside {other}"));
        }
        if fence <= seat.fence {
            self.violations.push(format!("{name}: fence {fence} after {}", seat.fence));
        }
        match (&seat.ticket, ticket) {
            (None, Some(ticket)) => self.violations.push(format!("{name}: its work has ended: {ticket}")),
            (Some(kept), Some(ticket)) if kept.ticket != ticket => {
                self.violations.push(format!("{name}: taken by {ticket}: {kept:?}"));
            }
            (Some(kept), None) if kept.is_certain && kept.since.elapsed() < GAP => {
                self.violations.push(format!("{name}: taken by no ticket: {kept:?}"));
            }
            _ => {}
        }
        self.redeemed += u64::from(ticket.is_some());
        (seat.open, seat.fence) = (Some(connection), fence);
        // A process that is killed leaves no ticket behind.
        seat.ticket = None;
    }

    /// Ends the section of a connection. `kept` is the ticket that the seat is left to.
    fn end(&mut self, connection: u64, kept: Option<&str>) {
        let Some(seat) = self.seats.values_mut().find(|seat| seat.open == Some(connection)) else { return };
        seat.open = None;
        // The process may be killed before the store has the ticket.
        let kept_from_now = |ticket: &str| Kept { ticket: ticket.to_owned(), since: Instant::now(), is_certain: false };
        seat.ticket = kept.map(kept_from_now);
        self.done += 1;
        if let Some(ticket) = kept
            && !self.tickets.iter().any(|known| known == ticket)
        {
            self.tickets.push(ticket.to_owned());
        }
    }
}

impl Ledger for Plan {
    fn reply(&mut self, connection: u64, line: &str) -> Option<String> {
        let mut words = line.split(' ');
        match words.next()? {
            "begin" => {
                let (seat, fence, ticket) = (words.next()?, words.next()?.parse().ok()?, words.next());
                self.begin(connection, seat, fence, ticket);
            }
            "end" => self.end(connection, words.next()),
            // The store has confirmed that the ticket holds the seat.
            "sure" => {
                let seat = self.seats.get_mut(words.next()?)?;
                let fence: u64 = words.next()?.parse().ok()?;
                if let Some(kept) = seat.ticket.as_mut().filter(|_| seat.fence == fence) {
                    kept.is_certain = true;
                }
            }
            // An error of the store: a call may be executed later, or a release is repeated.
            "unsure" => {
                let ticket = words.next()?;
                let mut kept = self.seats.values_mut().filter_map(|seat| seat.ticket.as_mut());
                if let Some(kept) = kept.find(|kept| kept.ticket == ticket) {
                    kept.is_certain = false;
                }
            }
            "pick" if self.done >= self.wanted => return Some("closed".to_owned()),
            // Mostly one of the newest, so that two processes redeem one, and sometimes one whose
            // work has ended.
            "pick" => {
                let back: usize = words.next()?.parse().ok()?;
                let at = self.tickets.len().checked_sub(back + 1);
                return Some(at.map_or_else(|| "none".to_owned(), |at| self.tickets[at].clone()));
            }
            _ => return None,
        }
        Some("done".to_owned())
    }

    fn leave(&mut self, connection: u64) {
        self.end(connection, None);
    }
}

/// Starts the tasks of a process. Each ends when the ledger is closed.
#[must_use]
pub fn travel(locks: &LockManager, seats: SocketAddr, seed: u64) -> Vec<JoinHandle<io::Result<()>>> {
    let start = |task| {
        let (locks, rng) = (locks.clone(), Rng::with_seed(seed.wrapping_mul(10_000).wrapping_add(task)));
        Handle::current().spawn(async move { travel_on(&locks, seats, rng).await })
    };
    (0..TASKS).map(start).collect()
}

async fn travel_on(locks: &LockManager, address: SocketAddr, mut rng: Rng) -> io::Result<()> {
    let mut seats = LedgerClient::connect(address).await?;
    loop {
        let back = if rng.u8(0..8) == 0 { rng.usize(0..64) } else { rng.usize(0..8) };
        let picked = seats.ask(format!("pick {back}")).await?;
        if picked == "closed" {
            return Ok(());
        }
        let ticket = picked.parse::<Ticket>().ok().filter(|_| rng.u8(0..4) > 0);
        let granted = match &ticket {
            Some(ticket) => match locks.redeem(ticket).await {
                Ok(guard) => Some(guard),
                Err(TicketError::NotHeld) => None,
                // The store may have made the grant. Then its release is under way.
                Err(_) => {
                    seats.ask(format!("unsure {ticket}")).await?;
                    None
                }
            },
            None => {
                let wait = Duration::from_millis(rng.u64(0..200));
                locks.lock(("seat", rng.u64(0..SEATS))).wait(wait).await.ok()
            }
        };
        match granted {
            Some(guard) => step(guard, ticket.as_ref(), &mut seats, &mut rng).await?,
            None => sleep(SECTION.mul_f64(rng.f64() / 2.0)).await,
        }
    }
}

/// One section, which keeps its seat, or frees it.
async fn step(guard: LockGuard, ticket: Option<&Ticket>, seats: &mut LedgerClient, rng: &mut Rng) -> io::Result<()> {
    let (seat, fence) = (guard.key().as_str().to_owned(), guard.fencing_token());
    let of_ticket = ticket.map(|ticket| format!(" {ticket}")).unwrap_or_default();
    seats.ask(format!("begin {seat} {}{of_ticket}", fence.as_u64())).await?;
    sleep(SECTION.mul_f64(rng.f64())).await;
    // The ledger comes before the store: another process may have the seat at once.
    let kept = match (rng.u8(0..8), ticket) {
        (0..5, _) => {
            let kept = guard.held_lock().keep(GAP).map_err(io::Error::other)?;
            seats.ask(format!("end {kept}")).await?;
            Some(guard.release())
        }
        (5, Some(ticket)) => {
            seats.ask(format!("end {ticket}")).await?;
            Some(guard.release_after_failure())
        }
        (6, _) => {
            seats.ask("end".to_owned()).await?;
            drop(guard);
            None
        }
        _ => {
            seats.ask("end".to_owned()).await?;
            let _ = guard.release().await;
            None
        }
    };
    if let Some(release) = kept
        && matches!(release.await, Ok(ReleaseOutcome::Released))
    {
        seats.ask(format!("sure {seat} {}", fence.as_u64())).await?;
    }
    Ok(())
}
