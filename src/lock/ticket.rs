//! Tickets: a key that stays locked between two requests.
//!
//! Work of several requests (reserve, pay, confirm) holds its key in between without a process that
//! renews it. The release of one step leaves the key to a ticket in the store, and the next step
//! takes its place. The store has a hash of the secret in the ticket, so that a listing of keys
//! lets nobody in.

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    str::FromStr,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Serialize, Serializer};
use sha2::{Digest, Sha256};

use super::status::whole_ms;
use crate::{
    acquisition::{AcquisitionId, MAX_SEQUENCE},
    error::LockError,
    limits::{MAX_TICKET_BYTES, MAX_TICKET_LABEL_BYTES, TICKET_GAP_MAX, TICKET_GAP_MIN},
    lock_key::{LockKey, hex},
    proto::GuardEnd,
    store::Heir,
};

/// Right to continue the work of an earlier request under its lock.
///
/// [`HeldLock::keep`](crate::HeldLock::keep) and
/// [`LockGuard::into_ticket`](crate::LockGuard::into_ticket) create a ticket, and
/// [`LockManager::redeem`](crate::LockManager::redeem) takes the key back, in any process. The text
/// of a ticket ([`Display`](fmt::Display), [`FromStr`], [`Serialize`]) contains a secret of 128
/// bits: give it to the client that continues the work, and to no log. [`Debug`](fmt::Debug) omits
/// the secret.
///
/// The text stays the same from step to step. A client that has lost a response presents the ticket
/// that it has.
#[derive(Clone, PartialEq, Eq)]
pub struct Ticket {
    key: LockKey,
    /// The start of the work, in milliseconds since the Unix epoch.
    start_ms: u64,
    /// For how long the key is kept after a step that failed.
    gap: Duration,
    /// 128 bits, in hexadecimal digits.
    secret: String,
    /// The name that a listing shows in place of that of an instance.
    label: String,
}

/// The name of a ticket that got none.
pub(crate) const UNNAMED: &str = "ticket";

/// Error of [`LockManager::redeem`](crate::LockManager::redeem) and
/// [`LockGuard::into_ticket`](crate::LockGuard::into_ticket).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// The ticket does not hold its key: it has expired, was given up or revoked, or another
    /// request uses it.
    #[error("the ticket does not hold its key: it has expired or was given up, or another request uses it")]
    NotHeld,
    /// The store failed or has no tickets, or the manager is shutting down. The key stays with the
    /// ticket.
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// Error of a text that is no [`Ticket`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the text is no ticket")]
#[non_exhaustive]
pub struct InvalidTicket;

/// The bounds that a layer sets for the tickets of its requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TicketTerms {
    /// Between two steps.
    pub(crate) gap: Duration,
    /// Of all steps.
    pub(crate) total: Duration,
}

/// What a section leaves to its ticket.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    pub(super) terms: Option<TicketTerms>,
    pub(super) ticket: Option<Ticket>,
    /// For how long the key is kept after an orderly end.
    pub(super) keep_for: Option<Duration>,
    /// The section continues the work of an earlier one: after a failure, too, the key is kept.
    pub(super) is_redeemed: bool,
}

impl Keeping {
    /// The acquisition that the key is left to after this end of the last guard.
    pub(super) fn heir(&self, end: &GuardEnd) -> Option<Heir> {
        let ticket = self.ticket.as_ref()?;
        let gap = match end {
            GuardEnd::Released => self.keep_for?,
            GuardEnd::ReleasedAfterFailure if self.is_redeemed => self.terms.map_or(ticket.gap, |terms| terms.gap),
            _ => return None,
        };
        let left = |terms: TicketTerms| terms.gap.min(terms.total.saturating_sub(ticket.age()));
        let lease = self.terms.map_or(gap, |terms| gap.min(left(terms)));
        (!lease.is_zero()).then(|| Heir::new(ticket.id(), lease))
    }

    /// The end of a guard, with the acquisition that the key is left to.
    pub(super) fn end(&self, end: GuardEnd) -> GuardEnd {
        self.heir(&end).map_or(end, |heir| GuardEnd::Kept(Arc::new(heir)))
    }
}

impl Ticket {
    pub(super) fn new(key: LockKey, gap: Duration, label: &str) -> Self {
        let gap = Duration::from_millis(whole_ms(gap));
        Self { key, start_ms: now_ms(), gap, secret: random(), label: label.to_owned() }
    }

    /// Returns the key that the ticket is for.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// How long ago the work began.
    fn age(&self) -> Duration {
        Duration::from_millis(now_ms().saturating_sub(self.start_ms))
    }

    /// The acquisition that holds the key for this ticket. The hash covers the whole text, in which
    /// each part has its name and an end: a client can neither change a part nor move its bounds.
    pub(crate) fn id(&self) -> AcquisitionId {
        let hash = Sha256::new_with_prefix(self.to_string());
        // Without a colon, which separates the parts of an id.
        let label: String = form_urlencoded::byte_serialize(self.label.as_bytes()).collect();
        AcquisitionId::of_ticket(&label, &hex(hash), self.start_ms)
    }

    /// Reads a text, which may have more in it than the ticket.
    fn read(text: &str) -> Option<Self> {
        let mut pairs = form_urlencoded::parse(text.as_bytes());
        let mut next = |name: &str| pairs.next().filter(|(found, _)| found == name).map(|(_, value)| value);
        Some(Self {
            key: LockKey::parse(&next("key")?)?,
            start_ms: next("start")?.parse().ok().filter(|start| *start <= MAX_SEQUENCE)?,
            gap: next("gap")?.parse().ok().map(Duration::from_millis).filter(is_gap)?,
            label: next("by").filter(|label| label.len() <= MAX_TICKET_LABEL_BYTES)?.into_owned(),
            secret: next("secret")?.into_owned(),
        })
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, start_ms, gap, secret, label } = self;
        let (start, gap) = (start_ms.to_string(), gap.as_millis().to_string());
        let pairs = [("key", key.as_str()), ("start", &start), ("gap", &gap), ("by", label), ("secret", secret)];
        f.write_str(&form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish())
    }
}

impl FromStr for Ticket {
    type Err = InvalidTicket;

    fn from_str(text: &str) -> Result<Self, InvalidTicket> {
        let read = Some(text).filter(|text| text.len() <= MAX_TICKET_BYTES).and_then(Self::read);
        // One text for each ticket.
        read.filter(|ticket| ticket.to_string() == text).ok_or(InvalidTicket)
    }
}

/// As its text, with the secret.
impl Serialize for Ticket {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("key", &self.key).field("start_ms", &self.start_ms).finish_non_exhaustive()
    }
}

/// A time between two steps. A shorter one would be over before a client has its response.
#[track_caller]
pub(crate) fn check_gap(gap: Duration) {
    assert!(
        is_gap(&gap),
        "a ticket cannot hold its key for {gap:?}: {TICKET_GAP_MIN:?} to {TICKET_GAP_MAX:?} are possible"
    );
}

fn is_gap(gap: &Duration) -> bool {
    (TICKET_GAP_MIN..=TICKET_GAP_MAX).contains(gap)
}

/// 128 bits that cannot be guessed: a hash of a counter under a key of this process. The keys of
/// the maps of the standard library are the random bits of the system that it gives out.
fn random() -> String {
    static KEY: LazyLock<[u64; 4]> = LazyLock::new(|| {
        let random = RandomState::new();
        [0, 1, 2, 3].map(|part| random.hash_one(part))
    });
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // A child of `fork()` has the same key and counter.
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Relaxed));
    hex(Sha256::new_with_prefix(format!("{:?} {process} {number}", *KEY)))
}

/// The start of a ticket is compared by other processes.
#[expect(clippy::disallowed_methods, reason = "the age of work over several processes needs the wall clock")]
fn now_ms() -> u64 {
    whole_ms(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also if the rest of the id is the same, as for a start that does not fit into a sequence.
    /// Guarantee: G24.
    #[test]
    fn hash_of_a_ticket_covers_each_part() {
        let ticket = Ticket::new(("k",).into(), Duration::from_secs(60), UNNAMED);
        let hash = |ticket: &Ticket| ticket.id().manager().rsplit_once('~').map(|(_, hash)| hash.to_owned());
        let changed = [
            Ticket { key: ("l",).into(), ..ticket.clone() },
            Ticket { start_ms: ticket.start_ms + MAX_SEQUENCE + 1, ..ticket.clone() },
            Ticket { gap: Duration::from_secs(61), ..ticket.clone() },
            Ticket { label: "Ann".to_owned(), ..ticket.clone() },
            Ticket { secret: random(), ..ticket.clone() },
        ];
        assert_eq!(hash(&ticket).map(|hash| hash.len()), Some(32));
        for other in changed {
            assert_ne!(hash(&other), hash(&ticket), "{other}");
        }
    }
}
