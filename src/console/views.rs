//! The values of each view, and what they say in words. Their JSON has stable names.

use std::{
    borrow::Cow,
    time::{Duration, SystemTime},
};

use serde::{Serialize, Serializer, ser::SerializeStruct};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::text::{Count, Short};
use crate::{
    limits::LOCK_DELAY,
    lock::{Holding, LockStatus},
    lock_key::LockKey,
    store::{ForceReleaseReply, Holder},
    telemetry::waits::LongWait,
};

/// What this process holds, and the longest waits of its last minutes.
#[derive(Serialize)]
pub(super) struct ProcessView {
    pub(super) instance: String,
    pub(super) shutting_down: bool,
    pub(super) keys_redacted: bool,
    /// The number of holdings, of which the oldest ones are listed.
    pub(super) held: usize,
    pub(super) holding: Vec<Holding>,
    pub(super) waits: Vec<LongWait>,
}

/// Keys of all processes.
#[derive(Serialize)]
pub(super) struct KeysView {
    pub(super) keys_redacted: bool,
    /// `None`: not on this page.
    pub(super) contended: Option<KeyPage>,
    pub(super) all: Option<KeyPage>,
}

#[derive(Serialize)]
pub(super) struct KeyPage {
    pub(super) keys: Vec<KeyRow>,
    /// `None`: this is the last page.
    pub(super) next: Option<String>,
}

/// A key and its state.
#[derive(Serialize)]
pub(super) struct KeyRow {
    #[serde(flatten, serialize_with = "LockKey::serialize_fields")]
    pub(super) key: LockKey,
    pub(super) status: LockStatus,
}

#[derive(Serialize)]
pub(super) struct KeyView {
    pub(super) keys_redacted: bool,
    pub(super) may_revoke: bool,
    #[serde(flatten)]
    pub(super) row: KeyRow,
}

/// The reply of the store to a revocation, as the page of the key gets it in its query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    Revoked(usize),
    Unblocked,
    Free,
}

impl Serialize for LongWait {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { route, key, waited, result, ended } = self;
        let ended = Instant::now().saturating_duration_since(*ended);
        let mut state = serializer.serialize_struct("LongWait", 6)?;
        state.serialize_field("route", route.as_str())?;
        state.serialize_field("key", key.as_str())?;
        state.serialize_field("raw", &key.is_raw())?;
        state.serialize_field("waited_ms", &waited.as_millis())?;
        state.serialize_field("ended_ms_ago", &ended.as_millis())?;
        state.serialize_field("result", result)?;
        state.end()
    }
}

/// The instance of a holder, or its ticket.
pub(super) fn held_by(holder: &Holder) -> Cow<'_, str> {
    if holder.id.is_of_ticket() {
        format!("the ticket `{}`", holder.id.ticket_label()).into()
    } else {
        holder.id.instance().into()
    }
}

/// How long the holder has held its key, by the clocks of the store and of this process.
#[expect(clippy::disallowed_methods, reason = "the store tells the time of a grant by the wall clock")]
pub(super) fn age(holder: &Holder) -> Option<Duration> {
    holder.since.map(|since| SystemTime::now().duration_since(since).unwrap_or_default())
}

impl KeyView {
    /// What an operator asks first: who holds the key, since when, how many wait, and whether it
    /// may be revoked.
    pub(super) fn sentences(&self) -> Vec<String> {
        let LockStatus { holders, holding, remaining, record_left, kept_by, waiting, waiting_locally } =
            &self.row.status;
        let mut said = vec![match holders.first() {
            Some(first) => {
                let instance = held_by(first);
                let since = age(first).map(|age| format!(" for {}", Short(age))).unwrap_or_default();
                match holding {
                    0 | 1 => format!("Held by {instance}{since}."),
                    more => format!(
                        "Held by {more} holders: {instance}{since}, and {}.",
                        Count(more - 1, "other", "others")
                    ),
                }
            }
            None if *remaining == Duration::MAX => "Blocked without an end, and without a holder.".to_owned(),
            None if !remaining.is_zero() => format!("Without a holder, and blocked for another {}.", Short(*remaining)),
            None if kept_by.is_some() => "Without a holder.".to_owned(),
            None => "Free: the next call gets it.".to_owned(),
        }];
        if let Some(transaction) = kept_by {
            said.push(format!("Kept by {transaction}, until it ends."));
        }
        match holders.iter().filter(|holder| holder.connected == Some(false)).count() {
            0 => {}
            1 if *holding == 1 => said.push("Its process is not connected to the store.".to_owned()),
            dead => said.push(format!("{dead} of them are not connected to the store.")),
        }
        if !holders.is_empty() {
            said.push(match *remaining {
                Duration::MAX => "The key has no TTL: another program has written it.".to_owned(),
                left => format!("Without a renewal, the last lease ends in {}.", Short(left)),
            });
        }
        let here = Count(*waiting_locally, "call waits", "calls wait");
        said.push(format!("{}. {here} in this process.", Count(*waiting, "process waits", "processes wait")));
        if let Some(left) = record_left {
            said.push(format!("Its record is kept for another {}.", Short(*left)));
        }
        said.push(match (self.may_revoke, self.can_revoke()) {
            (true, true) => "You may revoke it.".to_owned(),
            (true, false) => "There is nothing to revoke.".to_owned(),
            (false, _) => "You may only read.".to_owned(),
        });
        said
    }

    /// Whether a revocation would change something.
    pub(super) fn can_revoke(&self) -> bool {
        !self.row.status.holders.is_empty() || !self.row.status.remaining.is_zero()
    }
}

impl Done {
    pub(super) fn of(reply: &ForceReleaseReply) -> Self {
        match reply {
            ForceReleaseReply::Revoked { holders } => Self::Revoked(holders.len()),
            ForceReleaseReply::Unblocked { .. } => Self::Unblocked,
            ForceReleaseReply::Free => Self::Free,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Revoked(_) => "revoked",
            Self::Unblocked => "unblocked",
            Self::Free => "free",
        }
    }

    pub(super) fn code(self) -> String {
        if let Self::Revoked(holders) = self { format!("revoked-{holders}") } else { self.name().to_owned() }
    }

    /// The reply for a program.
    pub(super) fn as_json(self, reply: &ForceReleaseReply) -> Value {
        let holders = if let ForceReleaseReply::Revoked { holders } = reply { &holders[..] } else { &[] };
        let blocked = (!holders.is_empty()).then_some(LOCK_DELAY);
        json!({ "reply": self.name(), "holders": holders, "blocked_ms": blocked.map(|blocked| blocked.as_millis()) })
    }

    /// `None`: no code. A text of somewhere else is never shown.
    pub(super) fn from_code(code: &str) -> Option<Self> {
        match code {
            "unblocked" => Some(Self::Unblocked),
            "free" => Some(Self::Free),
            _ => Some(Self::Revoked(code.strip_prefix("revoked-")?.parse::<u16>().ok()?.into())),
        }
    }

    pub(super) fn sentence(self) -> String {
        match self {
            Self::Revoked(holders) => format!(
                "Revoked from {}. The place of each stays blocked for {} s. A handler is aborted at its next await, \
                 and its client gets 503 `lost`. A handler with `OnLost::Continue` goes on.",
                Count(holders, "holder", "holders"),
                LOCK_DELAY.as_secs(),
            ),
            Self::Unblocked => "The key had no holder. Its block has ended, and the key is free.".to_owned(),
            Self::Free => "Nothing was revoked. The key was free, or this holder did not hold it any more.".to_owned(),
        }
    }
}
